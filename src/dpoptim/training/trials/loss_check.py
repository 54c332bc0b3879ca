"""How `attach` tries the loss and collate function it is given: `check`, on its own records."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpoptim.clipping import Clipping
from dpoptim.distributed.ranks import Ranks
from dpoptim.distributed.wrapping import Wrapping
from dpoptim.errors import PrivacyError
from dpoptim.gradients.engine import Reduction
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.oracle import Loss, engine_sums
from dpoptim.gradients.placement import Placement
from dpoptim.training.batches.collation import collate_records
from dpoptim.training.batches.loading import Collate
from dpoptim.training.batches.privacy_units import Units
from dpoptim.training.batches.records import made_up, refuse_sparse, with_finite_numbers
from dpoptim.training.batches.streams import StreamRecords
from dpoptim.training.batches.user_code import SWITCH, shows_private
from dpoptim.training.losses.handed_over import disagreement, unclear_factor
from dpoptim.training.losses.last_operation import last_of_checked
from dpoptim.training.losses.loss_argument import refuse_other_arguments
from dpoptim.training.losses.other_parameters import refuse_other_parameters
from dpoptim.training.other_libraries import hint_of
from dpoptim.training.trials.alone import refuse_nothing_to_learn, refuse_other_meaning
from dpoptim.training.trials.deterministic_runs import put_back
from dpoptim.training.trials.length_trials import LengthTrials
from dpoptim.training.trials.loss_trials import BY_COLLATE, saying, try_made_up
from dpoptim.training.trials.program import CheckResult, NotFiniteError, Program, compare

TAKEN = 4  # records
GOLDEN_RATIO = 0.618033988749895
OF_DATA_SET = (
    "a few of the data set, if their losses are finite, where passing is one bit about the program"
)
READ_OFF = ", and a scalar's reduction is that of those of the data set"
TOKEN_MEAN = (
    "the loss is a mean over all labels of a batch (tokens, pixels), in which how much a record "
    "weighs depends on the others: each record's own mean is taken instead, and the mean of these "
    "is what is trained, so that long records weigh as much as short ones. "
    "dpoptim.losses.per_sample_mean says the same in the loss itself."
)


NOT_CHECKED = (
    "the loss was not checked: whether one record's loss depends on others is on trust, as where "
    "they meet in what is not differentiated (weights over their mean, mixup). Fix: "
    "dpoptim.attach(..., loss=loss), loss(model, batch) as the loop computes it. Where there is no "
    'such function, warnings.simplefilter("ignore", dpoptim.LossNotCheckedWarning).'
)


class LossNotCheckedWarning(UserWarning):
    """`attach` was not given the loss, which is then on trust."""


@contextmanager
def unwarned() -> Iterator[None]:
    """Around the attaching of a loss that is tested elsewhere: without `LossNotCheckedWarning`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LossNotCheckedWarning)
        yield


class OwnMeansWarning(UserWarning):
    """A loss is trained as the mean of the records' own means over their labels."""


@dataclass(frozen=True)
class LossCheck:
    """Findings about a loss.

    Attributes:
        loss_reduction: how it combines its records: ``"none"`` for one value a record, else as a
            scalar.
        collate_fn: what made the batches; None: torch's.
        text: on what records, for the list of what a guarantee rests on.
        keeps: what of loss and collate function kept something from call to call, see `KeptValues`.
        labels: that a record has in a mean over them, of which its own is taken, see
            `label_means`; 0: there is no such mean. means: how many of them.
        lengths: trials of those that batches will have; None: none are to be tried, as where what
            gathers parts of a model waits for all processes, of which each has its own lengths.
        last: its last operation; "": not known.
    """

    loss_reduction: str
    collate_fn: Collate | None
    text: str
    labels: int = 0
    means: int = 0
    keeps: tuple[str, ...] = ()
    lengths: LengthTrials | None = None
    last: str = ""

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
    expected: int,
    *,
    by_name: bool,
) -> LossCheck:
    """Check a loss on made-up records, of unequal lengths too, and a few of the data set's.

    Args:
        model: not attached.
        loss: ``loss(model, batch)``, as the loop computes it: one value a record, shape (rows,),
            or a scalar.
        row: whose form made-up records have.
        declared: what a scalar was said to be.
        units: of the data set; the rows of one may meet each other.
        isolation: how the model will keep records apart. Those that pass alone meet nobody: only
            whether the loss stays what it is is checked.
        wrapping: of the model. ranks: that train it.
        expected: records of a batch, of one rank.
        by_name: whether the user asked for this way.

    Raises:
        NotByThisWayError: each record's gradient is its own, but not in the model's way of keeping
            them apart.
        SamplesInteractError: a record's gradient depends on other records.
        PrivacyError: loss or collate function cannot be run on records of the data set; without
            what was raised, which might quote one.

    **Guarantee.** Only whether the program treats records independently, and in what way they can
    be kept apart, is told: facts about the program. Numbers of the data set that are not finite are
    tried as 1, so that whether somebody's are is not told. Where it shows is told of made-up
    records only. These alone tell how the loss is reduced; the data set's may refuse, and do not
    where their losses are not finite (labels that are all ignored).
    """
    collate = collate_records if collate_fn is None else collate_fn
    with put_back(model):  # with what collating draws
        refuse_sparse_batches(collate, row)
    if isolation.alone:
        refuse_what_fails_alone(model, loss, collate, row, wrapping)
        program = Program(model, loss, collate, (), wrapping)
        if refuse_other_meaning(program, row, by_name=by_name):
            refuse_nothing_to_learn(program, some_records(train_set, units, wrapping, ranks))
        return LossCheck("none", collate_fn, "")
    program = Program(model, loss, collate, (isolation,), wrapping)
    tried = try_made_up(
        program, row, units.rows.per_record, expected, sequences=collate_fn is not None
    )
    taken = some_records(train_set, units, wrapping, ranks)
    if tried.zero:
        refuse_nothing_to_learn(program, taken)
    with saying(f"on records of the data set{BY_COLLATE}"):
        found = compare_private(program, taken, tried.found)
    if declared is not None and found.loss_reduction not in ("none", declared):
        raise disagreement(found.loss_reduction, declared)
    if declared is None and found.loss_reduction == "sum" and found.multiplied:
        raise unclear_factor(checked=True)  # it is no mean, and so small that noise would drown it
    on = [*tried.on, OF_DATA_SET]
    if found.labels > 1:
        warnings.warn(TOKEN_MEAN, OwnMeansWarning, stacklevel=5)
        on.append("of its mean over labels each record's own mean counts")
    if found.skipped:
        on.append(found.skipped)
    if tried.skipped:
        on.append(f"not on made-up ones: {tried.skipped}{READ_OFF}")
    text, means = "; ".join(on), (found.labels, found.means)
    rows = units.rows.per_record
    return LossCheck(
        found.loss_reduction,
        collate_fn,
        text,
        *means,
        lengths=None if wrapping.spread else tried.lengths,
        last=last_of_checked(model, loss, collate, row, rows, spread=wrapping.spread),
    )


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
        except Exception as error:  # whatever the user's code raises on made-up records
            refuse_other_arguments(error, model)


def refuse_sparse_batches(collate: Collate, row: Any) -> None:
    """Refuse a collate function that makes sparse tensors, by a made-up record."""
    batches = list[Any]()
    with suppress(Exception):  # whatever the user's function raises on made-up records
        batches.append(collate([made_up(row, torch.Generator().manual_seed(0))]))
    for batch in batches:
        refuse_sparse(batch, "batches have, by collate_fn,")


def some_records(
    train_set: Dataset[Any], units: Units, wrapping: Wrapping, ranks: Ranks
) -> list[list[Any]]:
    """A few records of the data set, as their rows, with 1 for numbers that are not finite."""
    at = places(units.count, in_order=isinstance(train_set, StreamRecords))
    own = [units.some_rows(train_set, place) for place in at]
    # a record that is not finite shows nothing of others, and would fail for whoever it is
    return [[with_finite_numbers(row) for row in rows] for rows in wrapping.trial_rows(own, ranks)]


def places(count: int, *, in_order: bool) -> list[int]:
    """Records of a data set to take: the first ones, or some that no habit of its order meets."""
    if in_order or count <= TAKEN:
        return [min(i, count - 1) for i in range(TAKEN)]
    return [int(i * count * GOLDEN_RATIO) % count for i in range(TAKEN)]


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


def compare_private(
    program: Program, taken: Sequence[Sequence[Any]], known: CheckResult | None
) -> CheckResult:
    """`compare`, of whose errors none tells anything of the records.

    Args:
        known: what made-up records showed, if they could be tried.

    Returns:
        what is known; what these records show only where no others could be tried.
    """
    if known is not None:
        program = replace(program, reductions=known.reductions)
    try:
        with nothing_new(program.model):
            found = compare(replace(program, on_private=True), taken)
        return known or found
    except PrivacyError:
        raise
    except NotFiniteError:
        if known is not None:  # whose labels are missing is not told
            return known
        raise PrivacyError(
            "the losses of the records that were tried of train_set are not finite, though these "
            "records' numbers are, or were set to 1: nothing would be learnt from them. Fix: a "
            "loss that is finite (a log of what is never zero, labels in range)."
        ) from None
    except Exception as error:
        hint = hint_of(error, error.__traceback__)
        if hint is not None:
            raise PrivacyError(hint) from None
        refuse_other_arguments(error, program.model)
        if shows_private():
            raise
        raise PrivacyError(
            f"loss or collate_fn raised {type(error).__name__} on records of train_set, and what "
            "it says might quote one. Fix: try loss(model, collate_fn([record, record])), and of "
            "one record, on records that are public; the loss takes the batch as the loop does, "
            "and moves it to the model's device. Where nobody else reads what the program prints, "
            f"{SWITCH}=1 in the environment shows what was raised."
        ) from None
