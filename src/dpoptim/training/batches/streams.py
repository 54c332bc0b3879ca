"""A stream as a data set: records are read once, in order, as their batches are wanted."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from dpoptim.errors import PrivacyError
from dpoptim.plan import Plan
from dpoptim.sampling import FixedBatches


def is_stream(train_set: Any) -> bool:
    """Whether records come in order only: an ``IterableDataset`` (WebDataset), an iterator."""
    by_index = hasattr(train_set, "__getitem__") or isinstance(train_set, DataLoader)
    return isinstance(train_set, IterableDataset) or (
        hasattr(train_set, "__iter__") and not by_index
    )


def records_of_stream(plan: Plan, stream: Any, rank: int = 0, parts: int = 1) -> "StreamRecords":
    """The records of ``stream`` for a plan that takes disjoint batches in the given order.

    Args:
        rank, parts: where the plan's records come in streams of several ranks, which have equally
            many of them, but the first ones one more, as of ``records[rank::parts]``.

    Raises:
        PrivacyError: the plan samples, shuffles, or takes more than one pass.
    """
    sampler = plan.sampler
    if not isinstance(sampler, FixedBatches):
        wrong = "samples records by index"
    elif sampler.order != "given":
        wrong = f'takes them in an order of its own (order="{sampler.order}")'
    elif plan.steps > sampler.steps_per_pass:
        wrong = "passes over them more than once"
    else:
        own = len(range(rank, plan.n, parts))
        whose = f"its part of the plan's n={plan.n}, {own}" if parts > 1 else f"the plan's n={own}"
        return StreamRecords(stream, own, keep=2 * sampler.batch_size, whose=whose)
    raise PrivacyError(
        f"train_set is a stream, whose records come in order and once, and the plan {wrong}. Fix: "
        'dpoptim.DPFTRL(..., order="given").plan(epochs=1, ...), which takes them as they come; '
        "or a map-style data set (a memory-mapped array, or an Arrow table of Hugging Face's "
        "datasets, of any size on disk)."
    )


class StreamRecords(Dataset[Any]):
    """The first ``records`` of a stream, by index, near the place up to which it has been read.

    Args:
        stream: iterated over once.
        records: how many there are; public.
        keep: records that stay in memory behind the last one that was read, so that an interrupted
            step finds its own.
        whose: how many they should be, in words.
    """

    def __init__(self, stream: Any, records: int, *, keep: int, whose: str) -> None:
        self._stream, self._records, self._keep, self._whose = stream, records, keep, whose
        self._iterator: Iterator[Any] | None = None
        self._read = 0
        self._kept: dict[int, Any] = {}

    def __len__(self) -> int:
        return self._records

    def __getitem__(self, index: int) -> Any:
        """The record of this index; what lies between is read, and forgotten.

        Raises:
            ValueError: the stream has fewer records than the plan, or the index lies far behind.
        """
        self._read_up_to(index)
        if index not in self._kept:
            raise ValueError(
                "a stream was asked for records that it gave long ago. Fix: a map-style data set."
            )
        return self._kept[index]

    def _read_up_to(self, index: int) -> None:
        if self._iterator is None:
            self._iterator = iter(self._stream)
        while self._read <= index:
            try:
                self._kept[self._read] = next(self._iterator)
            except StopIteration:
                raise ValueError(
                    f"the stream ended before {self._whose} records. Fix: plan(n=...) for as many "
                    "as all streams of the run have (the ranks' ones equally many, but for the "
                    "remainder); or a stream of records, not of batches."
                ) from None
            self._kept.pop(self._read - self._keep, None)
            self._read += 1
