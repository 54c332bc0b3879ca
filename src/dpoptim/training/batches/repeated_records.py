"""Records that lie at several places of a data set, or in the data sets of several ranks.

Oversampling by `Subset`, a list taken twice, and `DistributedSampler`, which fills shards up, all
make one record count as several. Where a data set shows which stored record each of its places
holds, that is refused; code of its own, and copies, are on trust.
"""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from dpoptim.data.views import Views
from dpoptim.distributed.agreement import is_arrow_table, some_records_of
from dpoptim.distributed.ranks import Ranks
from dpoptim.errors import PrivacyError, RankError

Places = NDArray[np.int64]
Part = tuple[Any, Places | None]  # a store, and which of its records
OBJECTS = (Tensor, np.ndarray, dict, list, tuple)  # others may be one object by chance: numbers


def stores_of(train_set: Any, places: Places | None = None) -> Iterator[Part]:
    """Stores of a data set's records, and which of these it takes; None: all, once. Private.

    Args:
        places: those of ``train_set`` that are taken; may repeat.
    """
    if isinstance(train_set, Subset):
        indices = np.asarray(train_set.indices, dtype=np.int64).reshape(-1)
        indices = np.where(indices < 0, indices + len(train_set.dataset), indices)  # type: ignore[arg-type]
        yield from stores_of(train_set.dataset, indices if places is None else indices[places])
    elif isinstance(train_set, ConcatDataset):
        starts = [0, *train_set.cumulative_sizes]
        for part, start, end in zip(train_set.datasets, starts, starts[1:], strict=False):
            inside = (
                None
                if places is None
                else places[(places >= start) & (places < end)] - np.int64(start)
            )
            yield from stores_of(part, inside)
    elif isinstance(train_set, Views):
        yield from stores_of(train_set.dataset, places)
    else:
        yield train_set, places


@dataclass(frozen=True)
class ArrowBuffer:
    """Memory with a column of records of Hugging Face's `datasets`."""

    address: int


def in_memory(train_set: Any) -> Iterator[Part]:
    """`stores_of` a data set, by the memory that tables of `datasets` share.

    So what was selected from one of them, or joined, is known again in this process.
    """
    for store, places in stores_of(train_set):
        if is_arrow_table(store):
            yield from arrow_buffers(store, places)
        else:
            yield store, places


def arrow_buffers(dataset: Any, places: Places | None) -> Iterator[Part]:
    rows: Places = np.arange(len(dataset.data), dtype=np.int64)
    if dataset._indices is not None:
        rows = dataset._indices.column(0).to_numpy().astype(np.int64)
    rows = rows if places is None else rows[places]
    start = 0
    for chunk in dataset.data.table.column(0).chunks if dataset.data.num_columns else ():
        inside = rows[(rows >= start) & (rows < start + len(chunk))] - start + chunk.offset
        start += len(chunk)
        buffer = next((each for each in chunk.buffers() if each is not None), None)
        if buffer is not None:
            yield ArrowBuffer(buffer.address), inside


OVERLAPPING = (
    "records of train_set overlap in memory, as windows of a series do, "
    "TensorDataset(series.unfold(0, 7, 1)): each window is a record, so that whoever a stretch of "
    "the series belongs to is in several, and is not hidden by a guarantee for one. Fix: "
    "attach(..., persons=owners), which names whose each window is; or windows that do not "
    "overlap, unfold(0, 7, 7), and one for each owner."
)
FIXES = {
    "train_set": "it would be drawn, and clipped, each time, beyond what the guarantee is for. "
    "Fix: each record once (class weights that are public, in the loss, do what oversampling does; "
    "dpoptim.data.views makes several views of one); or attach(..., persons=...), which names the "
    "record behind each item.",
    "hold_out": "it would be scored each time, beyond what the guarantee is for. Fix: each record "
    "once.",
}


def refuse_repeated_records(data: Dataset[Any], name: str = "train_set") -> None:
    """Refuse a data set that shows one record at two of its places.

    Args:
        name: of the argument that it is, in `FIXES`.

    Raises:
        PrivacyError: it does; which record, and how often, is not said.

    **Guarantee.** Of `TensorDataset`, lists of objects, Hugging Face's `datasets`, and any other
    data set through `Subset`, `ConcatDataset` and `views`, each stored record is one item, which
    coins draw and clipping bounds once, or which is scored once. Rows of tensors count as records
    of their own: that they are not copies, nor the same memory (``expand``, slices that overlap),
    is on trust.
    """
    found: dict[Any, list[Part]] = {}
    for store, places in in_memory(data):
        found.setdefault(name_of(store), []).append((store, places))
    if any(repeats(name, parts) for name, parts in found.items()):
        raise PrivacyError(f"{name} holds a record more than once: {FIXES[name]}")


def warn_of_overlapping_windows(data: Dataset[Any]) -> None:
    """Warn of records that have memory in common, as windows of a series do that overlap.

    By the strides of the tensors of a `TensorDataset`, and no value. One number of the series is in
    several records then, each of which is clipped by itself. Not of what is expanded: all records
    may have one public number in common.
    """
    for store, places in in_memory(data):
        if type(store) is not TensorDataset or len(store) < 2:
            continue
        apart = 1 if places is None else int(np.diff(np.unique(places)).min(initial=len(store)))
        for t in store.tensors:
            if is_dense(t) and rows_overlap(t.shape, t.stride(), apart):
                warnings.warn(OVERLAPPING, stacklevel=6)
                return


def is_dense(t: Any) -> bool:
    """Whether a store's table is an ordinary tensor, and none of sparse rows."""
    return isinstance(t, Tensor) and t.layout == torch.strided


def rows_overlap(shape: Sequence[int], strides: Sequence[int], apart: int = 1) -> bool:
    """Whether rows of a tensor share memory, in which each begins at another place.

    Args:
        apart: places from one row that is taken to the next.
    """
    if len(shape) < 2 or shape[0] <= apart or strides[0] == 0 or 0 in shape:
        return False
    every = strides[0] * apart
    inner = [(size, stride) for size, stride in zip(shape[1:], strides[1:], strict=True) if stride]
    length = 1 + sum((size - 1) * stride for size, stride in inner if stride <= every)
    reach = (shape[0] - 1) // apart * every + length  # of all rows, but for what lies beyond them
    return length > every or any(every < stride < reach for size, stride in inner if size > 1)


def name_of(store: Any) -> Any:
    """A name that is the same for the same records, however they are wrapped."""
    if type(store) is TensorDataset:
        return tuple((t.data_ptr(), t.shape, t.stride()) for t in store.tensors)
    if type(store) in (list, tuple) and all(isinstance(item, OBJECTS) for item in store):
        return OBJECTS  # named one by one
    return store if isinstance(store, ArrowBuffer) else id(store)


def repeats(name: Any, parts: list[Part]) -> bool:
    if name is OBJECTS:
        named = [each for store, places in parts for each in ids_of(store, places)]
        return len(named) > len(set(named))
    if len(parts) > 1 and any(places is None for _, places in parts):
        return sum(len(store if places is None else places) for store, places in parts) > len(
            parts[0][0]
        )
    taken = [places for _, places in parts if places is not None]
    return bool(taken) and len(np.unique(np.concatenate(taken))) < sum(map(len, taken))


def have_records_in_common(one: Any, other: Any) -> bool:
    """Whether two data sets show that they do; not of copies."""
    others = [*in_memory(other)]
    for store, places in in_memory(one):
        name = name_of(store)
        for again, its_places in others:
            if name is OBJECTS and name_of(again) is OBJECTS:
                if {*ids_of(store, places)} & {*ids_of(again, its_places)}:
                    return True
            elif name == name_of(again) and have_places_in_common(places, its_places):
                return True
    return False


def have_places_in_common(some: Places | None, others: Places | None) -> bool:
    """Whether two choices of one store's records overlap; None is all of them."""
    return some is None or others is None or bool(np.isin(some, others).any())


def ids_of(store: Any, places: Places | None) -> list[int]:
    return [
        id(item) for item in (store if places is None else map(store.__getitem__, places.tolist()))
    ]


def refuse_shared_records(ranks: Ranks, train_set: Dataset[Any]) -> None:
    """Refuse ``sharded=True`` where two ranks show that they have a record in common.

    Stores are compared by digests of some of their records, which stay among the ranks. Copies,
    and data sets that read a record differently each time, are not found.

    Raises:
        RankError: on all ranks.

    **Guarantee.** Shards cut by `Subset` from one data set, or made of `TensorDataset` or lists
    that are equal, have no record in common.
    """
    own = taken_by_sample(train_set)
    times = Counter(sample for each in ranks.all_gather([*own]) for sample in each)
    shown = {sample: places for sample, places in own.items() if times[sample] > 1}
    if max(times.values(), default=0) < 2:
        return  # no rank has a store that another has
    for (first, earlier), (rank, later) in combinations(enumerate(ranks.all_gather(shown)), 2):
        both = later.keys() & earlier.keys()
        if any(np.isin(later[sample], earlier[sample]).any() for sample in both):
            raise RankError(
                f"sharded=True, but ranks {first} and {rank} have the same records, or some of "
                "them: each would be taken on both. Fix: leave sharded out where every rank has "
                "the whole data set, or give each rank records of its own, such as Subset(data, "
                "range(rank, len(data), size)); DistributedSampler repeats some."
            )


def taken_by_sample(train_set: Dataset[Any]) -> dict[str, Places]:
    """The places that are taken of each store, which is told by a sample of its records."""
    own: dict[str, list[Places]] = {}
    for store, places in stores_of(train_set):
        if sample := readable_sample(store):
            own.setdefault(sample, []).append(np.arange(len(store)) if places is None else places)
    return {sample: np.concatenate(parts) for sample, parts in own.items()}


def readable_sample(store: Any) -> str:
    """A digest of some records; "" where there are too few, or this process cannot read them."""
    try:
        return some_records_of(store)
    except Exception:  # files of other ranks, say
        return ""
