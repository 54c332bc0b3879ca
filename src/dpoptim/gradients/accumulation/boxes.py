"""Tensors of a checkpoint: which boxes of them are in this process, and how these are filled again.

A tensor is cut into boxes (a first index and a length on each axis), by whatever holds it in parts:
FSDP, the owners of a step's sums. `torch.distributed.checkpoint` plans in the same terms.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Offsets = tuple[int, ...]
INLINE = 32  # entries: what has fewer, and is whole everywhere, needs no place in a part file


@dataclass(frozen=True)
class Boxes:
    """The parts of a tensor that are in this process.

    Attributes:
        shape: of the whole tensor.
        dtype: of its entries.
        parts: the first index of each box, and a view of its entries.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[Offsets, Tensor], ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> "Boxes":
        """One that is here entirely."""
        return cls(tuple(tensor.shape), tensor.dtype, (((0,) * tensor.dim(), tensor),))

    @classmethod
    def of_part(cls, shape: tuple[int, ...], axis: int, start: int, part: Tensor) -> "Boxes":
        """One cut on an axis, of which this process has what follows ``start``."""
        offsets = tuple(start if each == axis else 0 for each in range(len(shape)))
        return cls(shape, part.dtype, ((offsets, part),) if part.numel() else ())

    @classmethod
    def of_stretch(cls, shape: tuple[int, ...], start: int, stretch: Tensor) -> "Boxes":
        """One laid out flat, of which this process has what follows ``start``."""
        shape = shape or (1,)
        parts, before = [], 0
        for offsets, sizes in boxes_of_stretch(shape, start, start + len(stretch)):
            length = math.prod(sizes)
            parts.append((offsets, stretch[before : before + length].view(sizes)))
            before += length
        return cls(shape, stretch.dtype, tuple(parts))

    def fill(self, source: "Tensor | Stored") -> None:
        """Copy the entries of the same tensor, as a checkpoint has it, to this process.

        Raises:
            ValueError: it has another shape or dtype.
        """
        if (tuple(source.shape), source.dtype) != (self.shape, self.dtype):
            raise ValueError(
                "resume: the checkpoint has a tensor of another shape or dtype than the run. Fix: "
                "the same model and optimizers as when it was saved."
            )
        if isinstance(source, Stored):
            source.read(self)
            return
        for offsets, part in self.parts:
            part.copy_(box_of(source, offsets, part.shape))


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint's part files.

    Attributes:
        shape, dtype: of the whole. read: fills boxes of it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Boxes], None]

    def whole(self) -> Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype)
        Boxes.whole(tensor).fill(self)
        return tensor


def box_of(tensor: Tensor, offsets: Offsets, sizes: tuple[int, ...]) -> Tensor:
    """A view of a box of a tensor."""
    for axis, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(axis, offset, size)
    return tensor


def boxes_of_stretch(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[Offsets, tuple[int, ...]]]:
    """Boxes that follow each other and make up a stretch of a tensor laid out flat."""
    if start >= stop:
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *[0] * len(shape[1:])), (last - first, *shape[1:])
    yield from in_row(shape, last, 0, stop - last * row)


def in_row(
    shape: tuple[int, ...], row: int, start: int, stop: int
) -> Iterator[tuple[Offsets, tuple[int, ...]]]:
    for offsets, sizes in boxes_of_stretch(shape[1:], start, stop):
        yield (row, *offsets), (1, *sizes)


def is_large(value: Any) -> bool:
    """Whether a tensor that is whole in every process is worth a place in a part file."""
    return (
        type(value) in (Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and not value.is_quantized
        and value.numel() >= INLINE
    )


def changed(value: Any, change: Callable[[str, Any], Any], key: str = "") -> Any:
    """A nest of dicts, lists and tuples with all else changed; ``change`` is told where it is."""
    if type(value) in (dict, OrderedDict):
        return type(value)(
            (name, changed(each, change, f"{key}[{name!r}]")) for name, each in value.items()
        )
    if type(value) in (list, tuple):
        return type(value)(
            changed(each, change, f"{key}[{place}]") for place, each in enumerate(value)
        )
    return change(key, value)


def whole(value: Any) -> Any:
    """The same nest with whole tensors."""
    return changed(value, lambda _, each: each.whole() if isinstance(each, Stored) else each)
