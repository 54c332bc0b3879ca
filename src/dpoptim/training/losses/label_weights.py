"""Means over one label a record that torch divides by class weights, or by labels not ignored.

`HandedOver` multiplies them by what torch divided by, which leaves a sum over records.
"""

from typing import Any, Literal

from torch import Tensor, nn

from dpoptim.gradients.engine import Reduction
from dpoptim.gradients.oracle import Loss
from dpoptim.losses import without_single_axes
from dpoptim.training.losses.reduction import Reading, mean_of_labels
from dpoptim.training.trials.comparison import Comparison


def divided_mean(loss: Tensor, records: int) -> Reading | None:
    """The reading of such a mean, of one label for each record; None of another loss."""
    reading = mean_of_labels(loss)
    return reading if reading is not None and reading.terms == frozenset([records]) else None


def undivided(loss: Loss, model: nn.Module, batch: Any) -> Tensor:
    """The loss times what torch divided by."""
    value = without_single_axes(loss(model, batch))
    reading = mean_of_labels(value)
    if reading is None or reading.total_weight is None:
        return value
    return value * reading.total_weight


def reduction_of(
    loss: Comparison,
    undivided: Comparison,
    reading: Reading | None,
    allowed: tuple[Reduction, ...],
) -> Literal["mean", "sum", "by labels"]:
    """The reduction of a scalar loss.

    Args:
        undivided: of the loss times what its mean was divided by, if ``reading`` says it is one:
            records whose labels are all there, and weigh alike, do not tell that of others.
        allowed: reductions of another one.
    """
    if reading is None:
        return loss.reduction(allowed)
    undivided.reduction(("sum",))
    return "by labels"
