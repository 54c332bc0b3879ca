"""Made-up records for slots that no record took, in the one shape that all records have."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from dpoptim.errors import PrivacyError
from dpoptim.training.batches.collation import collate_records
from dpoptim.training.batches.privacy_units import NO_ROW, made_up
from dpoptim.training.batches.records import leaves_of, map_leaves


class WithEmptySlots(Dataset[Any]):
    """A data set and a made-up item in the shapes of item 0, for `NO_ROW`."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset
        self._empty = map_leaves(dataset[0], lambda _, leaf: made_up_like(leaf))

    def __getitem__(self, index: int) -> Any:
        return self._empty if index == NO_ROW else self._dataset[index]


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
class SameShapes:
    """Collates, and refuses what has other shapes than a batch of made-up records.

    **Guarantee.** The shapes of what it returns are public.
    """

    collate: Callable[[list[Any]], Any]
    shapes: tuple[Any, ...]

    def __call__(self, items: list[Any]) -> Any:
        batch = self.collate(items)
        if shapes_of(batch) != self.shapes:
            raise PrivacyError(
                "fixed_shape=True, but records have different shapes, or collate_fn pads them to "
                "the longest of a batch: shapes would tell who is in it. Fix: pad every record to "
                "one public length."
            )
        return batch


def shapes_of(batch: Any) -> tuple[Any, ...]:
    return tuple((tuple(t.shape), t.dtype) for _, t in leaves_of(batch) if isinstance(t, Tensor))


def fixed_shape(
    dataset: Dataset[Any], collate: Callable[[list[Any]], Any] | None, items: int
) -> tuple[Dataset[Any], Callable[[list[Any]], Any]]:
    """The data set and collate function of physical batches of so many items each."""
    with_empty, collate = WithEmptySlots(dataset), collate or collate_records
    return with_empty, SameShapes(collate, shapes_of(collate([with_empty[NO_ROW]] * items)))
