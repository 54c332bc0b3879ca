"""Records changed as other records may be: shorter, padded, large, or of other ranges."""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpoptim.training.batches import records as forms
from dpoptim.training.trials.neighbours import LARGE

Units = Sequence[Sequence[Any]]  # the rows of each record
Range = Callable[[Tensor], Tensor]

# What the numbers of a data set may all be, and those of its batches: no condition on one number,
# that all or some of a batch meet, holds for all of such records alone and for none, but where
# its number is none of these.
RANGES: tuple[Range, ...] = (
    torch.sigmoid,  # within (0, 1)
    lambda x: x * 0,
    lambda x: -0.1 - x.abs(),
    lambda x: 1.1 + x.abs(),
    lambda x: (x > 0).to(x),
)
WITHIN_ONE: tuple[Range, ...] = (torch.sigmoid,)  # for those that take probabilities alone
# for programs that take logarithms, or divide
POSITIVE: tuple[Range, ...] = (
    torch.sigmoid,
    lambda x: 1e-3 * x.sigmoid(),
    torch.ones_like,
    lambda x: 1.1 + x.abs(),
)


def with_padding(records: Units, *, sequences: bool) -> Iterator[Units]:
    """The same records, ever more of them padding; and cut shorter, if ``sequences``."""

    def changed(change: Callable[[Any, int], Any]) -> Units:
        return [
            [
                change(
                    row,
                    max(1, (length := forms.length_of(row)) - i * max(1, length // len(records))),
                )
                for row in rows
            ]
            for i, rows in enumerate(records)
        ]

    rows = [row for rows in records for row in rows]
    if min(map(forms.length_of, rows)) > 1:
        if any(map(forms.has_masks, rows)):
            yield changed(forms.masked_after)
        if sequences:
            yield changed(forms.cut)


def with_a_blank(records: Units) -> Units | None:
    """Ever shorter records, the last one of nothing but padding; None where none is a sequence."""
    lengths = [forms.length_of(row) for rows in records for row in rows]
    blank = [forms.blank(row) for row in records[-1]]
    if min(lengths) < 2 or all(map(operator.is_, blank, records[-1])):
        return None
    shorter = [
        [forms.cut(row, max(1, forms.length_of(row) - i)) for row in rows]
        for i, rows in enumerate([*records[:-1], blank])
    ]
    return shorter


def with_a_large_one(records: Units) -> Iterator[Units]:
    """The same records, the last of them with numbers of size `LARGE`; nothing if it has none.

    And without large labels, which a loss may not take. A leaf of one number is positive, as
    weights are; others are of either sign.
    """
    *others, last = records
    floats = [path for path, leaf in forms.leaves_of(last[0]) if is_number(path, leaf)]
    data = [path for path in floats if not forms.is_label(path)]
    for paths in (floats, data) if floats != data else (data,):

        def large(path: forms.Path, x: Tensor, paths: Sequence[forms.Path] = paths) -> Tensor:
            return (x.abs() if x.numel() == 1 else x) * LARGE if path in paths else x

        if paths:
            yield [*others, [forms.map_tensors(row, large) for row in last]]


def with_ranges(records: Units, ranges: Sequence[Range] = RANGES, *, labels: bool = True) -> Units:
    """The records, each with its floats in the next range; themselves, if they have none.

    Args:
        labels: whether those are changed, too.
    """
    if not any(is_number(path, leaf) for path, leaf in forms.leaves_of(records[0][0])):
        return records

    def within(place: int) -> Callable[[forms.Path, Tensor], Tensor]:
        change = ranges[place % len(ranges)]
        return lambda path, x: (
            change(x) if is_number(path, x) and (labels or not forms.is_label(path)) else x
        )

    return [
        [forms.map_tensors(row, within(place)) for row in rows]
        for place, rows in enumerate(records)
    ]


def is_number(path: forms.Path, leaf: Any) -> bool:
    """Whether a leaf has floats that are no mask."""
    return is_float(leaf) and not forms.is_mask(path)


def is_float(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.is_floating_point()
    return isinstance(leaf, float | np.floating) or (
        isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f"
    )
