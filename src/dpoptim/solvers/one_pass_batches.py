"""Data seen once: a fixed partition into equal batches, each record in one only."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import default_collate

from dpoptim.data.sparse_rows import rows_at_once

CHUNK = 8192  # records handed on at a time; a batch may be larger than memory


def batches_in_order(
    data: Sequence[Any] | Iterable[Any], batch_size: int, steps: int
) -> Iterator[Iterator[tuple[Any, ...]]]:
    """Batch t: records from t * batch_size to (t + 1) * batch_size, in order, in chunks.

    Args:
        data: a tuple of arrays of equal length, records on the first axis (tensors, numpy arrays,
            memory maps); or an iterable of records, each a tuple of tensors or numbers of the same
            shapes, which is read once and no further than needed. What it raises is passed on, so
            it must not fail because of what a record holds.
        batch_size: B, a public number; 0 for a process without a part in the batches.
        steps: T; batch_size * steps records are used, and what is left over is not looked at.

    Raises:
        ValueError: arrays of unequal length, or too few records. (Their number is public under the
            relations of the single-pass solvers.)
    """
    wanted = batch_size * steps
    if isinstance(data, tuple):
        lengths = {len(part) for part in data}
        if len(lengths) != 1:
            raise ValueError(
                f"data must be arrays of one length, got lengths {[len(part) for part in data]}."
            )
        if (n := lengths.pop()) < wanted:
            raise too_few(n, batch_size, steps)
        return (batch_slices(data, t * batch_size, (t + 1) * batch_size) for t in range(steps))
    records = iter(data)
    return (collated(records, batch_size, steps) for _ in range(steps))


def batch_slices(data: tuple[Any, ...], start: int, stop: int) -> Iterator[tuple[Any, ...]]:
    at_once = rows_at_once(math.prod(getattr(data[0], "shape", (0, 1))[1:]), CHUNK)
    for first in range(start, stop, at_once):
        yield tuple(part[first : min(first + at_once, stop)] for part in data)


def collated(records: Iterator[Any], batch_size: int, steps: int) -> Iterator[tuple[Any, ...]]:
    left = batch_size
    while left:
        chunk = list(itertools.islice(records, min(CHUNK, left)))
        if not chunk:
            raise too_few(None, batch_size, steps)
        left -= len(chunk)
        yield tuple(default_collate(chunk))


def too_few(n: int | None, batch_size: int, steps: int) -> ValueError:
    have = "ended early" if n is None else f"has {n} records"
    return ValueError(
        f"data {have}, but {steps} batches of {batch_size} need {batch_size * steps}; take fewer "
        "steps or smaller batches."
    )
