"""Made-up records for slots that no record took, in the one shape that all records have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from dpoptim.errors import PrivacyError
from dpoptim.training.batches.collation import collate_records
from dpoptim.training.batches.privacy_units import NO_ROW, made_up
from dpoptim.training.batches.records import leaves_of, map_leaves
from dpoptim.training.batches.slot_places import (
    MOVED,
    Rows,
    again,
    refuse_moving,
    tensors_of,
)


class Empty:
    """Stands for the item of an empty slot until items are collated."""


EMPTY = Empty()


class WithEmptySlots(Dataset[Any]):
    """A data set that has an item for `NO_ROW`, too."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return EMPTY if index == NO_ROW else self._dataset[index]


def made_up_like(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return made_up(leaf, one_number=not leaf.dim()).expand(leaf.shape)
    if isinstance(leaf, np.ndarray | np.generic):
        ones = not leaf.ndim or np.issubdtype(leaf.dtype, np.floating)
        return np.ones_like(leaf) if ones else np.zeros_like(leaf)
    if isinstance(leaf, int | float):
        return type(leaf)(1)
    return "" if isinstance(leaf, str) else leaf


@dataclass(frozen=True)
class InSlots:
    """Collates items and made-up ones, of which every batch has as many.

    Args:
        collate: makes a batch of items.
        empty: a made-up item.
        shapes: of every batch.
        rows: where it is told that empty slots hold made-up items, see `slot_places`.

    **Guarantee.** The shapes of what it returns are public. Where ``rows`` are known, what stands
    in an empty slot is what is made of made-up records alone.
    """

    collate: Callable[[list[Any]], Any]
    empty: Any
    shapes: tuple[Any, ...]
    rows: Mapping[Any, Rows]

    def __call__(self, items: list[Any]) -> Any:
        places = [place for place, item in enumerate(items) if isinstance(item, Empty)]
        batch = self.collate(
            [again(self.empty) if isinstance(item, Empty) else item for item in items]
        )
        if shapes_of(batch) != self.shapes:
            raise PrivacyError(
                "fixed_shape=True, but records have different shapes, or collate_fn pads them to "
                "the longest of a batch: shapes would tell who is in it. Fix: pad every record to "
                "one public length."
            )
        if places and self.rows:
            found = tensors_of(batch)
            told = ((found[path], of) for path, of in self.rows.items() if path in found)
            if not all(of.are_empty(leaf, places) for leaf, of in told):
                raise PrivacyError(MOVED)
        return batch


def shapes_of(batch: Any) -> tuple[Any, ...]:
    return tuple((tuple(t.shape), t.dtype) for _, t in leaves_of(batch) if isinstance(t, Tensor))


def fixed_shape(
    dataset: Dataset[Any],
    collate: Callable[[list[Any]], Any] | None,
    items: int,
    *,
    own: bool,
) -> tuple[Dataset[Any], Callable[[list[Any]], Any]]:
    """The data set and collate function of physical batches of so many items each.

    Args:
        own: whether ``collate`` is the user's, and may move records to other places.

    Raises:
        PrivacyError: it does.
    """
    collate = collate or collate_records
    empty = map_leaves(dataset[0], lambda _, leaf: made_up_like(leaf))
    shapes = shapes_of(collate([again(empty) for _ in range(items)]))
    rows = refuse_moving(collate, lambda: again(empty), items) if own else {}
    return WithEmptySlots(dataset), InSlots(collate, empty, shapes, rows)
