"""A training loop's dealings with records: a batch, compared with its records alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpoptim.errors import PrivacyError
from dpoptim.gradients.engine import Reduction
from dpoptim.gradients.hooks.refusals import watch_batch_statistics
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.oracle import Loss
from dpoptim.gradients.placement import IN_PLACE, Placement
from dpoptim.gradients.watch.values import Values
from dpoptim.losses import without_single_axes
from dpoptim.training.batches import records as forms
from dpoptim.training.batches.loading import Collate
from dpoptim.training.losses.handed_over import refuse_complex_losses
from dpoptim.training.losses.label_means import (
    means_for_all,
    of_own_means,
)
from dpoptim.training.losses.other_parameters import refuse_other_parameters
from dpoptim.training.losses.reduction import read_graph
from dpoptim.training.randomness.drawing_collates import DRAWS, HeldDraws
from dpoptim.training.trials.compared_batches import Batches
from dpoptim.training.trials.comparison import Comparison
from dpoptim.training.trials.deterministic_runs import Quieting, Remembered, autocast_seen
from dpoptim.training.trials.fixed_noise import MIDDLE, RARE, see_one_row
from dpoptim.training.trials.loss_refusals import (
    LOSSES_AGREE,
    refuse_draws_elsewhere,
    refuse_losses_lost_beside_others,
    refuse_losses_moved,
    refuse_other_losses,
    refuse_other_order,
    same_losses,
    single_failures_refused,
)
from dpoptim.training.trials.made_up_batches import odd_batch_size
from dpoptim.training.trials.tolerances import computed_dtypes, tolerance_of
from dpoptim.training.trials.variations import Units
from dpoptim.training.trials.within_memory import within_memory

# of keeping records apart, either of which will do
WAYS = (Isolation.of("rules"), Isolation.of("vmap"))


class NotFiniteError(ArithmeticError):
    """Losses are not finite."""


@dataclass(frozen=True)
class Program:
    """A training loop's dealings with records.

    Attributes:
        loss: ``loss(model, batch)``: one value a record, or a scalar.
        collate: makes a batch of a list of rows.
        ways: of keeping records apart in the model; the first one that gives each record its own
            gradient counts.
        placement: of the model's parameters.
        on_private: whether the records are; then no error tells where they meet most.
        reductions: that a scalar loss may have.
        order: which record is at each place of a batch; (): all in turn, of as many as are unlike
            any other axis.
        quieting: of model and loss.
    """

    model: nn.Module
    loss: Loss
    collate: Collate
    ways: Sequence[Isolation] = WAYS
    placement: Placement = IN_PLACE
    on_private: bool = False
    reductions: tuple[Reduction, ...] = ("mean", "sum")
    order: tuple[int, ...] = ()
    quieting: Quieting = field(default_factory=Quieting)


@dataclass(frozen=True)
class CheckResult:
    """Findings of `dpoptim.check`.

    Attributes:
        loss_reduction: how the loss combines its records: ``"none"`` for one value a record, else
            what to pass to `attach`.
        records: how many were compared.
        skipped: what could not be compared of a collate function that draws random numbers, and
            why; else "".
        multiplied: whether a scalar, all of it, was multiplied or divided by a number after it was
            reduced.
        labels: that a record has in a mean over them, of which its own is taken, see
            `label_means`; 0: there is no such mean. means: how many of them.
        zero: whether all gradients were, with any random numbers, as of images without any box:
            they show nothing.
    """

    loss_reduction: Literal["none", "mean", "sum"]
    records: int
    skipped: str = ""
    multiplied: bool = False
    labels: int = 0
    means: int = 0
    zero: bool = False

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """Those that a scalar loss may have elsewhere."""
        return ("mean", "sum") if self.loss_reduction == "none" else (self.loss_reduction,)


def compare_if_possible(program: Program, records: Units) -> str:
    """Compare records that model and loss may not take; returns why they could not, or "".

    Raises:
        PrivacyError: they were, and are mixed.
    """
    return if_possible(lambda: compare(program, records))


def if_possible(compared: Callable[[], object]) -> str:
    """Why something could not be compared, or ""; see `compare_if_possible`."""
    try:
        with within_memory():
            compared()
    except PrivacyError:
        raise
    except Exception as error:  # whatever the user's code raises on made-up input
        return f"{type(error).__name__} was raised on them"
    return ""


def compare(program: Program, records: Units) -> CheckResult:
    """Compare the batch of ``records`` with each of them alone.

    Some may be repeated, for an axis of its own. Where collating draws random numbers: with each
    of `DRAWS`. Under autocast: with and without.

    Args:
        records: the rows of each, of all equally many.

    Raises:
        SamplesInteractError: a record's gradient depends on the others, or on batches before.
        NotFiniteError: their losses are not, so that there is nothing to compare.
    """
    held = HeldDraws(program.collate, DRAWS["all"])
    held.refuse_other_batch([row for rows in records for row in rows])
    with autocast_seen() as asked:
        found = compare_held(replace(program, collate=held), records)
    if asked:  # in as many digits as there are, what mixes records a little is no rounding
        with autocast_seen(off=True):
            if_possible(partial(compare_held, replace(program, collate=held), records))
    if not held.drew:
        return found
    others = {name: HeldDraws(program.collate, DRAWS[name]) for name in ("half", "nothing")}
    reasons = {
        name: if_possible(partial(compare_held, replace(program, collate=other), records))
        for name, other in others.items()
    }
    skipped = [
        f"not where {name} of what collate_fn draws happens: {reason}"
        for name, reason in reasons.items()
        if reason
    ]
    return replace(found, skipped="; ".join(skipped))


def compare_held(program: Program, records: Units) -> CheckResult:
    """`compare`, of a collate function that draws nothing.

    What the loss draws for all records at once, such as a coin that decides whether a batch is
    mixed, is tried small and large as well.
    """
    found, shared = compare_drawn(program, records)
    for uniform in (RARE, 1 - RARE) if shared else ():
        if_possible(lambda: compare_drawn(program, records, uniform)[0])  # noqa: B023
    return found


def compare_drawn(
    program: Program, records: Units, uniform: float = MIDDLE
) -> tuple[CheckResult, bool]:
    """`compare` where the loss draws such numbers (see `FixedNoise`).

    Returns:
        also whether it draws any that all records share.
    """
    model, collate, per_record = program.model, program.collate, len(records[0])
    leaves = [x for _, x in forms.leaves_of(collate([*records[0]])) if isinstance(x, Tensor)]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return without_single_axes(batches.loss_of(program.loss, model, batch))

    odd = odd_batch_size(model, leaves, least=len(records))
    batches = Batches(collate, records, [*program.order] or in_turn(len(records), odd))
    count = len(batches.order)
    # What is drawn for one row first tells axes of rows from others that are as long.
    one, together, alone = batches.of([0]), batches.together, batches.alone
    watch_batch_statistics(model)
    values = Values([*model.named_buffers(), *model.named_parameters()])
    seen = Remembered(lambda: [loss(model, together)])
    with program.quieting.quiet(model, seen, uniform) as quieted:
        if quieted.draws:
            refuse_draws_elsewhere()
        see_one_row(quieted.noise, lambda: loss(model, one))
        losses = same_losses(model, lambda: loss(model, together), seen.last(quieted), values)
        refuse_complex_losses(losses)
        refuse_other_parameters(losses, model, program.placement)
        private = program.on_private
        with single_failures_refused(lambda: loss(model, together), count, on_private=private):
            dtypes = computed_dtypes(model, lambda: loss(model, alone[0]))
        refuse_no_numbers(losses, lambda: [loss(model, each) for each in alone])
        tolerance = tolerance_of(model, program.placement, dtypes)
        how = program.ways, program.placement, program.on_private, tolerance
        if losses.dim() == 0:
            means = means_for_all(losses, loss(model, alone[0]))
            apart = partial(of_own_means, loss, batches.records_in, len(means))
            compared = Comparison(model, apart, batches, *how)
            found = compared.reduction((means.reduction,) if len(means) else program.reductions)
            zero = compared.shows_nothing() and not quieted.shares
        else:
            refuse_other_losses(losses, (count, count * per_record), on_private=program.on_private)
            each = EachLoss(loss)
            compared = Comparison(model, each.summed, batches, *how)
            with single_failures_refused(
                lambda: differentiated(model, each.summed(model, together)),
                count,
                on_private=private,
            ):
                try:
                    compared.take_alone("sum")
                finally:  # whatever their gradients raise
                    own = each.seen(model, alone)
                    refuse_other_order(losses, own, batches, tolerance, on_private=private)
            if tolerance > LOSSES_AGREE:  # what it hides is no rounding in batches of one shape
                refuse_losses_moved(losses, lambda batch: loss(model, batch), batches)
            compared.reduction(("sum",))
            zero = compared.shows_nothing() and not quieted.shares
            return CheckResult("none", count, zero=zero), quieted.shares
    # Out here: what `quiet` sets for models that draw noise cannot read a graph's numbers.
    if labels := means.each(count):
        checked = CheckResult("mean", count, labels=labels, means=len(means), zero=zero)
        return checked, quieted.shares
    reading = read_graph(losses)
    scaled = reading is not None and reading.scaled
    return CheckResult(found, count, multiplied=scaled, zero=zero), quieted.shares


def refuse_no_numbers(losses: Tensor, alone: Callable[[], list[Tensor]]) -> None:
    """Refuse losses of which too few are finite to show anything of others.

    A scalar that one record makes no number may have gradients of the others.

    Raises:
        NotFiniteError: they show nothing.
        SamplesInteractError: records alone have finite ones.
    """
    if int(losses.isfinite().sum()) >= min(2, losses.numel()):
        return
    own = alone()
    refuse_losses_lost_beside_others(losses, own)
    if losses.dim() or sum(bool(each.isfinite()) for each in own) < 2:
        raise NotFiniteError


def differentiated(model: nn.Module, loss: Tensor) -> None:
    """Raise what autograd does."""
    held = [p for p in model.parameters() if p.requires_grad]
    torch.autograd.grad(loss, held, allow_unused=True)


def in_turn(records: int, count: int) -> list[int]:
    """Records again and again, until so many places of a batch are taken."""
    return [i % records for i in range(count)]


class EachLoss:
    """A loss of one value a record, or a row, as a scalar; keeps the values of batches."""

    def __init__(self, loss: Loss) -> None:
        self._loss, self._seen = loss, dict[int, Tensor]()

    def summed(self, model: nn.Module, batch: Any) -> Tensor:
        losses = self._loss(model, batch)
        self._seen[id(batch)] = losses.detach()
        return losses.sum()

    def seen(self, model: nn.Module, batches: Sequence[Any]) -> list[Tensor]:
        """Values of batches that are still there, as they were given, or are given now."""
        return [
            self._seen[id(batch)] if id(batch) in self._seen else self._loss(model, batch)
            for batch in batches
        ]
