"""How a scalar loss was made of the records' losses, by the graph that autograd kept."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpoptim.errors import PrivacyError, SamplesInteractError, axes_of
from dpoptim.gradients.engine import Engine, Reduction

MEAN, SUM = 1, 2  # as torch's losses save it
ONE_BY_ONE = (
    'Fix: compute the loss with reduction="none" and hand over the vector: '
    "private.backward(losses), one loss for each "
    "record; dpoptim.losses.per_sample_mean averages over each record's own tokens."
)


def differentiate(engine: Engine, losses: Tensor, declared: Reduction | None) -> None:
    """Let the engine differentiate what the user handed over; see `PrivateTraining.backward`.

    Args:
        declared: what `attach` was told about scalars.
    """
    if not isinstance(losses, Tensor):
        raise TypeError(
            f"losses must be a tensor with one loss for each record, got {type(losses).__name__}."
        )
    if not losses.requires_grad:
        raise PrivacyError(
            "losses do not depend on anything trainable. Fix: compute them from model(x), outside "
            "of torch.no_grad()."
        )
    if engine.isolation.alone:  # whatever it is, there is nobody else in it
        engine.backward(losses)
        return
    if losses.dim() == 0 and engine.takes_scalars:
        differentiate_scalar(engine, losses, declared)
    elif losses.dim() != 1:
        raise not_one_each(axes_of(losses))
    elif one_for_each_record(engine, losses.shape[0]):  # whose rows are reduced already
        K = engine.rows.per_record
        engine.backward(losses * K if engine.rows.reduction == "mean" else losses)
    elif losses.shape[0] == engine.rows_open or engine.takes_parts:
        engine.backward(losses)
    else:
        raise other_length(engine, losses)


def differentiate_scalar(engine: Engine, loss: Tensor, declared: Reduction | None) -> None:
    if not engine.rows_open:
        raise other_length(engine, loss)
    # Of a part of the rows, nobody knows how many they are.
    reading = None if engine.partial_backward else read_reduction(loss, engine.rows_open)
    reduction = agreed_reduction(reading, declared)
    divisor = None if reading is None else reading.total_weight
    engine.backward(loss, reduction, "scalar", None if divisor is None else float(divisor))


def other_length(engine: Engine, losses: Tensor) -> PrivacyError:
    """Refusal of losses that are not of the rows still open; how many these are is private."""
    if engine.rows_open:
        return not_one_each(f"{axes_of(losses)} of another length")
    return PrivacyError(
        "private.backward was called again for rows that went through it already, or without a "
        "batch: their gradients would count twice. Fix: add the losses of a row, and call "
        "private.backward(first + second) once for each batch."
    )


def one_for_each_record(engine: Engine, losses: int) -> bool:
    """Whether there are as many losses as records of several rows."""
    K = engine.rows.per_record
    return K > 1 and K * losses == engine.rows_open and engine.present is None


def not_one_each(got: str) -> PrivacyError:
    return PrivacyError(
        f"private.backward takes one loss for each delivered record, shape (rows,); got {got}. "
        f"{ONE_BY_ONE}"
    )


@dataclass(frozen=True)
class Reading:
    """Reading of a graph.

    Attributes:
        reduction: how the records' losses were combined.
        total_weight: that torch divided by, a scalar, where that need not be the number of records
            (ignored labels and class weights); else None. Private.
    """

    reduction: Reduction
    total_weight: Tensor | None = None


def read_reduction(loss: Tensor, rows: int) -> Reading | None:
    """The reduction of a scalar loss over ``rows`` records; None where the graph does not show it.

    Read are the reductions of torch's own losses, ``mean`` and ``sum`` at the end, a sum that was
    divided by a multiple of the number of records, and sums of several such terms.

    Raises:
        SamplesInteractError: it is a mean over something other than the records, or a sum divided
            by another number, in which they weigh by each other.
    """
    return None if loss.grad_fn is None else _of_node(loss.grad_fn, rows)


def _of_node(node: Any, rows: int) -> Reading | None:
    read = READERS.get(node.name(), _of_elements if hasattr(node, "_saved_reduction") else None)
    return None if read is None else read(node, rows)


def _children(node: Any) -> list[Any]:
    return [child for child, _ in node.next_functions if child is not None]


def _of_only_child(node: Any, rows: int) -> Reading | None:
    children = _children(node)
    return _of_node(children[0], rows) if len(children) == 1 else None


def _of_terms(node: Any, rows: int) -> Reading | None:
    """Terms that were reduced in one way, all by the number of records."""
    readings = [_of_node(child, rows) for child in _children(node)]
    same = readings.count(readings[0]) == len(readings)
    return readings[0] if same and readings[0] in (Reading("mean"), Reading("sum")) else None


def _of_sum(node: Any, rows: int) -> Reading:
    return Reading("sum")


def _of_mean(node: Any, rows: int) -> Reading:
    _refuse_other_counts(node._saved_self_sym_numel, rows)
    return Reading("mean")


def _of_quotient(node: Any, rows: int) -> Reading | None:
    """A sum over a multiple of the number of records is their mean, up to a constant.

    Over any other number it might as well be a count of what the others hold; and if that is a
    constant, a mean it is not: taken for one, each record would weigh by how many the others are.
    """
    other = node._saved_other
    if isinstance(other, Tensor):
        other = (
            float(other) if other.dim() == 0 and not other.requires_grad and other.is_cpu else None
        )
    if other is None or _of_only_child(node, rows) != Reading("sum"):
        return None
    if other % rows:
        raise SamplesInteractError(
            "the loss is a sum over the batch, divided by a number that is no multiple of the "
            "number of records, such as a constant batch size or a count of tokens: how much a "
            f"record weighs depends on the others, or seems to. {ONE_BY_ONE} Or leave a sum as it "
            'is, with loss_reduction="sum": the plan divides by the batch size by itself.'
        )
    return Reading("mean")


def _of_labels(node: Any, rows: int) -> Reading | None:
    """Cross-entropy and NLL, whose means weigh by classes and leave out ignored labels."""
    if node._saved_reduction == SUM:
        return Reading("sum")
    if node._saved_reduction != MEAN:
        return None
    if node.name() == "NllLoss2DBackward0" or len(node._saved_self) != rows:
        raise SamplesInteractError(
            "the loss is a mean over the labels of the whole batch, not over its records: how much "
            f"a record weighs depends on the others' ignored labels. {ONE_BY_ONE}"
        )
    return Reading("mean", node._saved_total_weight)


def _of_elements(node: Any, rows: int) -> Reading | None:
    """Losses element by element, such as MSE."""
    if any(child.name() == "ExpandBackward0" for child in _children(node)):
        raise SamplesInteractError(
            "the loss compares tensors of different shapes, such as (rows, 1) and (rows,), so that "
            "every output meets every record's target. Fix: give both the same shape."
        )
    if node._saved_reduction == MEAN:
        _refuse_other_counts(node._saved_self.numel(), rows)
        return Reading("mean")
    return Reading("sum") if node._saved_reduction == SUM else None


def _refuse_other_counts(elements: int, rows: int) -> None:
    if elements % rows:
        raise SamplesInteractError(
            "the loss is a mean over a number of elements that is no multiple of the number of "
            "records, such as a mean over chosen records or over the tokens that count: how much a "
            f"record weighs depends on the others. {ONE_BY_ONE}"
        )


# What changes no number (or all of them, by a sign) is passed through.
UNCHANGED = (
    "ToCopyBackward0",
    "NegBackward0",
    "SqueezeBackward0",
    "ViewBackward0",
    "CloneBackward0",
)
READERS: dict[str, Callable[[Any, int], Reading | None]] = {
    **dict.fromkeys(UNCHANGED, _of_only_child),
    **dict.fromkeys(("AddBackward0", "SubBackward0"), _of_terms),
    **dict.fromkeys(("DivBackward0", "DivBackward1"), _of_quotient),
    **dict.fromkeys(("NllLossBackward0", "NllLoss2DBackward0"), _of_labels),
    **dict.fromkeys(("MeanBackward0", "MeanBackward1"), _of_mean),
    **dict.fromkeys(("SumBackward0", "SumBackward1"), _of_sum),
}


def disagreement(found: str, declared: str) -> PrivacyError:
    return PrivacyError(
        f'the loss is a {found} over the batch, but attach was told loss_reduction="{declared}": '
        "gradients would be clipped "
        f'at the wrong scale. Fix: loss_reduction="{found}"; or private.backward(losses) with '
        "one loss for each record "
        '(reduction="none"), which needs no such argument.'
    )


def agreed_reduction(reading: Reading | None, declared: Reduction | None) -> Reduction:
    """The reduction of a scalar loss, by what was read and what was declared.

    Raises:
        PrivacyError: they disagree, or neither says.
    """
    if reading is not None and declared is not None and reading.reduction != declared:
        raise disagreement(reading.reduction, declared)
    reduction = declared if reading is None else reading.reduction
    if reduction is None:
        raise PrivacyError(
            "private.backward was given a scalar, and its graph does not show whether it is the "
            f"mean or the sum of the records' losses. {ONE_BY_ONE} Or say it: dpoptim.attach(..., "
            "loss_reduction=...)."
        )
    return reduction
