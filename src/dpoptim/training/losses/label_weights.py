"""Means over one label a record that torch divides by class weights, or by labels not ignored.

One that is the whole loss `HandedOver` multiplies by what torch divided by, which leaves a sum over
records; those that are terms of a loss are differentiated as if divided by how many records there
are (`over_records`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dpoptim.errors import SamplesInteractError
from dpoptim.gradients.engine import Reduction
from dpoptim.gradients.oracle import Loss
from dpoptim.losses import without_single_axes
from dpoptim.training.losses.reduction import (
    ONE_BY_ONE,
    Reading,
    mean_of_labels,
    means_of_labels,
)
from dpoptim.training.trials.comparison import Comparison


class OverRecords:
    """Differentiation of one mean over labels as if it were divided by the number of records.

    Args:
        total_weight: that torch divided by.

    **Guarantee.** A record's gradient is its own loss's, times what the loss is multiplied by
    after the mean, divided by ``records``; zero where no label counts. Without class weights it is
    rounded as that of a mean over losses: torch divides ``total_weight`` by itself.
    """

    def __init__(self, total_weight: Tensor, records: int) -> None:
        self._total, self._records = total_weight.detach(), records
        self._came: Sequence[Tensor | None] = ()

    def at(self, node: Any) -> list[RemovableHandle]:
        """Put this around a node of a graph."""
        return [node.register_prehook(self._before), node.register_hook(self._after)]

    def _before(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        self._came = gradients
        return tuple(each if each is None else self._total.to(each) for each in gradients)

    def _after(
        self, found: Sequence[Tensor | None], _: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        (came,), self._came = self._came, ()
        if came is None:
            return tuple(found)
        share = came / self._records
        return tuple(
            each if each is None else torch.where(self._total == 0, 0.0, each * share)
            for each in found
        )


def counted_over(loss: Tensor, records: int) -> list[RemovableHandle]:
    """Let a loss's means over labels, one a record, be differentiated as means over records.

    Those that are terms of a sum; none if any is over another number of labels.
    """
    if loss.grad_fn is None or mean_of_labels(loss) is not None:
        return []
    found = dict(means_of_labels(loss.grad_fn))  # a node may be there twice
    if any(reading.terms != frozenset([records]) for reading in found.values()):
        return []
    return [
        handle
        for node, reading in found.items()
        if reading.total_weight is not None
        for handle in OverRecords(reading.total_weight, records).at(node)
    ]


@contextmanager
def over_records(loss: Tensor, records: int | None) -> Iterator[None]:
    """`counted_over`, while a loss is differentiated; None: it has no such terms."""
    handles = [] if records is None else counted_over(loss, records)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def undone(loss: Tensor, records: int, *, one_label_each: bool) -> Reduction | None:
    """The reduction that `undivided` leaves of a loss; None: it finds nothing to undo.

    Args:
        one_label_each: whether that is known to be undone elsewhere, of one label a record.
    """
    reading = mean_of_labels(loss) if one_label_each else None
    if reading is not None:
        return "sum" if reading.terms == frozenset([records]) else None
    found = means_of_labels(loss.grad_fn) if one_label_each and loss.grad_fn is not None else []
    alike = all(each.terms == frozenset([records]) for _, each in found)
    return "mean" if found and alike else None


def undivided(loss: Loss, count: Callable[[Any], int], model: nn.Module, batch: Any) -> Tensor:
    """The loss times what torch divided by, or with terms over ``count(batch)`` records."""
    value = without_single_axes(loss(model, batch))
    reading = mean_of_labels(value)
    if reading is None or reading.total_weight is None:
        counted_over(value, count(batch))
        return value
    return value * reading.total_weight


def reduction_of(
    loss: Comparison,
    undivided: Comparison,
    left: Reduction | None,
    allowed: tuple[Reduction, ...],
) -> Literal["mean", "sum", "by labels"]:
    """The reduction of a scalar loss.

    Args:
        undivided: of the loss without what its means were divided by, if there are such: records
            whose labels are all there, and weigh alike, do not tell that of others.
        left: `undone`, of the loss.
        allowed: reductions of another one.
    """
    if left is None:
        return loss.reduction(allowed)
    undivided.reduction((left,))
    return "by labels"


def refuse_unread(reading: Reading | None) -> None:
    """Refuse a loss with means over labels whose graph does not show what it adds to them."""
    if reading is None or reading.reduction != "mean":
        raise SamplesInteractError(
            "the loss adds a mean over labels, of which torch leaves out those that are ignored "
            "(or weighs them by class), to terms of which the graph does not show that they are "
            f"means over the records, too. {ONE_BY_ONE}"
        )
