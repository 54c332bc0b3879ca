"""Means over labels, which torch divides by a batch's labels that count, or by their weights.

Each is differentiated as the mean over records of each record's own mean: as torch's losses of
``reduction="none"`` would be, averaged over a record's labels that are not ignored.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dpoptim.gradients.oracle import Loss
from dpoptim.losses import without_single_axes
from dpoptim.training.losses.reduction import LabelMean, means_of_labels

Gradients = Sequence[Tensor | None]


class OwnMeans:
    """Differentiation of one mean over labels as if each record's were divided by its own count.

    Args:
        mean: by its nodes.
        records: that its labels are of, equally many, one record's after another's.

    **Guarantee.** A record's gradient is that of its own labels' losses, times their class weights,
    times what the loss is multiplied by after the mean, divided by ``records`` and by how many of
    its labels are not ignored; zero where none counts. Nothing that torch divided by enters.
    """

    def __init__(self, mean: LabelMean, records: int) -> None:
        self._node, self._smoothing = mean.node, mean.smoothing
        labels: Tensor = mean.node._saved_target
        self._ignored = labels == mean.ignored
        own = (~self._ignored).reshape(records, -1)
        counted = own.sum(1, keepdim=True).clamp(min=1) * records
        self._counted = counted.expand_as(own).reshape(labels.shape)
        self._came: dict[str, Tensor | None] = {}  # gradients of the two scalars

    def hooks(self) -> list[RemovableHandle]:
        """Put this around the nodes."""
        found = [
            self._node.register_prehook(lambda came: self._keep("labels", came)),
            self._node.register_hook(self._of_labels),
        ]
        if self._smoothing is not None:
            divided, left_out = self._smoothing
            found.append(divided.register_prehook(lambda came: self._keep("classes", came)))
            found.append(left_out.register_prehook(self._of_classes))
        return found

    def _keep(self, name: str, came: Gradients) -> None:
        self._came[name] = came[0]

    def _each(self, came: Tensor) -> Tensor:
        """The gradient of each label's loss, by that of their mean."""
        return torch.where(self._ignored, 0, came / self._counted)

    def _of_labels(self, found: Gradients, _: Gradients) -> tuple[Tensor | None, ...]:
        came, gradient = self._came.pop("labels", None), found[0]
        if came is None or gradient is None:
            return tuple(found)
        labels = self._node._saved_target.masked_fill(self._ignored, 0)
        each, weights = -self._each(came), self._node._saved_weight
        if weights is not None:
            each = each * weights[labels]
        classes = min(1, gradient.dim() - 1)
        # written into what was made for this: there may be no room for another of its size
        gradient.scatter_(classes, labels.unsqueeze(classes), each.to(gradient).unsqueeze(classes))
        return tuple(found)

    def _of_classes(self, came: Gradients) -> tuple[Tensor | None, ...]:
        scalar = self._came.pop("classes", None)
        if scalar is None or came[0] is None:
            return tuple(came)
        return (self._each(scalar).view_as(came[0]),)


def each_its_own(loss: Tensor, rows: int, records: int, *, checked: bool) -> list[RemovableHandle]:
    """Let a loss's means over labels be differentiated as means of the records' own.

    Of those over one label a row or record, whose other labels, if any, are nobody else's;
    ``checked``: of all, as it is known that labels come one record's after another's.
    """
    handles = list[RemovableHandle]()
    for mean in {each.node: each for each in means_of_labels(loss.grad_fn)}.values():
        known = mean.labels % records == 0 if checked else mean.labels in (rows, records)
        if known and not mean.all_alike:
            handles += OwnMeans(mean, records if checked else mean.labels).hooks()
    return handles


@contextmanager
def own_means(loss: Tensor, rows: int, records: int, *, checked: bool) -> Iterator[None]:
    """`each_its_own`, while a loss is differentiated."""
    handles = each_its_own(loss, rows, records, checked=checked)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def of_own_means(loss: Loss, records: Callable[[Any], int], model: nn.Module, batch: Any) -> Tensor:
    """The loss of a batch of so many records, with `each_its_own`."""
    value = without_single_axes(loss(model, batch))
    each_its_own(value, records(batch), records(batch), checked=True)
    return value


def labels_each(loss: Tensor, records: int) -> int:
    """The labels that each record has in means over them, at most; 0: there is no such mean."""
    return max((mean.labels // records for mean in means_of_labels(loss.grad_fn)), default=0)
