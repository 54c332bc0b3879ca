"""Tensors of a checkpoint that lie in parts, one in a file of each process that saved it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PLACE = "in the files of the ranks"
Read = Callable[[int, int], Tensor]  # a rank, and the number of one of its parts


@dataclass(frozen=True)
class Stored:
    """One tensor.

    Attributes:
        number: of its parts in every file.
        shape: of the whole. axis: that is cut. sizes: of the ranks' parts on it.
        read: gives a part.
    """

    number: int
    shape: tuple[int, ...]
    axis: int
    sizes: tuple[int, ...]
    read: Read

    def whole(self) -> Tensor:
        return self.part(0, self.shape[self.axis])

    def part(self, start: int, length: int) -> Tensor:
        """A stretch of the axis, from the files that have any of it."""
        found, before = [], 0
        for rank, size in enumerate(self.sizes):
            first, last = max(start, before), min(start + length, before + size)
            if first < last:
                own = self.read(rank, self.number)
                found.append(own.narrow(self.axis, first - before, last - first))
            before += size
        if not found:
            return self.read(0, self.number).narrow(self.axis, 0, 0).clone()
        return found[0].clone() if len(found) == 1 else torch.cat(found, self.axis)


def note(number: int, shape: tuple[int, ...], axis: int, sizes: list[int]) -> dict[str, Any]:
    """The note that stands for the tensor in the file that tells of the others."""
    return {PLACE: number, "shape": list(shape), "axis": axis, "sizes": sizes}


def stored(value: Any, read: Read) -> Any:
    """A nest of dicts, lists and tuples with every `note` as the tensor it stands for."""
    if isinstance(value, dict) and PLACE in value:
        shape, sizes = tuple(value["shape"]), tuple(value["sizes"])
        return Stored(value[PLACE], shape, value["axis"], sizes, read)
    return changed(value, lambda each: stored(each, read))


def whole(value: Any) -> Any:
    """The same nest with whole tensors."""
    return value.whole() if isinstance(value, Stored) else changed(value, whole)


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """A dict, list or tuple of changed things, in the same order; anything else as it is."""
    if isinstance(value, dict):
        return type(value)((key, change(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return type(value)(change(each) for each in value)
    return value
