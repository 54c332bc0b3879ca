"""Means over labels, which torch divides by a batch's labels that count, or by their weights.

Each is differentiated as the mean over records of each record's own mean: as torch's losses of
``reduction="none"`` would be, averaged over a record's labels that are not ignored.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dpoptim.gradients.engine import Reduction
from dpoptim.gradients.oracle import Loss
from dpoptim.losses import without_single_axes
from dpoptim.training.losses.label_nodes import LabelMean
from dpoptim.training.losses.reduction import terms_of

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
        self._mean, self._ignored = mean, mean.ignored
        own = (~self._ignored).reshape(records, -1)
        counted = own.sum(1, keepdim=True).clamp(min=1) * share.denominator
        self._counted = counted.expand_as(own).reshape(mean.labels.shape)
        self._times = share.numerator
        self._came: dict[str, Tensor | None] = {}  # gradients of the two scalars

    def hooks(self) -> list[RemovableHandle]:
        """Put this around the nodes."""
        found = [
            self._mean.node.register_prehook(lambda came: self._keep("labels", came)),
            self._mean.node.register_hook(self._of_labels),
        ]
        if self._mean.smoothing is not None:
            divided, left_out = self._mean.smoothing
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
        labels, weights = self._mean.labels.masked_fill(self._ignored, 0), self._mean.weights
        each = -self._each(came)
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


@dataclass(frozen=True)
class LabelMeans:
    """The means over labels of which a scalar loss is a sum, each times a number.

    Attributes:
        means: each once. whole: whether the loss is a sum of nothing else.
    """

    means: tuple[LabelMean, ...]
    whole: bool

    @classmethod
    def of(cls, loss: Tensor) -> "LabelMeans":
        terms = terms_of(loss.grad_fn)
        found = {each.node: each for each in terms if each is not None}
        return cls(tuple(found.values()), None not in terms)

    def __len__(self) -> int:
        return len(self.means)

    @property
    def reduction(self) -> Reduction:
        """That of the loss by `each_its_own`: a sum over records has no factor of them."""
        return "sum" if self.whole else "mean"

    def each(self, records: int) -> int:
        """The labels that each record has in a mean, at most."""
        return max((mean.count // records for mean in self.means), default=0)


def each_its_own(
    loss: Tensor, rows: int, records: int, checked: int | None
) -> tuple[list[RemovableHandle], Reduction | None]:
    """Let a loss's means over labels be differentiated as made of the records' own.

    Args:
        checked: how many means the loss has, over labels that come one record's after another's;
            None: that is not known. Then those over one label a row or record are, whose other
            labels, if any, are nobody else's.

    Returns:
        also what the loss is then; None: there are no such means, and it stays as it is.
    """
    found = LabelMeans.of(loss)
    if checked is None:
        known = len(found) > 0 and all(mean.count in (rows, records) for mean in found.means)
    else:
        known = len(found) == checked > 0 and not any(mean.count % records for mean in found.means)
    handles = list[RemovableHandle]()
    for mean in found.means if known else ():
        groups = mean.count if checked is None else records
        # an engine takes the loss of a row, which it is given once for each, as K of a record's
        added = 1 if checked is None or mean.count == records else rows // records
        share = Fraction(added) if found.whole else Fraction(1, groups)
        handles += OwnMeans(mean, groups, share).hooks()
    return handles, found.reduction if known else None


@contextmanager
def own_means(
    loss: Tensor, rows: int, records: int, checked: int | None
) -> Iterator[Reduction | None]:
    """`each_its_own`, while a loss is differentiated; yields what it is."""
    handles, reduction = each_its_own(loss, rows, records, checked)
    try:
        yield reduction
    finally:
        for handle in handles:
            handle.remove()


def of_own_means(
    loss: Loss, records: Callable[[Any], int], means: int, model: nn.Module, batch: Any
) -> Tensor:
    """The loss of a batch of so many records, with `each_its_own`."""
    value = without_single_axes(loss(model, batch))
    each_its_own(value, records(batch), records(batch), means)
    return value


def means_for_all(together: Tensor, alone: Tensor) -> LabelMeans:
    """The means over labels of a loss, but for those that it has for each record.

    Args:
        together: of several records. alone: of one of them.
    """
    found = LabelMeans.of(together)
    return found if len(found) == len(LabelMeans.of(alone)) else LabelMeans((), whole=False)
