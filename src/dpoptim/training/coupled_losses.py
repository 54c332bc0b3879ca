"""Losses made of several records' outputs, found where they are handed over: triplets, say.

One loss is differentiated alone, back to what the model returned: only its own record may be
reached. Nothing of this is released, and it costs the first batches a pass through the loss.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from dpoptim.errors import SamplesInteractError
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.hook_manager import HookManager
from dpoptim.gradients.seen_outputs import SeenOutputs
from dpoptim.training.made_up import Returned
from dpoptim.training.reduction import reduced

LOOKED_AT = 1 << 20  # entries at a time: there may be no room for another copy of all
# Of the largest entry: what is left of the batch's largest score, which a loss took off and added
# again. A mean over a batch leaves each record's share of it, which is more.
ROUNDING = 5e-7
Placed = tuple[int, GradientEdge]  # with its place among what was returned


def refuse_coupled_losses(
    engine: Engine, losses: Tensor, returned: Collection[Returned] = ()
) -> None:
    """Refuse losses of which one depends on the model's outputs for several records.

    Looked at is what the model's forward passes returned, where one axis is the records' for
    certain; not under ``fully_shard``, and not where records pass alone. Not seen: records that
    meet before the model, or in what is not differentiated.

    Args:
        engine: of the model, before its backward pass.
        losses: one for each row or record, or a scalar whose graph shows of which it was made.
        returned: where made-up records were found in what the model returns. Elsewhere an axis is
            theirs if no input and no parameter has one of this size.

    Raises:
        SamplesInteractError: one record's loss moves other records' outputs.
    """
    # a model that is spread takes part in all backward passes
    own = engine.isolation.alone or engine.partial_backward or engine.totals.travels
    if not isinstance(engine.hooks, HookManager) or own:
        return
    rows, K = engine.rows_open, engine.rows.per_record
    near = looked_at(engine, engine.hooks.outputs, losses, returned)
    if not near or rows < 2 * K:
        return
    edges, counts = [edge for edge, _ in near], {rows, rows // K}

    def meets_others(place: int, axis: int) -> bool:
        gradients = gradients_of_one(losses, place, edges, counts, axis)
        return any(
            reaches_others(gradient, records, rows, K)
            for gradient, (_, records) in zip(gradients, near, strict=False)
        )

    for place in (0, -1):
        # of a matrix whose sides are equal, either axis may be the records'
        if all(meets_others(place, axis) for axis in ((0,) if losses.dim() else (0, 1))):
            raise SamplesInteractError(
                "the loss of one record depends on what the model returned for others: triplets, "
                "similarities or negatives within the batch, a mean or softmax over it. One "
                "record would move the gradients of all. Fix: let each record's loss depend on "
                "that record alone, such as pairs that a record holds itself (or several rows of "
                "one record, rows_per_record=K), negatives from public data, or a sigmoid loss of "
                "each pair."
            )


def looked_at(
    engine: Engine, outputs: SeenOutputs, losses: Tensor, returned: Collection[Returned]
) -> list[tuple[GradientEdge, int | None]]:
    """Outputs that have records, with their axis, where it is known.

    All are forgotten, unless the losses are of another model.
    """
    reached = nearest(outputs.edges, losses.grad_fn)
    if reached:
        outputs.edges = []
    sizes = outputs.sizes | {size for p in engine.parameters for size in p.shape}
    known = {each.place: each.axis for each in returned if not each.folded}
    return [
        (edge, known.get(place))
        for place, edge in reached
        if place in known or engine.rows_open not in sizes
    ]


def gradients_of_one(
    losses: Tensor, place: int, edges: Sequence[GradientEdge], counts: set[int], axis: int
) -> Sequence[Tensor | None]:
    """The gradients, at ``edges``, of the loss at one place alone.

    Args:
        counts: losses that there may be; none of others are looked at.
        axis: the records' in matrices that a scalar was reduced from, where it may be either.
    """
    if losses.dim() and len(losses) not in counts:
        return ()
    terms = [] if losses.dim() else reduced(losses.grad_fn, counts)
    if terms is None or {edge.node for edge in edges}.intersection(terms):
        return ()  # what the model returned is reduced as it is: there is nothing to mix it
    one = torch.ones_like(losses)
    if losses.dim():
        one = torch.zeros_like(losses)
        one[place] = 1
    try:
        with alone_at(place, terms, counts, axis):
            return torch.autograd.grad(losses, edges, one, retain_graph=True, allow_unused=True)
    except RuntimeError:  # graphs that can be run once, such as compiled ones
        return ()


@contextmanager
def alone_at(place: int, nodes: Iterable[Any], counts: set[int], axis: int) -> Iterator[None]:
    """Let only one record's part of a gradient pass these nodes; of unclear ones, nothing."""

    def parts(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if each is None else one_of(each) for each in gradients)

    def one_of(gradient: Tensor) -> Tensor:
        kept = torch.zeros_like(gradient)
        if gradient.dim() and len(gradient) in counts:
            either = gradient.dim() > 1 and gradient.shape[1] in counts
            part = (slice(None), place) if either and axis else (place,)
            kept[part] = gradient[part]
        return kept

    handles = [node.register_prehook(parts) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def reaches_others(gradient: Tensor | None, axis: int | None, rows: int, per_record: int) -> bool:
    """Whether a gradient has entries in several records; not where it may have no records.

    Args:
        axis: the records'; None: the only one of their number, of the first two.
    """
    if gradient is None or not gradient.numel() or rows not in gradient.shape[:2]:
        return False
    if axis is None and list(gradient.shape).count(rows) == 1:
        axis = list(gradient.shape).index(rows)
    if axis is None or gradient.dim() <= axis or gradient.shape[axis] != rows:
        return False
    largest = [
        # 0 times infinity is no trace of another record
        part.reshape(len(part), -1).nan_to_num(0, 0, 0).abs().amax(1)
        for part in gradient.movedim(axis, 0).split(max(1, LOOKED_AT * rows // gradient.numel()))
    ]
    of_rows = torch.cat(largest)
    reached = (of_rows > ROUNDING * of_rows.max()).nonzero().flatten()
    return len(reached.div(per_record).floor().unique()) > 1


def nearest(edges: Sequence[Placed], loss: Any) -> list[Placed]:
    """The edges between which and the loss no hooked layer lies, whose pass this would be."""
    nodes = {edge.node for _, edge in edges}
    reached = below([loss], nodes) & nodes
    if len(reached) > 1:
        layers = [node for node in below(reached, set()) if isinstance(node, BackwardCFunction)]
        reached -= below([after for layer in layers for after in following(layer)], set())
    return [(place, edge) for place, edge in edges if edge.node in reached]


def below(starts: Iterable[Any], stops: set[Any]) -> set[Any]:
    """Nodes that a backward pass from ``starts`` runs through, up to ``stops``."""
    found, left = set[Any](), [node for node in starts if node is not None]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += [] if node in stops else following(node)
    return found


def following(node: Any) -> list[Any]:
    return [each for each, _ in node.next_functions if each is not None]
