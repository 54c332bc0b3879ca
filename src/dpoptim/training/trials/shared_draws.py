"""Collate functions that mix records by a number that they draw for all of them, at some sizes.

The model is not run for that: another first record must leave the others' rows as they are.
"""

from dataclasses import replace

from dpoptim.training.randomness.drawing_collates import HeldDraws, same
from dpoptim.training.trials.compared_batches import Batches
from dpoptim.training.trials.lone_lengths import tensors
from dpoptim.training.trials.program import Program, compare_held, if_possible
from dpoptim.training.trials.variations import Units

SIZES = 64  # of what is drawn, from none to all


def compare_shared_draws(program: Program, records: Units) -> None:
    """Compare records where what collate_fn draws has a size at which it lets one change another.

    Raises:
        PrivacyError: records are mixed.
    """
    for k in range(SIZES):
        held = HeldDraws(program.collate, (k + 0.5) / SIZES)
        if if_possible(lambda: others_stay(held, records)):  # noqa: B023
            return  # whatever the user's function raises on made-up records
        if not held.drew:
            return
        if not others_stay(held, records):
            of_size = replace(program, collate=held)
            if_possible(lambda: compare_held(of_size, records))  # noqa: B023


def others_stay(held: HeldDraws, records: Units) -> bool:
    """Whether the rows of all but the first record stay where it is another one's."""
    others = [records[1], *records[1:]]
    before, after = (
        tensors(Batches(held, each, range(len(records))).together) for each in (records, others)
    )
    first = len(records[0])
    return len(before) == len(after) and all(
        a.shape == b.shape and (a.dim() == 0 or same(a[first:], b[first:]))
        for a, b in zip(before, after, strict=True)
    )
