"""Losses as a loop hands them over: one for each record, or a scalar made of them."""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from torch import Tensor

from dpoptim.errors import PrivacyError, SamplesInteractError, axes_of
from dpoptim.gradients.backward_pass import BOTH_LOSSES, BY_INPUTS
from dpoptim.gradients.engine import Engine, Reduction
from dpoptim.gradients.hooks.hook_manager import HookManager
from dpoptim.losses import without_single_axes
from dpoptim.training.losses.coupled_losses import coupled, refuse_coupled_losses
from dpoptim.training.losses.label_means import LabelMeans, own_means
from dpoptim.training.losses.last_operation import last_operation
from dpoptim.training.losses.meeting_places import compares_outputs, refuse_broadcast
from dpoptim.training.losses.other_parameters import refuse_other_parameters
from dpoptim.training.losses.reduction import IN_PARTS, ONE_BY_ONE, Reading, read_reduction
from dpoptim.training.losses.scaled_losses import (
    Lengths,
    Microbatches,
    warn_of_divided_losses,
    warn_of_divided_means,
    warn_of_large_means,
)
from dpoptim.training.trials.made_up_records import Returned

UNSEEN = (
    "the loss that attach was given has a mean over labels, in which how much a record weighs "
    "depends on the others (class weights, labels that are not ignored); the graph of this one "
    "does not show where that is to be undone. "
)


@dataclass(frozen=True)
class Scalar:
    """A scalar loss, by what its graph shows and what was declared.

    Attributes:
        reading: of its graph; None: it shows nothing.
        reduction: how it was made of the records' losses.
        means: over labels that it has, see `label_means`. Private.
    """

    reading: Reading | None
    reduction: Reduction
    means: int


class HandedOver:
    """Reductions of a loop's losses, by what was declared, checked, and handed over before.

    Args:
        declared: what `attach` was told about scalars, or found out about the loss it was given.
        checked: what batches of several sizes showed: "mean", "sum", or "none", one a record.
        whole: whether every record is in every batch, so that no other length will show itself.
        returned: where records were found in what the model returns.
        means: over labels, that the checked loss has; see `label_means`.
        last: the last operation of the checked loss; "": not known.

    Attributes:
        steps: where a step is; None: each batch is whole.
        cut: whether batches were asked for that are cut to fit memory.
        adds: whether losses had another last operation than the one that was checked.
    """

    def __init__(
        self,
        declared: Reduction | None,
        *,
        checked: str | None,
        whole: bool = False,
        returned: Collection[Returned] = (),
        means: int = 0,
        last: str = "",
    ) -> None:
        self.declared, self.checked, self._whole = declared, checked in ("mean", "sum"), whole
        self._widths = None if checked else set[int]()  # see `refuse_broadcast`; private
        self._means = means  # over labels, in the loss; unless checked, of the first batch; private
        self.returned = returned
        self._factors: tuple[float, ...] | None = None  # of the first scalar; private
        self._warned = self._warned_of_vector = False
        self._lengths, self.cut = Lengths(), False
        self.steps: Microbatches | None = None
        self._last, self.adds = last, False

    def backward(self, engine: Engine, losses: Tensor) -> None:
        """Let the engine differentiate losses; see `BatchLoop.backward`."""
        require_losses(losses)
        refuse_other_parameters(losses, engine.model, engine.placement)
        losses = without_single_axes(losses)
        self.refuse_coupled(engine, losses)
        if engine.isolation.alone:  # whatever it is, there is nobody else in it
            engine.backward(losses)
        elif losses.dim() == 0 and engine.takes_scalars:
            self._scalar(engine, losses)
        elif losses.dim() != 1:
            raise not_one_each(axes_of(losses))
        else:
            if self.cut and not self._warned_of_vector:
                self._warned_of_vector = warn_of_divided_losses(losses)
            vector_backward(engine, losses)

    def refuse_coupled(self, engine: Engine, losses: Tensor) -> None:
        """Refuse losses in which outputs meet other records' targets or outputs.

        Where records pass alone there are none.
        """
        self.adds |= bool(self._last) and last_operation(losses) not in ("", self._last)
        hooks = engine.hooks
        edges = hooks.outputs.edges if isinstance(hooks, HookManager) else []
        refuse_coupled_losses(engine, losses, self.returned)
        if edges and self._widths is not None:
            refuse_broadcast(losses, engine.rows_open, {e.node for _, e in edges}, self._widths)

    def _scalar(self, engine: Engine, loss: Tensor) -> None:
        if not engine.rows_open:
            raise other_length(engine, loss)
        found = self.read(engine, loss)
        terms = None if found.reading is None else found.reading.terms
        of_records = terms is not None and all(one_for_each_record(engine, n) for n in terms)
        with self.own_means(engine, loss) as own:
            found = found if own is None else replace(found, reduction=own)
            if of_records and found.reduction == "sum":
                loss = times_rows(engine, loss)
            elif of_records and engine.rows.reduction == "sum":
                loss = loss / engine.rows.per_record  # which the engine takes for a mean over rows
            engine.backward(loss, found.reduction, "scalar")
        self.keep(engine, found)

    def own_means(self, engine: Engine, loss: Tensor) -> AbstractContextManager[Reduction | None]:
        """Around the differentiation of a scalar: see `label_means.each_its_own`."""
        if engine.partial_backward:  # whose labels a part of the rows has, nobody knows
            return nullcontext()
        rows, records = engine.rows_open, engine.rows_open // engine.rows.per_record
        return own_means(loss, rows, records, self._means if self.checked else None)

    def read(self, engine: Engine, loss: Tensor) -> Scalar:
        """A scalar, by its graph and what was declared.

        Raises:
            PrivacyError: they disagree, or neither tells how it was made of the records' losses.
        """
        return self._scalar_of(engine, loss, self._reading(engine, loss))

    def keep(self, engine: Engine, scalar: Scalar) -> None:
        """Note the factors of the first scalar that was differentiated; warn of some means."""
        reading = scalar.reading
        # a mean, that of labels too, that was divided by a whole number
        divided = reading is not None and reading.reduction == "mean" and reading.divided
        if not self._warned and (scalar.reduction == "mean" or divided):
            self._warned = True
            if scalar.reduction == "mean":
                warn_of_large_means(engine)
            if divided:
                warn_of_divided_means()
        if self._factors is None and reading is not None:
            self._factors = reading.factors
        self._means = self._means if self.checked else self._means or scalar.means

    def _reading(self, engine: Engine, loss: Tensor) -> Reading | None:
        if engine.partial_backward:  # of a part of the rows, nobody knows how many they are
            return None
        if self.checked and not self._means and len(LabelMeans.of(loss)):
            return None  # a mean for each record, say, which was checked as it is
        rows, records = engine.rows_open, engine.rows_open // engine.rows.per_record
        try:
            return read_reduction(loss, rows, records, checked=self.checked)
        except SamplesInteractError:
            given = None if engine.hooks is None else engine.hooks.given
            if given is not None and given < engine.rows_open:
                raise SamplesInteractError(IN_PARTS) from None
            if compares_outputs(loss):  # labels are places in the batch
                raise coupled() from None
            raise

    def _scalar_of(self, engine: Engine, loss: Tensor, reading: Reading | None) -> Scalar:
        reduction = self._agreed(reading)
        means = self._means_in(engine, loss, reading)
        if reading is not None and self._whole and not self.checked:
            rows, records = engine.rows_open, engine.rows_open // engine.rows.per_record
            self._lengths.refuse(reading, {rows, records}, self.steps)
        return Scalar(reading, reduction, means)

    def _means_in(self, engine: Engine, loss: Tensor, reading: Reading | None) -> int:
        """The means over labels, of which the check, or the first batch, had as many."""
        number = 0 if engine.partial_backward else len(LabelMeans.of(loss))
        if self.checked:
            plain = number == 0 and reading is not None  # as of losses for each record
            if self._means and number != self._means and not plain:
                raise SamplesInteractError(f"{UNSEEN}{ONE_BY_ONE}")
            return number
        counts = {engine.rows_open, engine.rows_open // engine.rows.per_record}
        one_each = not self._means and number > 1 and number in counts
        if number and (one_each or self._means not in (0, number)):
            raise SamplesInteractError(
                "the loss adds up means over labels, as many as there are records or in another "
                "number than before: whose labels they are over, its graph does not show. Fix: "
                "give attach the loss, dpoptim.attach(..., loss=...), which finds out; or hand "
                'over one loss for each record, by reduction="none".'
            )
        return number

    def _agreed(self, reading: Reading | None) -> Reduction:
        """The reduction of a scalar loss, by what was read and what was declared.

        Raises:
            PrivacyError: they disagree, or neither says; or without a check a factor, of which the
                graph of one batch does not show what it is, makes a mean of a sum, or changes.
        """
        if reading is None or (reading.factors and self.checked):
            return self._declared()
        if reading.reduction == "sum" and reading.factors and self.declared != "sum":
            raise unclear_factor(checked=False)
        if self.declared not in (None, reading.reduction):
            raise disagreement(reading.reduction, str(self.declared))
        if self._factors not in (None, reading.factors) and not self.checked:
            raise PrivacyError(
                "the loss was divided or multiplied by another number in this batch than in the "
                "first one, such as a batch's length or a count of tokens: how much a record "
                f"weighs depends on the others, or seems to. {ONE_BY_ONE} A factor that follows a "
                "public schedule: private.backward(losses * factor)."
            )
        return reading.reduction

    def _declared(self) -> Reduction:
        if self.declared is None:
            raise PrivacyError(
                "the loss is a scalar whose graph does not show whether it is the mean or the sum "
                "of the records' losses, or neither. Fix: give attach the loss, "
                "dpoptim.attach(..., loss=...), which finds out; or hand over one loss for each "
                'record, private.backward(losses), by reduction="none"; or say it: loss_reduction=.'
            )
        return self.declared


def require_losses(losses: Tensor) -> None:
    if not isinstance(losses, Tensor):
        raise TypeError(
            f"losses must be a tensor with one loss for each record, got {type(losses).__name__}."
        )
    if not losses.requires_grad:
        raise PrivacyError(
            "losses do not depend on anything trainable. Fix: compute them from model(x), outside "
            "of torch.no_grad()."
        )
    refuse_complex_losses(losses)


def refuse_complex_losses(losses: Tensor) -> None:
    if losses.is_complex():
        raise PrivacyError(
            "losses are complex, and have no order in which to go down. Fix: hand over real "
            "numbers, such as output.abs().square(), or losses.real."
        )


def vector_backward(engine: Engine, losses: Tensor) -> None:
    """Let the engine differentiate losses, one for each row or record."""
    if one_for_each_record(engine, losses.shape[0]):
        engine.backward(times_rows(engine, losses))
    elif losses.shape[0] == engine.rows_open or engine.takes_parts:
        engine.backward(losses)
    else:
        raise other_length(engine, losses)


def one_for_each_record(engine: Engine, losses: int) -> bool:
    """Whether there are as many losses as records of several rows, whose rows are reduced."""
    K = engine.rows.per_record
    return K > 1 and K * losses == engine.rows_open and engine.present is None


def times_rows(engine: Engine, losses: Tensor) -> Tensor:
    """Losses of whole records, times what the engine divides the sum over a record's rows by."""
    return losses * engine.rows.per_record if engine.rows.reduction == "mean" else losses


def other_length(engine: Engine, losses: Tensor) -> PrivacyError:
    """Refusal of losses that are not of the rows still open; how many these are is private."""
    if engine.rows_open:
        return not_one_each(f"{axes_of(losses)} of another length")
    return PrivacyError(
        "private.backward was called again for rows that went through it already (as they do in "
        "torch.autograd.grad(loss, parameters), which has no gradients of an attached model to "
        "return), or without a batch from private.batches(): their gradients would count twice. "
        "Fix: "
        f"{BOTH_LOSSES}, private.backward(first + second); iterate over "
        f"private.batches() in place of a loader of your own; {BY_INPUTS}."
    )


def not_one_each(got: str) -> PrivacyError:
    return PrivacyError(
        f"private.backward takes one loss for each delivered record, shape (rows,); got {got}. "
        f"{ONE_BY_ONE}"
    )


def unclear_factor(*, checked: bool) -> PrivacyError:
    """The refusal of a sum by a number that nobody declared.

    Args:
        checked: whether the loss was tried in batches of several sizes, where it stayed a sum.
    """
    if checked:
        what = (
            "the loss is a sum over the batch that was divided or multiplied by a constant, such "
            "as the plan's batch size: gradients would be clipped as small as they are, under the "
            "same noise. Fix: "
        )
    else:
        what = (
            "the loss is a sum over the batch that was divided or multiplied by a number, and one "
            "batch does not show whether that is a constant, the batch's length "
            '(reduction="batchmean"), or a count of what records hold. Fix: give attach the loss, '
            "dpoptim.attach(..., loss=...), which finds out; or "
        )
    return PrivacyError(
        f'{what}hand over one loss for each record, by reduction="none"; or write losses.mean(); '
        'or losses.sum(), which the plan divides by its batch size. loss_reduction="sum" says that '
        "a constant is meant."
    )


def disagreement(found: str, declared: str) -> PrivacyError:
    return PrivacyError(
        f'the loss is a {found} over the batch, but attach was told loss_reduction="{declared}": '
        "gradients would be clipped "
        f'at the wrong scale. Fix: loss_reduction="{found}"; or private.backward(losses) with '
        "one loss for each record "
        '(reduction="none"), which needs no such argument.'
    )
