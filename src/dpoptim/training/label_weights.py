"""Means over one label a record that torch divides by class weights, or by labels not ignored.

`HandedOver` multiplies them by what torch divided by, which leaves a sum over records.
"""

from typing import Any

from torch import Tensor, nn

from dpoptim.gradients.oracle import Loss
from dpoptim.losses import without_single_axes
from dpoptim.training.reduction import mean_of_labels


def weighs_labels(loss: Tensor, records: int) -> bool:
    """Whether a loss is such a mean, of one label for each of so many records."""
    reading = mean_of_labels(loss)
    return reading is not None and reading.terms == {records}


def undivided(loss: Loss, model: nn.Module, batch: Any) -> Tensor:
    """The loss times what torch divided by."""
    value = without_single_axes(loss(model, batch))
    reading = mean_of_labels(value)
    if reading is None or reading.total_weight is None:
        return value
    return value * reading.total_weight
