"""Means over labels, which torch divides by a batch's labels that count, or by their weights.

Each is differentiated as the mean over records of each record's own mean: as torch's losses of
``reduction="none"`` would be, averaged over a record's labels that are not ignored.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dpoptim.gradients.engine import Reduction
from dpoptim.gradients.oracle import Loss
from dpoptim.losses import without_single_axes
from dpoptim.training.losses.label_nodes import LabelMean
from dpoptim.training.losses.reduction import is_of_label_means, means_of_labels

Gradients = Sequence[Tensor | None]


class OwnMeans:
    """Differentiation of one mean over labels as if each record's were divided by its own count.

    Args:
        mean: by its nodes.
        records: that its labels are of, equally many, one record's after another's.
        share: of the records' own means in what they add up to.

    **Guarantee.** A record's gradient is that of its own labels' losses, times their class weights,
    ``share``, and what the loss is multiplied by after the mean, divided by how many of its labels
    are not ignored; zero where none counts. Nothing that torch divided by enters.
    """

    def __init__(self, mean: LabelMean, records: int, share: Fraction) -> None:
        self._node, self._smoothing = mean.node, mean.smoothing
        labels: Tensor = mean.node._saved_target
        self._ignored = labels == mean.ignored
        own = (~self._ignored).reshape(records, -1)
        counted = own.sum(1, keepdim=True).clamp(min=1) * share.denominator
        self._counted = counted.expand_as(own).reshape(labels.shape)
        self._times = share.numerator
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
        return torch.where(self._ignored, 0, came * self._times / self._counted)

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


def each_its_own(
    loss: Tensor, rows: int, records: int, *, checked: bool
) -> tuple[list[RemovableHandle], Reduction | None]:
    """Let a loss's means over labels be differentiated as made of the records' own.

    Of those over one label a row or record, whose other labels, if any, are nobody else's;
    ``checked``: of all, as it is known that labels come one record's after another's.

    Returns:
        also what the loss is then: of nothing but such means the sum over records, which has no
        factor of them; with other terms their mean; None: there is none.
    """
    means = {each.node: each for each in means_of_labels(loss.grad_fn)}.values()
    if not all(_is_known(each, rows, records, checked=checked) for each in means):
        return [], None
    reduction, handles = reduction_by_own_means(loss, records), list[RemovableHandle]()
    for mean in means:
        groups = records if checked else mean.labels
        # an engine takes the loss of a row, which it is given once for each, as K of a record's
        added = rows // records if checked and mean.labels != records else 1
        share = Fraction(added) if reduction == "sum" else Fraction(1, groups)
        handles += OwnMeans(mean, groups, share).hooks()
    return handles, reduction


def _is_known(mean: LabelMean, rows: int, records: int, *, checked: bool) -> bool:
    return mean.labels % records == 0 if checked else mean.labels in (rows, records)


@contextmanager
def own_means(
    loss: Tensor, rows: int, records: int, *, checked: bool
) -> Iterator[Reduction | None]:
    """`each_its_own`, while a loss is differentiated; yields what it is."""
    handles, reduction = each_its_own(loss, rows, records, checked=checked)
    try:
        yield reduction
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


def reduction_by_own_means(loss: Tensor, records: int) -> Reduction | None:
    """The reduction of a loss by `each_its_own`; None: it has no means over labels."""
    if not labels_each(loss, records):
        return None
    return "sum" if is_of_label_means(loss.grad_fn) else "mean"
