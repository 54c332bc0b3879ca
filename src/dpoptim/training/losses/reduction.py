"""How a scalar loss was made of the records' losses, by the graph that autograd kept."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from torch import Tensor

from dpoptim.errors import SamplesInteractError
from dpoptim.gradients.engine import Reduction
from dpoptim.runtime.torch_internals import node_name
from dpoptim.training.losses.label_nodes import (
    MEAN,
    OF_LABELS,
    SUM,
    LabelMean,
    children_of,
    smoothed,
)
from dpoptim.training.losses.meeting_places import BROADCAST

ONE_BY_ONE = (
    'Fix: compute the loss with reduction="none" and hand over the vector: '
    "private.backward(losses), one loss for each "
    "record; dpoptim.losses.per_sample_mean averages over each record's own tokens, and "
    "dpoptim.per_sample(loss) makes one for each record of any loss(model, batch)."
)

IN_PARTS = (
    "the model was given a part of the batch that private.batches() delivered, and the part's loss "
    "is no mean or sum over that batch. Fix: private.batches(physical_batch_size=...), which cuts "
    "batches to what memory holds, with one backward pass for each; or the loss of the whole batch."
)


@dataclass(frozen=True)
class Reading:
    """Reading of a graph.

    Attributes:
        reduction: how the records' losses were combined.
        terms: how many were, in each sum or mean of the graph; None: the graph does not say.
        factors: that these were multiplied with or divided by. Private, as they may be counts.
        scaled: whether all of the terms were, and not only some of them.
        divided: whether all were divided by one whole number.
        labels: how many there were in each of the means that torch divides by those not ignored, or
            by class weights; `label_means` divides these anew.
    """

    reduction: Reduction
    terms: frozenset[int] | None = None
    factors: tuple[float, ...] = ()
    scaled: bool = False
    divided: bool = False
    labels: frozenset[int] = frozenset()


def read_reduction(
    loss: Tensor, rows: int, records: int | None = None, *, checked: bool = False
) -> Reading | None:
    """The reduction of a scalar loss; None where the graph does not show it.

    Read are the reductions of torch's own losses, ``mean`` and ``sum``, factors and divisors after
    them, and sums of several such terms.

    Args:
        rows: of the batch.
        records: that they make up; None: each is one.
        checked: whether it is known that labels come one record's after another's.

    Raises:
        SamplesInteractError: it is a mean over something other than the rows or the records, in
            which these weigh by each other.
    """
    counts = {rows, records or rows}
    reading = read_graph(loss)
    if reading is not None and reading.labels and not checked and not reading.labels <= counts:
        raise SamplesInteractError(
            "the loss is a mean over the labels of the whole batch, not over its records: how "
            "much a record weighs depends on the others' ignored labels. Fix: give attach the "
            "loss, dpoptim.attach(..., loss=...): once it is checked, each record's own mean is "
            'taken of it; or compute it with reduction="none" and hand over '
            "dpoptim.losses.per_sample_mean of each record's own labels."
        )
    if reading is not None:
        reading = by_records(reading, loss, counts)
    if (
        reading is not None
        and reading.reduction == "mean"
        and reading.terms is not None
        and all(any(terms % count for terms in reading.terms) for count in counts)
    ):
        raise SamplesInteractError(
            "the loss is a mean over a number of elements that is no multiple of the number of "
            "records, such as a mean over chosen records or over the tokens that count: how "
            f"much a record weighs depends on the others. {ONE_BY_ONE}"
        )
    return reading


def read_graph(loss: Tensor) -> Reading | None:
    """`read_reduction`, of however many records there are."""
    return None if loss.grad_fn is None else _of_node(loss.grad_fn)


def terms_of(node: Any) -> list[LabelMean | None]:
    """The terms of which a scalar is a sum, each times a number; None: no mean over labels."""
    if node is None:
        return [None]
    read, children = READERS.get(node_name(node)), children_of(node)
    found = smoothed(children) if read is _of_terms else None
    if read is _of_labels:
        found = LabelMean.at(node)
    if found is not None:
        return [found if found.node._saved_reduction == MEAN else None]
    linear = read in (_of_only_child, _of_terms, _of_sum, _of_mean) or is_multiple(node)
    if (linear or node_name(node) in JOINED) and children:
        return [each for child in children for each in terms_of(child)]
    return [None]


def reduced(node: Any, counts: set[int]) -> list[Any] | None:
    """The nodes whose results a scalar was reduced from; None where the graph does not show it.

    Args:
        counts: of rows or records. What was summed over as many already may have none any more.
    """
    children = children_of(node)
    # not in a product or ratio of two such scalars, where records meet
    if READERS.get(node_name(node)) in (_of_only_child, _of_terms) or is_multiple(node):
        found = [reduced(child, counts) for child in children]
        return None if None in found else [each for nodes in found for each in nodes or ()]
    known = is_sum(node) or hasattr(node, "_saved_reduction")
    summed = {size for child in children for size in axes_summed(child).values() if is_sum(node)}
    return children if known and counts.isdisjoint(summed) else None


def by_records(reading: Reading, loss: Tensor, counts: set[int]) -> Reading | None:
    """The reduction over records, where their axis, the first one, was reduced before others.

    None: it is another one for other terms, or the axis after it may be the records', too; or means
    over records were multiplied or joined, and then summed again.
    """
    inner = [child for node in sums_in(loss.grad_fn) for child in children_of(node)]
    first = [child for child in inner if axes_summed(child).get(0) in counts]
    if not first:
        return None if any(means_inside(child, counts) for child in inner) else reading
    found = {_reduction_by(child) if child in first else reading.reduction for child in inner}
    if found == {reading.reduction}:
        return replace(reading, terms=None)
    several = any(has_several(child, counts) for child in first)
    return (
        None if several or len(found) > 1 else replace(reading, reduction=found.pop(), terms=None)
    )


def has_several(node: Any, counts: set[int]) -> bool:
    """Whether several axes of what is summed may be the records'."""
    return sum(size in counts for size in sizes_of(node)) > 1


def means_inside(node: Any, counts: set[int]) -> bool:
    """Whether a tensor holds means over records: one for each column, or each task."""
    name, children = node_name(node), children_of(node)
    if READERS.get(name) in (_of_only_child, _of_multiple):
        return any(means_inside(child, counts) for child in children)
    if name not in JOINED or len(children) in counts:  # as many as records are these, one by one
        return name == "MeanBackward1" and axes_summed(node).get(0) in counts
    means = [each for each in map(_of_node, children) if each and each.reduction == "mean"]
    terms = frozenset[int]().union(*(each.terms or () for each in means))
    return any(number % count == 0 for number, count in product(terms, counts))


def sums_in(node: Any) -> list[Any]:
    """The sums and means by which a scalar's terms became scalars."""
    if is_sum(node):
        return [node]
    if READERS.get(node_name(node)) in (_of_only_child, _of_terms, _of_multiple):
        return [each for child in children_of(node) for each in sums_in(child)]
    return []


def is_multiple(node: Any) -> bool:
    """Whether it multiplies or divides one scalar by a number, not by another one."""
    return READERS.get(node_name(node)) is _of_multiple and len(children_of(node)) == 1


def is_sum(node: Any) -> bool:
    return READERS.get(node_name(node)) in (_of_sum, _of_mean)


def _reduction_by(node: Any) -> Reduction:
    return "mean" if node_name(node) == "MeanBackward1" else "sum"


def sizes_of(node: Any) -> tuple[int, ...]:
    return tuple(node._saved_self_sym_sizes)


def axes_summed(node: Any) -> dict[int, int]:
    """The axes, with their sizes, that a sum or mean over some of them went over."""
    if node_name(node) not in ("MeanBackward1", "SumBackward1"):
        return {}
    sizes = sizes_of(node)
    # axes below zero are saved as unsigned numbers
    signed = [axis if axis < len(sizes) else axis - 2**64 for axis in node._saved_dim or ()]
    return {axis % len(sizes): sizes[axis] for axis in signed if sizes}


def _of_node(node: Any) -> Reading | None:
    read = READERS.get(node_name(node), _of_elements if hasattr(node, "_saved_reduction") else None)
    return None if read is None else read(node)


def _of_only_child(node: Any) -> Reading | None:
    children = children_of(node)
    return _of_node(children[0]) if len(children) == 1 else None


def _of_terms(node: Any) -> Reading | None:
    """Terms that were reduced in one way, all by the number of records."""
    children = children_of(node)
    if (found := smoothed(children)) is not None:
        return _of_labels(found.node)
    known = [each for each in map(_of_node, children) if each]
    if len(known) < len(children) or len({each.reduction for each in known}) != 1:
        return None
    return Reading(
        known[0].reduction,
        frozenset().union(*(each.terms or () for each in known)) or None,
        tuple(factor for each in known for factor in each.factors),
        all(each.scaled for each in known),
        labels=frozenset().union(*(each.labels for each in known)),
    )


def _of_sum(node: Any) -> Reading:
    return Reading("sum", frozenset([math.prod(node._saved_self_sym_sizes)]))


def _of_mean(node: Any) -> Reading:
    return Reading("mean", frozenset([node._saved_self_sym_numel]))


def _of_multiple(node: Any) -> Reading | None:
    """A reading times a number, or divided by one: any that is not differentiated."""
    factor = node._saved_other
    if node_name(node) == "MulBackward0" and factor is None:
        factor = node._saved_self  # it came first
    reading = _of_only_child(node)
    if isinstance(factor, Tensor):
        factor = float(factor) if factor.numel() == 1 and not factor.requires_grad else None
    if reading is None or factor is None:
        return None
    whole = node_name(node) == "DivBackward0" and factor >= 2 and float(factor).is_integer()
    return replace(
        reading,
        factors=(*reading.factors, float(factor)),
        scaled=True,
        divided=reading.divided or whole,
    )


def divided_by_a_number(node: Any) -> bool:
    """Whether what it makes was, as a whole, divided by a whole number last."""
    while node is not None and node_name(node) in UNCHANGED and len(children_of(node)) == 1:
        (node,) = children_of(node)
    if node is None or node_name(node) != "DivBackward0":
        return False
    number = node._saved_other
    if isinstance(number, Tensor):
        number = float(number) if number.numel() == 1 and not number.requires_grad else None
    return number is not None and number >= 2 and float(number).is_integer()


def _of_labels(node: Any) -> Reading | None:
    """Cross-entropy and NLL, whose means weigh by classes and leave out ignored labels."""
    labels = math.prod(node._saved_target.shape)
    if node._saved_reduction == SUM:
        return Reading("sum", frozenset([labels]))
    if node._saved_reduction != MEAN:
        return None
    if node._saved_weight is not None and node._saved_weight.min() < 0:
        raise SamplesInteractError(
            "the loss is a mean by class weights some of which are below zero: those of a batch "
            f"may add up to nothing, which would leave nothing of any record's loss. {ONE_BY_ONE}"
        )
    return Reading("mean", frozenset([labels]), labels=frozenset([labels]))


def _of_elements(node: Any) -> Reading | None:
    """Losses element by element, such as MSE."""
    if any(node_name(child) == "ExpandBackward0" for child in children_of(node)):
        raise SamplesInteractError(BROADCAST)
    if node._saved_reduction not in (MEAN, SUM):
        return None
    reduction: Reduction = "mean" if node._saved_reduction == MEAN else "sum"
    return Reading(reduction, frozenset([node._saved_self.numel()]))


# What changes no number (or all of them, by a sign) is passed through.
UNCHANGED = (
    "ToCopyBackward0",
    "NegBackward0",
    "SqueezeBackward0",
    "ViewBackward0",
    "CloneBackward0",
)
JOINED = ("StackBackward0", "CatBackward0")
READERS: dict[str, Callable[[Any], Reading | None]] = {
    **dict.fromkeys(UNCHANGED, _of_only_child),
    **dict.fromkeys(("AddBackward0", "SubBackward0"), _of_terms),
    **dict.fromkeys(("MulBackward0", "DivBackward0", "DivBackward1"), _of_multiple),
    **dict.fromkeys(OF_LABELS, _of_labels),
    **dict.fromkeys(("MeanBackward0", "MeanBackward1"), _of_mean),
    **dict.fromkeys(("SumBackward0", "SumBackward1"), _of_sum),
}
