"""Records changed as other records may be: shorter, padded, or large."""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from dpoptim.training.batches import records as forms
from dpoptim.training.trials.neighbours import LARGE

Units = Sequence[Sequence[Any]]  # the rows of each record


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
    """The same records, the last of them with numbers of size `LARGE`; nothing if it has none."""

    def wanted(path: forms.Path, leaf: Any) -> bool:
        return is_float(leaf) and not forms.is_label(path) and not forms.is_mask(path)

    def large(path: forms.Path, leaf: Any) -> Any:
        return leaf * LARGE if wanted(path, leaf) else leaf

    *others, last = records
    if any(wanted(path, leaf) for row in last for path, leaf in forms.leaves_of(row)):
        yield [*others, [forms.map_leaves(row, large) for row in last]]


def is_float(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.is_floating_point()
    return isinstance(leaf, float | np.floating) or (
        isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f"
    )
