"""Axes of records that others may have of another length: of sequences, lists of boxes, images."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpoptim.training.batches import records as forms
from dpoptim.training.trials.variations import Units

Axes = frozenset[tuple[forms.Path, int]]  # leaves by their paths, and which axis of each

MOST_GROUPS = 8  # records of many tables, say, have an axis of their own in each


def axes_of(row: Any) -> list[list[Axes]]:
    """Axes that share a size, and so are varied together, as those of labels and boxes.

    First axes apart from others, in which features are; and both, as of a matrix of attention.

    Returns:
        for each size, which axes it may be the length of, likeliest first: that three boxes are as
        many as an image's channels is chance.
    """
    shapes = {path: leaf.shape for path, leaf in forms.leaves_of(row) if is_array(leaf)}
    places = [(path, axis) for path, shape in shapes.items() for axis in range(len(shape))]

    def of_size(size: int, allowed: Callable[[int], bool]) -> Axes:
        return frozenset(
            (p, axis) for p, axis in places if shapes[p][axis] == size and allowed(axis)
        )

    first = dict.fromkeys(shape[0] for shape in shapes.values() if shape)
    later = dict.fromkeys(size for shape in shapes.values() for size in shape[1:])
    found = []
    for size in first:
        own = of_size(size, lambda axis: not axis)
        every = of_size(size, lambda _: True)
        found.append(list(dict.fromkeys([own, *without_some(own, shapes), every])))
    found += [[of_size(size, lambda axis: axis > 0)] for size in later]
    return found[:MOST_GROUPS]


def without_some(axes: Axes, shapes: dict[forms.Path, Sequence[int]]) -> Iterator[Axes]:
    """Parts of axes that are as long by chance: without those of images, and one mapping's own."""
    dims = {len(shapes[path]) for path, _ in axes}
    if len(dims) > 1:
        yield frozenset(each for each in axes if len(shapes[each[0]]) < max(dims))
    parents = sorted({path[:-1] for path, _ in axes})
    for parent in parents if len(parents) > 1 else ():
        yield frozenset(each for each in axes if each[0][:-1] == parent)


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0


def length_along(row: Any, axes: Axes) -> int:
    return next(
        int(leaf.shape[axis])
        for path, leaf in forms.leaves_of(row)
        for of, axis in axes
        if of == path
    )


def resized(row: Any, axes: Axes, length: int) -> Any:
    """The record with these axes so long: cut, or continued by what it has, or by ones."""

    def change(path: forms.Path, leaf: Any) -> Any:
        for axis in sorted(axis for of, axis in axes if of == path):
            leaf = along(leaf, axis, length)
        return leaf

    return forms.map_leaves(row, change)


def along(leaf: Any, axis: int, length: int) -> Any:
    """One leaf's axis so long."""
    whole = torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf
    size = whole.shape[axis]
    if size:
        found = whole.index_select(axis, torch.arange(length, device=whole.device) % size)
    else:
        found = whole.new_ones([*whole.shape[:axis], length, *whole.shape[axis + 1 :]])
    return found.numpy() if isinstance(leaf, np.ndarray) else found


def of_lengths(records: Units, axes: Axes, lengths: Sequence[int]) -> Units:
    """The records, each with these axes of the next length."""
    return [
        [resized(row, axes, lengths[place % len(lengths)]) for row in rows]
        for place, rows in enumerate(records)
    ]
