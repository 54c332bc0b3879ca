"""Losses made of several records' outputs, found where they are handed over: triplets, say.

One loss is differentiated alone, back to what the model returned: only its own record may be
reached. Of a scalar whose graph does not show the losses it was made of, one record's gradient is
differentiated again: a mean or sum of losses has no curvature between records, and no kink.
Nothing of this is released, and it costs the first batches a pass through the loss, or two.
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
from dpoptim.gradients.hooks.hook_manager import HookManager
from dpoptim.gradients.hooks.seen_outputs import SeenOutputs
from dpoptim.runtime.torch_internals import gradient_forms, node_name
from dpoptim.training.losses.reduction import reduced
from dpoptim.training.trials.made_up_records import Returned

LOOKED_AT = 1 << 20  # entries at a time: there may be no room for another copy of all
# Of the largest entry: what is left of the batch's largest score, which a loss took off and added
# again. A mean over a batch leaves each record's share of it, which is more.
ROUNDING = 5e-7
OWN_PAIRS = (
    "pairs that a record holds itself (or several rows of one record, rows_per_record=K), "
    "negatives from public data, or a sigmoid loss of each pair"
)
KINKS = ("Abs", "Clamp", "Relu", "LeakyRelu", "Maximum", "Minimum", "Where", "NanToNum")
Placed = tuple[int, GradientEdge]  # with its place among what was returned


def refuse_coupled_losses(
    engine: Engine, losses: Tensor, returned: Collection[Returned] = ()
) -> None:
    """Refuse losses of which one depends on the model's outputs for several records.

    Looked at is what the model's forward passes returned, or modules that a loop calls by
    themselves, where one axis is the records' for certain; not under ``fully_shard``, and not where
    records pass alone. Not seen: records that meet before the model, or in what is not
    differentiated; in scalars of unclear graphs, also not where they meet in straight lines.

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

    def reach(gradients: Sequence[Tensor | None]) -> bool:
        return any(
            reaches_others(gradient, records, rows, K)
            for gradient, (_, records) in zip(gradients, near, strict=False)
        )

    def meets_others(place: int, axis: int) -> bool:
        gradients, unclear = gradients_of_one(losses, place, edges, counts, axis)
        return reach(gradients) or (unclear and reach(curvatures_of_one(losses, place, near, rows)))

    if any(map(reach, (gradients_at(each, edges) for each in under_kinks(losses)))):
        raise coupled()
    for place in (0, -1):
        # of a matrix whose sides are equal, either axis may be the records'
        if all(meets_others(place, axis) for axis in ((0,) if losses.dim() else (0, 1))):
            raise coupled()


def coupled() -> SamplesInteractError:
    return SamplesInteractError(
        "the loss of one record depends on what the model returned for others: triplets, "
        "similarities or negatives within the batch, a mean or softmax over it, a root, "
        "ratio or limit of its sums (RMSE, dice, a correlation, flooding). One record would move "
        "the gradients of all. Fix: let each record's loss depend on that record alone, such as "
        "its own dice (dpoptim.per_sample(loss) takes any loss so that is more than a comparison "
        f"of records), {OWN_PAIRS}."
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
) -> tuple[Sequence[Tensor | None], bool]:
    """The gradients, at ``edges``, of the loss at one place alone.

    Args:
        counts: losses that there may be; none of others are looked at.
        axis: the records' in matrices that a scalar was reduced from, where it may be either.

    Returns:
        also whether something is left out: terms of a scalar that are none of records.
    """
    if losses.dim() and len(losses) not in counts:
        return (), False
    terms = [] if losses.dim() else reduced(losses.grad_fn, counts)
    if terms is None:
        return (), True
    if {edge.node for edge in edges}.intersection(terms):
        return (), False  # what the model returned is reduced as it is: there is nothing to mix it
    one = torch.ones_like(losses)
    if losses.dim():
        one = torch.zeros_like(losses)
        one[place] = 1
    try:
        with alone_at(place, terms, counts, axis) as left_out:
            found = torch.autograd.grad(losses, edges, one, retain_graph=True, allow_unused=True)
    except RuntimeError:  # graphs that can be run once, such as compiled ones
        return (), False
    return found, bool(left_out)


@contextmanager
def alone_at(
    place: int, nodes: Iterable[Any], counts: set[int], axis: int
) -> Iterator[list[torch.Size]]:
    """Let only one record's part of a gradient pass these nodes; of unclear ones, nothing.

    Yields:
        the shapes of these, once they have been met. Private.
    """
    left_out = list[torch.Size]()

    def parts(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if each is None else one_of(each) for each in gradients)

    def one_of(gradient: Tensor) -> Tensor:
        kept = torch.zeros_like(gradient)
        if gradient.dim() and len(gradient) in counts:
            either = gradient.dim() > 1 and gradient.shape[1] in counts
            part = (slice(None), place) if either and axis else (place,)
            kept[part] = gradient[part]
        else:
            left_out.append(gradient.shape)
        return kept

    handles = [node.register_prehook(parts) for node in nodes]
    try:
        yield left_out
    finally:
        for handle in handles:
            handle.remove()


def reaches_others(gradient: Tensor | None, axis: int | None, rows: int, per_record: int) -> bool:
    """Whether a gradient has entries in several records; not where it may have no records.

    Args:
        axis: the records'; None: the only one of their number, of the first two.
    """
    axis = None if gradient is None else axis_of_records(gradient, axis, rows)
    if gradient is None or axis is None:
        return False
    largest = [
        # 0 times infinity is no trace of another record
        part.reshape(len(part), -1).nan_to_num(0, 0, 0).abs().amax(1)
        for part in gradient.movedim(axis, 0).split(max(1, LOOKED_AT * rows // gradient.numel()))
    ]
    of_rows = torch.cat(largest)
    reached = (of_rows > ROUNDING * of_rows.max()).nonzero().flatten()
    return len(reached.div(per_record).floor().unique()) > 1


def axis_of_records(gradient: Tensor, axis: int | None, rows: int) -> int | None:
    """The axis that is known, or the only one that can be the records', of the first two."""
    if not gradient.numel() or rows not in gradient.shape[:2]:
        return None
    if axis is None and list(gradient.shape).count(rows) == 1:
        axis = list(gradient.shape).index(rows)
    known = axis is not None and gradient.dim() > axis and gradient.shape[axis] == rows
    return axis if known else None


def curvatures_of_one(
    loss: Tensor, place: int, near: Sequence[tuple[GradientEdge, int | None]], rows: int
) -> Sequence[Tensor | None]:
    """How much the outputs at each edge move one record's gradient of a scalar.

    Args:
        near: edges, with the records' axis, where it is known.
    """
    edges = [edge for edge, _ in near]
    try:
        with torch.enable_grad():
            first = torch.autograd.grad(loss, edges, create_graph=True, allow_unused=True)
            own = [
                # other weights at each edge, and each place: what two passes returned may cancel
                part * (edge + torch.arange(part.numel(), device=part.device)).view_as(part).cos()
                for edge, (gradient, (_, known)) in enumerate(zip(first, near, strict=True))
                if gradient is not None
                and (axis := axis_of_records(gradient, known, rows)) is not None
                and (part := gradient.select(axis, place)).requires_grad
            ]
            if not own:
                return ()
            total = torch.stack([part.sum().to(own[0].device, own[0].dtype) for part in own]).sum()
            return torch.autograd.grad(total, edges, retain_graph=True, allow_unused=True)
    except RuntimeError:  # what cannot be differentiated twice, or be run twice
        return ()


def under_kinks(loss: Tensor) -> list[GradientEdge]:
    """Scalars inside of a scalar whose slope is another on either side of a number.

    Of an absolute value, or a limit: it has no curvature, and the batch decides which side it is.
    A vector has none.
    """
    left: list[Any] = [loss.grad_fn]
    found, met = list[GradientEdge](), set[Any]()
    while left:
        node = left.pop()
        after = [GradientEdge(*each) for each in node.next_functions if each[0] is not None]
        if node in met or any(shape_at(edge) for edge in (GradientEdge(node, 0), *after)):
            continue  # no scalar made of scalars
        met.add(node)
        if node_name(node).startswith(KINKS):
            found += after
        else:
            left += [edge.node for edge in after]
    return found


def shape_at(edge: GradientEdge) -> tuple[int, ...]:
    return (*gradient_forms(edge.node)[edge.output_nr].shape,)


def gradients_at(scalar: GradientEdge, edges: Sequence[GradientEdge]) -> Sequence[Tensor | None]:
    """The gradients of a scalar inside of a graph."""
    try:
        return torch.autograd.grad([scalar], edges, retain_graph=True, allow_unused=True)
    except RuntimeError:  # graphs that can be run once, such as compiled ones
        return ()


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
