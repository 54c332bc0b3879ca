"""Trials of a loss and collate function on records that nobody owns."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dpoptim.errors import NotByThisWayError, SamplesInteractError
from dpoptim.training.batches.records import made_up
from dpoptim.training.trials.batch_sizes import larger_size
from dpoptim.training.trials.check import (
    CheckResult,
    Program,
    compare,
    compare_if_possible,
    if_possible,
    in_turn,
)
from dpoptim.training.trials.lone_lengths import compare_lone_lengths
from dpoptim.training.trials.missing_numbers import Missing, missing_numbers, watch_loss
from dpoptim.training.trials.shared_draws import compare_shared_draws
from dpoptim.training.trials.variations import with_a_blank, with_a_large_one, with_padding

MADE_UP = 5  # records
BY_COLLATE = (
    ", collated alone and with others (padding must change nothing: own lengths, masks, own last "
    "positions)"
)
BLANK = (
    "not on ones of nothing but padding, such as empty texts, which the lengths of others change: "
    "there are none"
)
NONE_MISSING = (
    "not on ones with missing numbers (NaN, labels such as -1), which are tried on CPUs: there are "
    "none"
)
NONE_TAKEN = (
    "not on ones with missing labels: the loss took none of those that were tried (-100, -1, and "
    "what it compares labels with)"
)
LEFT_OUT = (
    ", which a mean over the batch must not leave out: one loss a record, "
    'reduction="none", needs no count of others'
)


@dataclass(frozen=True)
class MadeUp:
    """Findings about a loss on made-up records.

    Attributes:
        found: of ordinary ones; None: they could not be tried.
        on: what was compared, and what was not of it.
        skipped: why nothing was, or "".
    """

    found: CheckResult | None = None
    on: tuple[str, ...] = ()
    skipped: str = ""


def try_made_up(
    program: Program, form: Any, rows: int, expected: int, *, sequences: bool
) -> MadeUp:
    """Try the loss on records that nobody owns.

    Args:
        form: a row, of which only the form is used.
        rows: of a record.
        expected: records of a batch in training.
        sequences: whether records are collated by a function of the loop's own: shorter ones are
            tried, too.
    """
    generator = torch.Generator().manual_seed(0)
    try:
        invented = [[made_up(form, generator) for _ in range(rows)] for _ in range(MADE_UP)]
    except TypeError as error:
        return MadeUp(skipped=f"nobody can make up {error}")
    with saying("on made-up records"):
        tried = list[CheckResult]()
        skipped = if_possible(lambda: tried.append(compare(program, invented)))
    if skipped or tried[0].zero:
        return MadeUp(skipped=skipped or "their losses are zero")
    found = tried[0]
    program = replace(program, reductions=found.reductions)
    with saying("on made-up records, with numbers that collate_fn draws"):
        if sequences:
            compare_shared_draws(program, invented)
    with saying(f"on made-up records of unequal lengths{BY_COLLATE}"):
        padded = "" in compare_each(program, with_padding(invented, sequences=sequences))
        if sequences:
            compare_lone_lengths(program, invented)
    with saying("on made-up records, one of them large"):
        compare_each(program, with_a_large_one(invented))
    watched = watch_loss(program, invented)
    size = try_larger(program, invented, watched.work, expected)
    on = ["made-up records" + ", also of unequal lengths" * padded + in_sizes(found.records, size)]
    if sequences and sees_others_if_blank(program, invented):
        on.append(BLANK)
    if tries_missing(program.model):
        missing = missing_numbers(watched, invented)
        on += try_missing(program, invented, missing, padded=padded, cheap=size is not None)
    else:
        on.append(NONE_MISSING)
    return MadeUp(found, tuple(on))


def in_sizes(few: int, more: int | None) -> str:
    sizes = f"1 and {few}" if more is None else f"1, {few} and {more}"
    return f", in batches of {sizes}"


def try_larger(
    program: Program, records: Sequence[Sequence[Any]], work: int | None, expected: int
) -> int | None:
    """Try the records in a batch about as large as in training, if that costs little; of how many.

    Mixing may begin with some number of records.
    """
    most = expected + round(3 * math.sqrt(expected))  # as coins may draw
    size = None if work is None else larger_size(work, len(records), most)
    if size is None:
        return None
    order = (*in_turn(len(records), size),)
    with saying(f"on made-up records, {len(order)} in a batch (fewer showed nothing)"):
        failed = compare_if_possible(replace(program, order=order), records)
    return None if failed else size


def try_missing(
    program: Program,
    records: Sequence[Sequence[Any]],
    missing: Sequence[Missing],
    *,
    padded: bool,
    cheap: bool,
) -> list[str]:
    """Try records with something missing; returns what to say if none could be compared.

    Args:
        padded: whether padded ones were, of which labels are missing.
        cheap: whether to try also ones of which nearly all are.
    """
    row = records[0][0]
    labels = [each for each in missing if each.whole]
    left = [each for each in missing if not padded or not each.is_padding(row)]
    ran = len(left) < len(missing)
    for each in left:
        number = f"{each.filler:g}" if each.usual else "one that the loss compares labels with"
        with saying(f"on made-up records with missing numbers ({number}{LEFT_OUT})"):
            if compare_if_possible(program, each.mixed(records)) == "":
                ran |= each.whole
                if cheap and each.single(row):  # as few as one that is not missing, too
                    compare_if_possible(program, each.nearly_all(records))
    return [NONE_TAKEN] if labels and not ran else []


def compare_each(program: Program, variations: Iterable[Sequence[Sequence[Any]]]) -> list[str]:
    """`compare_if_possible` of each."""
    return [compare_if_possible(program, changed) for changed in variations]


def tries_missing(model: nn.Module) -> bool:
    """Whether numbers may be missing: elsewhere an index that is none ends the process's work."""
    return all(p.device.type == "cpu" for p in model.parameters())


def sees_others_if_blank(program: Program, records: Sequence[Sequence[Any]]) -> bool:
    """Whether a record of nothing but padding depends on how long others are.

    Attention without anything to attend to may spread over all padding.
    """
    blanked = with_a_blank(records)
    if blanked is None:
        return False
    try:
        compare_if_possible(program, blanked)
    except NotByThisWayError:
        raise
    except SamplesInteractError:
        return True
    return False


@contextmanager
def saying(where: str) -> Iterator[None]:
    """Add to what is said of records that are mixed."""
    try:
        yield
    except NotByThisWayError as error:
        raise NotByThisWayError(f"{where}: {error}", reason=error.reason, fix=error.fix) from None
    except SamplesInteractError as error:
        raise SamplesInteractError(f"{where}: {error}") from None
