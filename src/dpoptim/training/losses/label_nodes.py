"""Nodes of torch's cross-entropy and NLL in a graph: with class weights, smoothed, plain."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpoptim.runtime.torch_internals import node_name

MEAN, SUM = 1, 2  # as torch's losses save it
OF_LABELS = ("NllLossBackward0", "NllLoss2DBackward0")
# From the sum over all classes to scores, where losses are reduced to a mean, or to a sum.
SMOOTHED = {
    SUM: ("SumBackward0", "MaskedFillBackward0", "NegBackward0", "SumBackward1"),
    MEAN: ("DivBackward0", "SumBackward0", "MaskedFillBackward0", "NegBackward0", "SumBackward1"),
}
RESHAPED = ("ViewBackward0", "UnsafeViewBackward0", "UnsqueezeBackward0", "CloneBackward0")


@dataclass(frozen=True)
class LabelMean:
    """A mean over labels that torch divides by those not ignored, or by class weights.

    Attributes:
        node: that has it.
        labels, weights: that the node saved: inside of `torch.utils.checkpoint` they may be read
            once in a backward pass, by the node.
        smoothing: with label smoothing, the node that divides the sum over all classes, and the one
            that leaves out ignored labels.
    """

    node: Any
    labels: Tensor
    weights: Tensor | None
    smoothing: tuple[Any, Any] | None = None

    @classmethod
    def at(cls, node: Any, smoothing: tuple[Any, Any] | None = None) -> "LabelMean":
        return cls(node, node._saved_target, node._saved_weight, smoothing)

    @property
    def count(self) -> int:
        return self.labels.numel()

    @property
    def ignored(self) -> Tensor:
        """The labels that do not count."""
        index: int = self.node._saved_ignore_index  # saved as an unsigned number
        return self.labels == (index - 2**64 if index >= 2**63 else index)


def children_of(node: Any) -> list[Any]:
    return [child for child, _ in node.next_functions if child is not None]


def smoothed(terms: list[Any]) -> LabelMean | None:
    """Torch's cross-entropy with label smoothing, reduced to a mean or a sum; None: it is not that.

    Its second term is of all classes.
    """
    if len(terms) != 2 or {*map(node_name, terms)} != {"MulBackward1"}:
        return None
    labels, other = (children_of(term)[0] for term in terms)
    if node_name(labels) not in OF_LABELS:
        return None
    weighed = ("MulBackward0",) if labels._saved_weight is not None else ()
    path = list[Any]()
    for name in (*SMOOTHED.get(labels._saved_reduction, ()), *weighed):
        if node_name(other) != name:
            return None
        path.append(other)
        other = children_of(other)[0]
    scores = children_of(labels)[0]
    while node_name(scores) in RESHAPED and scores != other:
        scores = children_of(scores)[0]
    left_out = path[-3 - len(weighed)]
    return LabelMean.at(labels, (path[0], left_out)) if other == scores else None
