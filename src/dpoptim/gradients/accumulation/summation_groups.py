"""Groups in which a batch's records are summed; one's group says nothing of the others."""

import math

import numpy as np
from numpy.typing import NDArray

from dpoptim.noise.stream import KeyStream

Indices = NDArray[np.int64]
# records; groups beyond 160 (5 standard deviations more) are summed more slowly
EXPECTED_GROUP = 104


def into_groups(coins: KeyStream, indices: Indices, groups: int) -> list[Indices]:
    """Deal a batch into groups by a coin for each record; in a group the order stays.

    Args:
        indices: the records of a batch, shape (B,).
        groups: how many, a public number of at least 1.

    **Guarantee.** A record's group is independent of which other records there are. So with
    coupled coins, adding or removing one record changes its own group only, and the rounding of no
    other (`gradients.arithmetic.products`).
    """
    if groups == 1:
        return [indices]
    words = np.empty(len(indices), dtype=np.uint64)
    coins.words(words)
    # short ones are sorted by their digits, in a fifth of the time
    labels = (words % np.uint64(groups)).astype(np.uint16 if groups <= 1 << 16 else np.int64)
    dealt = indices[np.argsort(labels, kind="stable")]
    ends = np.cumsum(np.bincount(labels, minlength=groups)).tolist()
    return [dealt[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def number_of_groups(expected_batch: float, physical_batch_size: int | None) -> int:
    """Groups for a batch of this expected size, so that few outgrow memory; public numbers only."""
    size = float(EXPECTED_GROUP)
    if physical_batch_size is not None:
        size = min(size, max(1.0, physical_batch_size - 2 * math.sqrt(physical_batch_size)))
    return max(1, math.ceil(expected_batch / size))
