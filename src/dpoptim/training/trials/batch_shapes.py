"""Sizes of what a collate function makes, along axes that are not the records'."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dpoptim.training.batches import records as forms
from dpoptim.training.trials.axes_of_records import is_array

Axis = tuple[forms.Path, int, int]  # a tensor's path, how many axes it has, and which one
Sizes = dict[Axis, tuple[int, int]]  # the least and the largest


@dataclass(frozen=True)
class BatchShapes:
    """Where batches have sizes that are no number of records.

    Attributes:
        listed: whether batches hold lists with an entry, or several, for each record.
        of_records: axes as long as there are records.
    """

    listed: bool
    of_records: frozenset[Axis]

    @classmethod
    def of_collate(cls, collate: Callable[[list[Any]], Any], row: Any) -> "BatchShapes":
        """As batches of one and two records of one form show."""
        one, two = collate([row]), collate([row, row])
        listed = [path for path, _ in forms.leaves_of(one)] != [p for p, _ in forms.leaves_of(two)]
        every = cls(listed, frozenset())
        first, second = every.sizes(one), every.sizes(two)
        return cls(listed, frozenset(axis for axis in second if first.get(axis) != second[axis]))

    def sizes(self, batch: Any) -> Sizes:
        found: Sizes = {}
        for path, leaf in forms.leaves_of(batch):
            for axis, size in enumerate(leaf.shape) if is_array(leaf) else ():
                key = (self._place(path), leaf.ndim, axis)
                if key not in self.of_records:
                    low, high = found.get(key, (size, size))
                    found[key] = min(low, size), max(high, size)
        return found

    def _place(self, path: forms.Path) -> forms.Path:
        """A path, of entries in lists that are as long as there are records without their place."""
        if not self.listed:
            return path
        return tuple("#" if part.isdigit() or part == "label" else part for part in path)


def beyond(sizes: Mapping[Axis, tuple[int, int]], tried: Sizes) -> set[Axis]:
    """Axes that are shorter or longer than any that were tried."""
    return {
        axis
        for axis, (low, high) in sizes.items()
        if axis in tried and (low < tried[axis][0] or high > tried[axis][1])
    }


def widened(tried: Sizes, sizes: Sizes) -> Sizes:
    """Sizes that have been tried once these were, too."""
    found = dict(tried)
    for axis, (low, high) in sizes.items():
        least, most = found.get(axis, (low, high))
        found[axis] = min(least, low), max(most, high)
    return found
