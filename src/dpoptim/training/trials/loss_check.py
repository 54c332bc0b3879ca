"""How `attach` tries the loss and collate function it is given: `check`, on its own records."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpoptim.clipping import Clipping
from dpoptim.distributed.ranks import Ranks
from dpoptim.distributed.wrapping import Wrapping
from dpoptim.errors import NotByThisWayError, PrivacyError, SamplesInteractError
from dpoptim.gradients.engine import Reduction
from dpoptim.gradients.engine_sums import engine_sums
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.oracle import Loss
from dpoptim.gradients.placement import Placement
from dpoptim.training.batches.collation import collate_records
from dpoptim.training.batches.loading import Collate
from dpoptim.training.batches.privacy_units import Units
from dpoptim.training.batches.records import made_up, with_finite_numbers
from dpoptim.training.batches.streams import StreamRecords
from dpoptim.training.losses.handed_over import disagreement, unclear_factor
from dpoptim.training.losses.other_parameters import refuse_other_parameters
from dpoptim.training.other_libraries import hint_of
from dpoptim.training.trials.check import (
    CheckResult,
    NotFiniteError,
    Program,
    compare,
    compare_if_possible,
    if_possible,
)
from dpoptim.training.trials.deterministic_runs import put_back
from dpoptim.training.trials.variations import (
    with_a_blank,
    with_a_large_one,
    with_missing,
    with_padding,
)

MADE_UP, TAKEN = 5, 4  # records
GOLDEN_RATIO = 0.618033988749895
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


@dataclass(frozen=True)
class LossCheck:
    """Findings about a loss.

    Attributes:
        loss_reduction: how it combines its records: ``"none"`` for one value a record, else as a
            scalar.
        collate_fn: what made the batches; None: torch's.
        text: on what records, for the list of what a guarantee rests on.
        by_labels: whether it is a mean by class weights, or by labels that are not ignored.
    """

    loss_reduction: str
    collate_fn: Collate | None
    text: str
    by_labels: bool = False

    @property
    def scalar_reduction(self) -> Reduction | None:
        """The reduction of a scalar loss; None where the loss is one value a record."""
        return {"mean": "mean", "sum": "sum"}.get(self.loss_reduction)  # type: ignore[return-value]


def check_loss(
    model: nn.Module,
    loss: Loss,
    train_set: Dataset[Any],
    row: Any,
    collate_fn: Collate | None,
    declared: Reduction | None,
    units: Units,
    isolation: Isolation,
    wrapping: Wrapping,
    ranks: Ranks,
) -> LossCheck:
    """Check a loss on made-up records, of unequal lengths too, and a few of the data set's.

    Args:
        model: not attached.
        loss: ``loss(model, batch)``, as the loop computes it: one value a record, shape (rows,),
            or a scalar.
        row: whose form made-up records have.
        declared: what a scalar was said to be.
        units: of the data set; the rows of one may meet each other.
        isolation: how the model will keep records apart. Those that pass alone meet nobody, so
            there is nothing to check.
        wrapping: of the model. ranks: that train it.

    Raises:
        NotByThisWayError: each record's gradient is its own, but not in the model's way of keeping
            them apart.
        SamplesInteractError: a record's gradient depends on other records.
        PrivacyError: loss or collate function cannot be run on records of the data set; without
            what was raised, which might quote one.

    **Guarantee.** Only whether the program treats records independently, and in what way they can
    be kept apart, is told: facts about the program. Numbers of the data set that are not finite are
    tried as 1, so that whether somebody's are is not told. Where it shows is told of made-up
    records only.
    """
    collate = collate_records if collate_fn is None else collate_fn
    if isolation.alone:
        refuse_what_fails_alone(model, loss, collate, row, wrapping)
        return LossCheck("none", collate_fn, "")
    program = Program(model, loss, collate, (isolation,), wrapping, by_labels=True)
    on, skipped = check_on_made_up(
        program, row, units.rows.per_record, sequences=collate_fn is not None
    )
    at = places(units.count, in_order=isinstance(train_set, StreamRecords))
    own = [units.some_rows(train_set, place) for place in at]
    # a record that is not finite shows nothing of others, and would fail for whoever it is
    taken = [[with_finite_numbers(row) for row in rows] for rows in wrapping.trial_rows(own, ranks)]
    with saying(f"on records of the data set{BY_COLLATE}"):
        found = compare_private(program, taken)
    if declared is not None and found.loss_reduction not in ("none", declared):
        raise disagreement(found.loss_reduction, declared)
    if declared is None and found.loss_reduction == "sum" and found.multiplied:
        raise unclear_factor()  # it is no mean, and so small that noise would drown it
    on.append("a few of the data set, where passing is one bit about the program")
    if found.skipped:
        on.append(found.skipped)
    if skipped:
        on.append(f"not on made-up ones: {skipped}")
    return LossCheck(found.loss_reduction, collate_fn, "; ".join(on), found.by_labels)


def refuse_what_fails_alone(
    model: nn.Module, loss: Loss, collate: Collate, row: Any, placement: Placement
) -> None:
    """Refuse what no record can be differentiated by, passing alone, before anything is charged.

    Such as custom functions that run a backward pass of their own, and losses that depend on other
    parameters than the model's; by a made-up record, if that can be run.
    """

    def summed(model: nn.Module, batch: Any) -> Tensor:
        losses = loss(model, batch)
        refuse_other_parameters(losses, model, placement)
        return losses.sum()

    generator, way = torch.Generator().manual_seed(0), Isolation.of("alone")
    with put_back(model):
        try:
            batch = collate([made_up(row, generator)])
            engine_sums(model, summed, batch, 1, Clipping(1.0), "sum", way, placement=placement)
        except PrivacyError:
            raise
        except Exception:  # whatever the user's code raises on made-up records
            return


def places(count: int, *, in_order: bool) -> list[int]:
    """Records of a data set to take: the first ones, or some that no habit of its order meets."""
    if in_order or count <= TAKEN:
        return [min(i, count - 1) for i in range(TAKEN)]
    return [int(i * count * GOLDEN_RATIO) % count for i in range(TAKEN)]


def check_on_made_up(
    program: Program, form: Any, rows: int, *, sequences: bool
) -> tuple[list[str], str]:
    """Check the loss on records that nobody owns.

    Args:
        form: a row, of which only the form is used.
        rows: of a record.
        sequences: whether to try shorter ones, too.

    Returns:
        what was compared, and why nothing was; either is empty.
    """
    generator = torch.Generator().manual_seed(0)
    try:
        invented = [[made_up(form, generator) for _ in range(rows)] for _ in range(MADE_UP)]
    except TypeError as error:
        return [], f"nobody can make up {error}"
    with saying("on made-up records"):
        found = list[CheckResult]()
        skipped = if_possible(lambda: found.append(compare(program, invented)))
    if skipped or found[0].zero:
        return [], skipped or "their losses are zero"
    with saying(f"on made-up records of unequal lengths{BY_COLLATE}"):
        also = "" in compare_each(program, with_padding(invented, sequences=sequences))
    missing = tries_missing(program.model)
    with saying("on made-up records, one of them large"):
        compare_each(program, with_a_large_one(invented))
    with saying("on made-up records with missing numbers"):
        compare_each(program, with_missing(invented) if missing else ())
    on = ["made-up records, also of unequal lengths" if also else "made-up records"]
    if sequences and sees_others_if_blank(program, invented):
        on.append(BLANK)
    return on if missing else [*on, NONE_MISSING], ""


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


@contextmanager
def nothing_new(model: nn.Module) -> Iterator[None]:
    """Take buffers and parameters out of the model again that were put into it meanwhile.

    They may hold records of the data set. Those that are made from the form of records are there
    since made-up ones were tried.
    """
    modules = [*model.modules()]
    holders: list[dict[str, Any]] = [m._buffers for m in modules]
    holders += [m._parameters for m in modules]
    before = [dict(holder) for holder in holders]
    try:
        yield
    finally:
        for holder, held in zip(holders, before, strict=True):
            for name in [name for name in holder if name not in held]:
                del holder[name]
            holder.update({name: None for name, t in held.items() if t is None})


def compare_private(program: Program, taken: Sequence[Sequence[Any]]) -> CheckResult:
    """`compare`, of whose errors none tells anything of the records."""
    try:
        with nothing_new(program.model):
            return compare(replace(program, on_private=True), taken)
    except PrivacyError:
        raise
    except NotFiniteError:
        raise PrivacyError(
            "the losses of the records that were tried of train_set are not finite, though these "
            "records' numbers are, or were set to 1: nothing would be learnt from them. Fix: a "
            "loss that is finite (a log of what is never zero, labels in range)."
        ) from None
    except Exception as error:
        hint = hint_of(error, error.__traceback__)
        if hint is not None:
            raise PrivacyError(hint) from None
        raise PrivacyError(
            f"loss or collate_fn raised {type(error).__name__} on records of train_set, and what "
            "it says might quote one. Fix: try loss(model, collate_fn([record, record])) on a "
            "record that is public; the loss takes the batch as the loop does, and moves it to the "
            "model's device."
        ) from None
