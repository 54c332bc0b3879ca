"""From indices to collated microbatches.

PyTorch's DataLoader, and what loops expect of an iterable.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpoptim.errors import PrivacyError
from dpoptim.training.batches.collation import CollatePresent, collate_records
from dpoptim.training.batches.empty_slots import fixed_shape
from dpoptim.training.batches.microbatches import Microbatch, MicrobatchSampler
from dpoptim.training.batches.privacy_units import CollateRows, rows_of_tensors
from dpoptim.training.batches.slots import SlotSampler
from dpoptim.training.batches.streams import StreamRecords
from dpoptim.training.batches.user_code import Quiet, quiet_collate
from dpoptim.training.batches.worker_messages import IndexMessage, Sending

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class LoaderOptions:
    """Options of ``torch.utils.data.DataLoader`` that say how records are read, not which."""

    num_workers: int = 0
    collate_fn: Collate | None = None
    pin_memory: bool = False
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    multiprocessing_context: Any = None
    worker_init_fn: Callable[[int], None] | None = None
    timeout: float = 0

    @property
    def plain(self) -> bool:
        """Whether records are read here and collated as usual."""
        return self.num_workers == 0 and self.collate_fn is None and not self.pin_memory


def load_microbatches(
    dataset: Dataset[Any],
    sampler: MicrobatchSampler | SlotSampler,
    options: LoaderOptions,
    stacked: int = 1,
    fixed_items: int | None = None,
) -> Iterator[tuple[Any, Microbatch]]:
    """The collated microbatches with their notes, in order.

    Args:
        stacked: rows in an item of the data set; more than one are collated one by one.
        fixed_items: in every microbatch, made-up ones for empty slots included; None: as many as
            take part.
    """
    if isinstance(dataset, StreamRecords) and fixed_items is not None:
        raise PrivacyError(
            "fixed_shape=True places records at random, and a stream gives them in order. Fix: "
            "leave it out."
        )
    if isinstance(dataset, StreamRecords) and options.num_workers > 0:
        raise PrivacyError(
            "num_workers would let each worker read a stream of its own, and records could take "
            "part twice. Fix: num_workers=0, and workers inside the stream (iterate over a "
            "DataLoader with batch_size=None in it)."
        )
    given = quiet_collate(options.collate_fn)
    collate_fn: Collate | None = given if stacked == 1 else CollateRows(stacked, given)
    if type(dataset) is TensorDataset and options.collate_fn is None:
        whole = WholeBatches(dataset, stacked)
        if options.plain:
            for indices in sampler.microbatches():
                yield whole.batch(torch.from_numpy(indices)), sampler.drawn.popleft()
            return
        dataset, collate_fn = whole, as_read
    else:
        dataset = Quiet(dataset)
        if fixed_items is not None:
            dataset, collate_fn = fixed_shape(
                dataset, collate_fn, fixed_items, own=options.collate_fn is not None
            )
    collate_fn = CollatePresent(collate_fn or collate_records)
    loader = DataLoader(
        dataset,
        batch_sampler=Indexed(sampler, for_workers=options.num_workers > 0),
        **{
            **vars(options),
            "collate_fn": Sending(collate_fn) if options.num_workers else collate_fn,
        },
    )
    for batch in loader:
        yield batch, sampler.drawn.popleft()


@dataclass(frozen=True)
class Indexed:
    """The indices of each microbatch as a DataLoader takes them."""

    sampler: MicrobatchSampler | SlotSampler
    for_workers: bool

    def __iter__(self) -> Iterator[Any]:
        for indices in self.sampler.microbatches():
            yield IndexMessage(indices) if self.for_workers else indices.tolist()


class WholeBatches(Dataset[Any]):
    """Reads a `TensorDataset`'s batches as DataLoader would, without a call for each record."""

    def __init__(self, dataset: TensorDataset, stacked: int) -> None:
        self._tensors, self._stacked = dataset.tensors, stacked

    def batch(self, indices: Tensor) -> list[Tensor]:
        return rows_of_tensors(self._tensors, indices, self._stacked)

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        """Read for DataLoader's workers."""
        return self.batch(torch.tensor(indices))


def as_read(batch: Any) -> Any:
    """Leave a batch alone that was read as a whole."""
    return batch


class NoDataSetError(PrivacyError, AttributeError):
    """A loop's batches were asked for their data set."""


class Batches:
    """The batches of a loop: an iterator, with a length where that is public.

    Args:
        delivered: batches, one after the other.
        steps_left: how many there are; None where steps are cut to fit memory, and their number
            depends on who takes part.
    """

    def __init__(self, delivered: Iterator[Any], steps_left: int | None) -> None:
        self._delivered, self._left = delivered, steps_left

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Any:
        batch = next(self._delivered)
        if self._left is not None:
            self._left -= 1
        return batch

    def __len__(self) -> int:
        """Batches that remain; public.

        Raises:
            TypeError: with ``physical_batch_size`` their number is private.
        """
        if self._left is None:
            raise TypeError(
                "with physical_batch_size the number of batches depends on who takes part, which "
                "is private. Fix: private.steps(physical_batch_size=...), which has as many items "
                "as there are steps."
            )
        return self._left

    @property
    def dataset(self) -> NoReturn:
        """None: see the error, which ``hasattr`` takes for an answer."""
        raise NoDataSetError(
            "private.batches() is no DataLoader: it has no dataset that others could draw from, "
            "and who skips its first batches (Accelerate's skip_first_batches) leaves out steps of "
            "the plan. Fix: dpoptim.attach(..., resume=path), whose batches begin after the last "
            "step before private.save(path); plan.n for the number of records."
        )

    def __repr__(self) -> str:
        left = "microbatches" if self._left is None else f"{self._left} batches"
        return f"<private batches: {left} to come>"

    def __length_hint__(self) -> int:
        return NotImplemented if self._left is None else self._left
