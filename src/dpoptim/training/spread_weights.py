"""The contents of a model that no process holds whole, as its run left it: digests of its parts."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from dpoptim.gradients.accumulation.boxes import Boxes, Offsets, box_of
from dpoptim.gradients.watch.values import digest


class Part(NamedTuple):
    """A box of an entry of a state dict, by its digest; what is no tensor has one, whole.

    Attributes:
        shape: of the whole entry. offsets, sizes: of the box.
    """

    name: str
    shape: tuple[int, ...] | None
    offsets: Offsets
    sizes: tuple[int, ...]
    digest: bytes


def parts_of(state: Mapping[str, Any]) -> list[Part]:
    """Parts in this process of a state dict in boxes (`Wrapping.in_boxes`)."""
    found = []
    for name, value in state.items():
        if not isinstance(value, Tensor | Boxes):
            found.append(Part(name, None, (), (), digest(value)))
            continue
        boxes = value if isinstance(value, Boxes) else Boxes.whole(value)
        found += [
            Part(name, boxes.shape, offsets, tuple(part.shape), digest(part.detach()))
            for offsets, part in boxes.parts
        ]
    return found


def are_whole(parts: Iterable[Part], names: Iterable[str], weights: Mapping[str, Any]) -> bool:
    """Whether a whole state dict holds what the parts held, and nothing else.

    Args:
        parts: of all processes. names: of all entries.
    """
    if weights.keys() != set(names):
        return False
    covered: dict[str, set[tuple[Offsets, tuple[int, ...]]]] = {name: set() for name in weights}
    for part in parts:
        value = weights[part.name]
        if part.shape is not None:
            if not isinstance(value, Tensor) or tuple(value.shape) != part.shape:
                return False
            value = box_of(value.detach(), part.offsets, part.sizes)
        if digest(value) != part.digest:  # of a tensor, its dtype, too
            return False
        covered[part.name].add((part.offsets, part.sizes))
    return all(
        sum(math.prod(sizes) for _, sizes in covered[name])
        == (value.numel() if isinstance(value, Tensor) else 1)
        for name, value in weights.items()
    )
