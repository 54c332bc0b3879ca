"""Batches in which one record is much longer, or much shorter, than all others.

A collate function may cut or pad to a length that some of a batch decide: its mean, or a quantile.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from dpoptim.training.batches import records as forms
from dpoptim.training.randomness.drawing_collates import DRAWS, HeldDraws, same
from dpoptim.training.trials.compared_batches import Batches
from dpoptim.training.trials.missing_numbers import is_whole
from dpoptim.training.trials.program import Program, compare_if_possible, in_turn
from dpoptim.training.trials.variations import Units

SIZES = (5, 11, 40)  # of batches: in the largest one in 40 is beyond most quantiles
SHORT = 4  # times shorter


def compare_lone_lengths(program: Program, records: Units) -> None:
    """Compare such batches, where they have anything else of a record than it has alone, padded.

    What padding does to a record is tried elsewhere, so that most programs take no time here.

    Raises:
        PrivacyError: records are mixed.
    """
    for changed in with_a_lone_one(records):
        for size in SIZES:
            order = one_among(len(records), size)
            padded = only_padded(program, changed, order)
            if not padded:
                compare_unlike(replace(program, order=order), changed)
            if padded is None:
                break


def compare_unlike(program: Program, records: Units) -> None:
    """Compare records whose ends are unlike their beginnings, if a model has so many words.

    A mean over words that are all one, and padding, is the same of any number of them.
    """
    unlike = [[forms.map_leaves(row, with_another_end) for row in rows] for rows in records]
    if compare_if_possible(program, unlike):
        compare_if_possible(program, records)


def with_another_end(path: forms.Path, leaf: Any) -> Any:
    kept = forms.is_mask(path) or forms.is_label(path) or not is_whole(leaf)
    if kept or not isinstance(leaf, Tensor | np.ndarray) or leaf.ndim == 0:
        return leaf
    changed = leaf * 0 + 1
    changed[1:] = 2
    return changed


def with_a_lone_one(records: Units) -> Iterator[Units]:
    """The same records, all but the first cut short; and the first one cut short."""
    if min(forms.length_of(row) for rows in records for row in rows) < 2:
        return
    for lone in (False, True):
        yield [
            [forms.cut(row, max(1, forms.length_of(row) // SHORT)) for row in rows]
            if (i == 0) == lone
            else rows
            for i, rows in enumerate(records)
        ]


def one_among(records: int, size: int) -> tuple[int, ...]:
    """The first record in the middle of so many, the others in turn around it."""
    others = [1 + i for i in in_turn(records - 1, size - 1)]
    return (*others[: size // 2], 0, *others[size // 2 :])


def only_padded(program: Program, records: Units, order: Sequence[int]) -> bool | None:
    """Whether a batch has what records have alone, and padding; None: where, nobody can tell."""
    per_record = len(records[0])
    batches = Batches(HeldDraws(program.collate, DRAWS["all"]), records, order)
    try:
        together, alone = tensors(batches.together), [*map(tensors, batches.alone)]
    except Exception:  # whatever the user's function raises on made-up records
        return None
    every = [(together, len(order)), *((own, 1) for own in alone)]
    if any(t.shape[:1] != (count * per_record,) for found, count in every for t in found):
        return None
    if {len(own) for own in alone} != {len(together)}:
        return None
    return all(
        is_within(own, t.unflatten(0, (-1, per_record))[place])
        for place, i in enumerate(order)
        for t, own in zip(together, alone[i], strict=True)
    )


def tensors(batch: object) -> list[Tensor]:
    return [leaf for _, leaf in forms.leaves_of(batch) if isinstance(leaf, Tensor)]


def is_within(own: Tensor, padded: Tensor) -> bool:
    """Whether a tensor is there at the first or at the last places of each axis."""
    if own.dim() != padded.dim() or any(
        a > b for a, b in zip(own.shape, padded.shape, strict=True)
    ):
        return False
    first = padded[tuple(slice(size) for size in own.shape)]
    sizes = zip(own.shape, padded.shape, strict=True)
    last = padded[tuple(slice(whole - size, whole) for size, whole in sizes)]
    return same(own, first) or same(own, last)
