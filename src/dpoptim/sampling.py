"""Which records take part in a step, and what the accountant may make of it.

A sampler owns both the draw and the event, so that what is sampled and what is accounted cannot drift apart.
"""

import math
from dataclasses import dataclass

import dp_accounting
import numpy as np
from numpy.typing import NDArray

from dpoptim.noise.stream import KeyStream

EXPECTED_GROUP = 104  # records; groups beyond 160 (5 standard deviations more) are summed more slowly


def into_groups(coins: KeyStream, indices: NDArray[np.int64], groups: int) -> list[NDArray[np.int64]]:
    """Deal a batch into groups: each record's group is a coin of its own; within a group the order stays.

    Args:
        indices: the records of a batch, shape (B,).
        groups: how many, a public number of at least 1.

    **Guarantee.** A record's group is independent of which other records there are. So with coupled coins, adding or
    removing one record changes its own group only, and the rounding of no other (`gradients.products`).
    """
    words = np.empty(len(indices), dtype=np.uint64)
    coins.words(words)
    labels = words % np.uint64(groups)
    order = np.argsort(labels, kind="stable")
    ends = np.cumsum(np.bincount(labels.astype(np.int64), minlength=groups))
    return np.split(indices[order], ends[:-1])


def number_of_groups(expected_batch: float, physical_batch_size: int | None) -> int:
    """Groups for a batch of this expected size, so that few outgrow what memory holds at once; public numbers only."""
    size = float(EXPECTED_GROUP)
    if physical_batch_size is not None:
        size = min(size, max(1.0, physical_batch_size - 2 * math.sqrt(physical_batch_size)))
    return max(1, math.ceil(expected_batch / size))


@dataclass(frozen=True)
class PoissonSampling:
    """Every record takes part in every step independently with probability ``sample_rate``.

    Args:
        sample_rate: q in (0, 1]; 1 takes every record in every step.
    """

    sample_rate: float

    def __post_init__(self) -> None:
        if not 0 < self.sample_rate <= 1:
            raise ValueError(
                f"sample_rate must be in (0, 1], got {self.sample_rate!r}; it is batch_size / n with batch_size <= n."
            )

    def event(self, step: dp_accounting.DpEvent, steps: int) -> dp_accounting.DpEvent:
        """The event of ``steps`` sampled steps."""
        if self.sample_rate < 1:
            step = dp_accounting.PoissonSampledDpEvent(self.sample_rate, step)
        return dp_accounting.SelfComposedDpEvent(step, steps)

    def draw(self, coins: KeyStream, records: int) -> NDArray[np.int64]:
        """Indices of the records of one step, ascending. One coin of 53 bits for each record.

        **Guarantee.** Each of the ``records`` indices is in the result independently of all others and of all other
        steps; the probability is ``sample_rate`` to 2^-53. The result is private.
        """
        return coins.coins(records, self.sample_rate)

    def capacity(self, n: int) -> int:
        """A size that a batch of ``n`` nominal records exceeds with negligible probability (public)."""
        if self.sample_rate == 1:
            return n
        expected = n * self.sample_rate
        return min(n, math.ceil(expected + 9 * math.sqrt(expected * (1 - self.sample_rate)) + 32))
