"""Where records meet in a loss, read off its graph: words for refusals, which decide nothing."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from dpoptim.errors import SamplesInteractError
from dpoptim.runtime.torch_internals import gradient_forms, node_name
from dpoptim.training.losses.label_nodes import children_of

ELEMENTWISE = (
    *("SubBackward", "AddBackward", "MulBackward", "DivBackward", "RsubBackward"),
    *("MaximumBackward", "MinimumBackward", "WhereBackward", "PowBackward", "LogaddexpBackward"),
)
BROADCAST = (
    "the loss compares tensors of different shapes, such as (rows, 1) and (rows,), so that every "
    "output meets every record's target. Fix: give both the same shape. If all pairs are meant (a "
    "ranking), one record would move the gradients of all: take pairs that a record holds itself, "
    "or pairs with public records."
)
ONE_TERM = (
    "one term of the loss is already averaged or summed over the batch, and was added to a vector "
    "of one loss a record. Fix: that term of each record, too; or the mean of both, "
    "losses.mean() + term, if the term is a mean over records."
)


def refuse_meeting(losses: Tensor, records: int) -> None:
    """Refuse losses where the graph shows how records meet; silent where it does not.

    Args:
        losses: of made-up records, refused for another reason; one a record, or a scalar.
        records: of their batch, as many as no other axis has.
    """
    nodes = [*below(losses.grad_fn)]
    if any(expands(node, records) for node in nodes):
        raise SamplesInteractError(BROADCAST)
    if losses.dim() and any(adds_scalar(node) for node in nodes if form(node) == losses.shape):
        raise SamplesInteractError(ONE_TERM)


def refuse_broadcast(
    losses: Tensor, records: int, outputs: Collection[Any], widths: set[int]
) -> None:
    """Refuse losses in which each output of a model meets every record's target.

    As (rows, 1) minus (rows,) does, whatever is made of the differences. Of outputs that are one
    number a record, and only between them and the loss, where an axis of the model's own is none of
    the loss's. (rows, 1) meets (rows, features) as it should, also where there are as many of both.
    Not of a loss that was checked.

    Args:
        records: rows of the batch.
        outputs: nodes of the model's outputs.
        widths: that records' numbers had in earlier batches, of whose length they were not; those
            of this batch are added. Private.
    """
    met = [*map(meeting, below(losses.grad_fn, outputs))] if records > 1 else []
    found = {each.width(records) for each in met if each is not None}
    if records in found - widths or -1 in found:
        raise SamplesInteractError(
            f"{BROADCAST} If the second axis is as long as the batch by chance, give attach the "
            "loss, dpoptim.attach(..., loss=...), which tells."
        )
    widths.update(found)


@dataclass(frozen=True)
class Meeting:
    """A place of a graph where tensors become of one shape.

    Attributes:
        shape: that they get.
        shapes: that they had, where the graph shows it.
    """

    shape: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    def width(self, records: int) -> int:
        """How many numbers each record's one number meets.

        Returns:
            0: it meets none; -1: those of all other records. As many as there are records: these,
            or as many of its own.
        """
        axes = [size for size in self.shape if size != 1]
        if len(axes) != 2 or records not in axes or self.shape in self.shapes:
            return 0
        grown = [each for each in self.shapes if [n for n in each if n != 1] == [records]]
        places = {each[::-1].index(records) for each in grown}
        if len(places) == 2 and axes[0] == axes[1]:
            return -1
        return axes[axes[0] == records] if grown else 0


def meeting(node: Any) -> Meeting | None:
    """Tensors that meet at a node; None: they do not.

    Losses of torch's own, such as ``mse_loss``, expand them before; so does ``normalize``.
    """
    children, simple = children_of(node), node_name(node).startswith(ELEMENTWISE)
    expanded = [child for child in children if node_name(child).startswith("ExpandBackward")]
    if not (simple or expanded):
        return None
    shapes = [form(before) for child in expanded for before in children_of(child)]
    shapes += [form(child) for child in children if child not in expanded]
    return Meeting(form(node if simple else expanded[0]), tuple(shapes))


def compares_outputs(loss: Tensor) -> bool:
    """Whether a loss multiplies what layers returned with each other: similarities, say."""
    return any(
        node_name(node).startswith(("MmBackward", "CdistBackward", "EuclideanDistBackward"))
        and sum(not is_leaf(child) for child in children_of(node)) > 1
        for node in below(loss.grad_fn)
    )


def below(node: Any, stops: Collection[Any] = ()) -> Iterator[Any]:
    """Nodes of a graph, down to hooked layers, and without those at which it ``stops``."""
    left, met = [node], set[Any](stops)
    while left:
        node = left.pop()
        if node is not None and node not in met and not isinstance(node, BackwardCFunction):
            met.add(node)
            left += children_of(node)
            yield node


def expands(node: Any, records: int) -> bool:
    """Whether a record's axis of one became as long as there are records."""
    name, shape = node_name(node), form(node)
    if not name.startswith((*ELEMENTWISE, "ExpandBackward")) or shape.count(records) < 2:
        return False
    return any(form(child).count(records) == 1 for child in children_of(node))


def adds_scalar(node: Any) -> bool:
    """Whether a number that was computed from tensors was added to a vector."""
    scalars = [c for c in children_of(node) if not form(c) and not is_leaf(c)]
    return node_name(node).startswith(("AddBackward", "SubBackward")) and bool(scalars)


def form(node: Any) -> tuple[int, ...]:
    return (*gradient_forms(node)[0].shape,)


def is_leaf(node: Any) -> bool:
    """Whether a node is a parameter's, as it is or turned."""
    return not children_of(node) or (
        node_name(node).startswith("TBackward") and is_leaf(children_of(node)[0])
    )
