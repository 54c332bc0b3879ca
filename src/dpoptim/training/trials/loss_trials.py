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
from dpoptim.training.trials.deciding_numbers import refuse_deciding_numbers
from dpoptim.training.trials.interactions import NothingAloneError
from dpoptim.training.trials.length_trials import LengthTrials
from dpoptim.training.trials.lone_lengths import compare_lone_lengths
from dpoptim.training.trials.missing_numbers import (
    Missing,
    missing_flags,
    missing_numbers,
    watch_loss,
)
from dpoptim.training.trials.other_numbers import sizes_in
from dpoptim.training.trials.own_generators import generators_of
from dpoptim.training.trials.program import (
    CheckResult,
    Program,
    compare,
    compare_if_possible,
    if_possible,
    in_turn,
)
from dpoptim.training.trials.shared_draws import compare_shared_draws
from dpoptim.training.trials.variations import (
    POSITIVE,
    RANGES,
    WITHIN_ONE,
    Units,
    with_a_blank,
    with_a_large_one,
    with_padding,
    with_ranges,
)

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
OF_RANGES = (
    "on made-up records, some within 0 and 1, some negative, some of zeros (what a loss, a model "
    "or collate_fn tells by the largest, the least or any number of a batch changes all of it)"
)
NO_GRADIENT = "no record has a gradient of these"
NO_RANGES = "not on ones within 0 and 1, negative ones, or ones of zeros"
LEFT_OUT = (
    ", which must change nothing of others, nor be left out of a mean over the batch: one loss a "
    'record, reduction="none", needs no count of others'
)


@dataclass(frozen=True)
class MadeUp:
    """Findings about a loss on made-up records.

    Attributes:
        found: of ordinary ones; None: they could not be tried.
        on: what was compared, and what was not of it.
        skipped: why nothing was, or "".
        zero: whether something was, and no record had a gradient.
        lengths: trials of lengths to come; None: there are none to try.
    """

    found: CheckResult | None = None
    on: tuple[str, ...] = ()
    skipped: str = ""
    zero: bool = False
    lengths: LengthTrials | None = None


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
        invented: Units = [[made_up(form, generator) for _ in range(rows)] for _ in range(MADE_UP)]
    except TypeError as error:
        return MadeUp(skipped=f"nobody can make up {error}")
    found, invented, skipped = first_compared(program, invented)
    if found is None:
        return MadeUp(skipped=skipped, zero=skipped == NO_GRADIENT)
    generators_of(program.model, anew=True)  # also those that this loss makes
    program = replace(program, reductions=found.reductions)
    with saying("on made-up records, with numbers that collate_fn draws"):
        if sequences:
            compare_shared_draws(program, invented)
    with saying(f"on made-up records of unequal lengths{BY_COLLATE}"):
        padded = "" in compare_each(program, with_padding(invented, sequences=sequences))
        if sequences:
            compare_lone_lengths(program, invented)
    with saying("on made-up records, one of them large"):
        any(not compare_if_possible(program, large) for large in with_a_large_one(invented))
    watched = watch_loss(program, invented)
    lengths = try_lengths(program, invented, watched.work) if sequences else None
    size, not_tried = try_ranges(program, invented, larger(program, watched.work, expected))
    on = ["made-up records" + ", also of unequal lengths" * padded + in_sizes(found.records, size)]
    on += [not_tried] * bool(not_tried)
    if sequences and sees_others_if_blank(program, invented):
        on.append(BLANK)
    missing = missing_numbers(watched, invented)
    if not tries_missing(program.model):
        missing = [each for each in missing if each.flags]
        on.append(NONE_MISSING)
    on += try_missing(program, invented, missing, padded=padded, cheap=size is not None)
    with saying("on made-up records, with other numbers of the whole batch"):
        refuse_deciding_numbers(program, invented)
    return MadeUp(found, tuple(on), lengths=lengths)


def try_lengths(program: Program, records: Units, work: int | None) -> LengthTrials | None:
    """Try records that are much longer than others; trials of lengths to come."""
    lengths = LengthTrials.of(program, records)
    if lengths is not None:
        with saying(f"on made-up records of unequal lengths{BY_COLLATE}"):
            lengths.compare_longer(work, anywhere=tries_missing(program.model))
    return lengths


def in_sizes(few: int, more: int | None) -> str:
    sizes = f"1 and {few}" if more is None else f"1, {few} and {more}"
    return f", in batches of {sizes}"


def first_compared(program: Program, invented: Units) -> tuple[CheckResult | None, Units, str]:
    """Compare records, or others of their form where these show nothing; None, and why, if all do.

    Ordinary ones; those with gaps where flags say what counts (all may say that nothing does), also
    of one length; of positive numbers, and within 0 and 1, for losses that take no others.
    """
    flags, reasons = missing_flags(invented[0][0]), list[str]()
    others = [] if flags is None else [flags.mixed(invented), flags.half(invented)]
    within = [with_ranges(invented, ranges) for ranges in (POSITIVE, WITHIN_ONE)]
    for records in (invented, *others, *within):
        tried, gaps = list[CheckResult](), any(records is each for each in others)
        with saying("on made-up records" + ", with flags that are False" * gaps):
            skipped = if_possible(lambda: tried.append(compare(program, records)))  # noqa: B023
        if not skipped and not tried[0].zero:
            return tried[0], records, ""
        reasons.append(skipped or NO_GRADIENT)
    return None, invented, NO_GRADIENT if NO_GRADIENT in reasons else reasons[0]


def larger(program: Program, work: int | None, expected: int) -> Program | None:
    """The program, with batches about as large as in training, if these cost little."""
    most = expected + round(3 * math.sqrt(expected))  # as coins may draw
    size = None if work is None else larger_size(work, MADE_UP, most)
    # a parameter's axis that is as long would be taken for the records'
    taken = sizes_in((*program.model.parameters(), *program.model.buffers()))
    while size in taken and size is not None:
        size = size - 1 if size > MADE_UP + 1 else None
    return None if size is None else replace(program, order=(*in_turn(MADE_UP, size),))


def try_ranges(program: Program, records: Units, more: Program | None) -> tuple[int | None, str]:
    """Try records with floats in other ranges, and in a batch of ``more``, both in one trial.

    Mixing may begin with a number that no record of a data set has, but others may have; and with
    some number of records.

    Returns:
        of how many the larger batch was, if it could be compared; what to say if no others could.
    """
    others = [with_ranges(records, ranges) for ranges in (RANGES, POSITIVE)]
    others.append(with_ranges(records, RANGES, labels=False))  # these may be probabilities
    others = [] if others[0] is records else others
    size, reasons = None if more is None else len(more.order), list[str]()
    for changed in others:
        reasons.append(compare_others(program, changed, more))
        if not reasons[-1]:
            return size, ""
    if more is not None and compare_others(program, records, more):
        size = None
    return size, f"{NO_RANGES}: {reasons[0]}" if reasons else ""


def compare_others(program: Program, changed: Units, more: Program | None) -> str:
    """`compare_if_possible` in a batch of ``more``, if there is that; says what shows in fewer."""
    with saying(OF_RANGES):
        if more is None:
            return compare_if_possible(program, changed)
        try:
            return compare_if_possible(more, changed)
        except SamplesInteractError as error:
            compare_if_possible(program, changed)
            mixed = error
    with saying(f"on made-up records, {len(more.order)} in a batch (fewer showed nothing)"):
        raise mixed


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
    labels = [each for each in missing if each.whole]
    found = {each: try_one(program, records, each, padded=padded, cheap=cheap) for each in missing}
    said = [] if any(not found[each] for each in labels) or not labels else [NONE_TAKEN]
    named = [each for each, reason in found.items() if reason and each.by_itself]
    return [*said, *(f"not on ones with {each.words}: {found[each]}" for each in named)]


def try_one(program: Program, records: Units, each: Missing, *, padded: bool, cheap: bool) -> str:
    """`try_missing` of one number; returns why it could not be compared, or ""."""
    row = records[0][0]
    known = padded and each.is_padding(row)
    with saying(f"on made-up records with {each.words}{LEFT_OUT}"):
        reason = "" if known else compare_if_possible(program, each.mixed(records))
        # as few as one that is not missing, too
        single = each.flags or (each.single(row) and not known)
        if cheap and single and not reason:
            compare_if_possible(program, each.nearly_all(records))
    return reason


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
    except NothingAloneError as error:
        raise NothingAloneError(f"{where}: {error}") from None
    except SamplesInteractError as error:
        raise SamplesInteractError(f"{where}: {error}") from error.__cause__
