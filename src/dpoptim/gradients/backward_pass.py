"""A backward pass, recorded: every layer enters what its per-sample gradients are made of.

A hooked layer's backward pass returns the gradient of its *input* and nothing for its parameters,
so the ordinary weight gradients are never computed; what they would have been made of is entered
here instead. When autograd has finished, the pass is closed: the engine turns the entries into
norms, factors and one clipped sum.

Entries are filed by autograd's graph task, so a backward pass that dies leaves nothing that a
later one could count.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from dpoptim.errors import PrivacyError
from dpoptim.gradients.arithmetic.batch_invariant import row_by_row
from dpoptim.gradients.arithmetic.precision import (
    NARROW,
    devices_under_autocast,
    widened,
    without_autocast,
)
from dpoptim.gradients.layers.rule import AnyRule
from dpoptim.gradients.per_sample.per_sample_grads import PerSampleGrad
from dpoptim.runtime.torch_internals import (
    OUTSIDE_BACKWARD,
    after_backward,
    gradient_forms,
    graph_task,
    never_compiled,
    node_name,
    pytree,
)

BOTH_LOSSES = "of two losses on one batch (a GAN's) add both losses and make one pass"
BY_INPUTS = "for gradients by inputs (FGSM, PGD), torch.autograd.grad(loss, x)"
CALLED_AGAIN = (
    "was called with different numbers of rows in one step, as with a public batch beside the "
    "private records: of both nobody can tell whose rows are whose. Fix: a copy of the model for "
    "the public batch, and a step of its own after the private one, which costs no privacy; every "
    "call of the model on all rows of the batch that was delivered. Or dpoptim.attach(..., "
    'isolation="alone"), where each record may have several calls.'
)
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass
class LayerUse:
    """One use of a layer: how many records it saw, and what its gradients are made of."""

    layer: str
    module: nn.Module
    records: int
    per_sample_grads: Callable[[], Mapping[str, PerSampleGrad]]


@dataclass
class BackwardPass:
    """The entries of one backward pass, and the parameters that autograd reached in it."""

    entries: list[LayerUse] = field(default_factory=list)
    reached: set[int] = field(default_factory=set)  # places of parameters in the engine

    def uses(
        self, places_of: Callable[[nn.Module], Mapping[str, int]], expected: int
    ) -> list[tuple[LayerUse, dict[str, int]]]:
        """The uses of layers whose parameters were reached, with the places of these, by name.

        Harmless passes, such as ``autograd.grad(loss, x)``, reach no parameter.

        Args:
            places_of: a module's parameters.
            expected: rows; of two layers that disagree, the one that saw others is named.

        Raises:
            PrivacyError: layers saw different numbers of rows.
        """
        found: list[tuple[LayerUse, dict[str, int]]] = []
        for use in self.entries:
            places = {
                k: place for k, place in places_of(use.module).items() if place in self.reached
            }
            if not places:
                continue
            found.append((use, places))
            first = found[0][0]
            if use.records != first.records:
                if use.layer == first.layer:
                    raise PrivacyError(f"layer {use.layer!r} {CALLED_AGAIN}", layer=use.layer)
                raise PrivacyError(
                    f"layers {use.layer!r} and {first.layer!r} saw different numbers of rows: "
                    "the first axis must be the batch in every layer. Fix: keep (batch, ...) "
                    "shapes; do not flatten records and positions together, and give positions "
                    'the shape (1, T). Or dpoptim.attach(..., isolation="alone"), such as for '
                    "graphs that are joined into one, and sets of unequal sizes.",
                    layer=(first if first.records != expected else use).layer,
                )
        return found


class BackwardRecorder:
    """Files entries by backward pass and hands the finished pass to ``close``.

    Attributes:
        close: of an engine while it is attached. (One that held it longer would hold its sums.)
        may_round: whether no loss will be a mean, so that nobody need look for rounding (see
            `refuse_rounding`).
        looks: whether the next loss may be a mean that is not handed over, so that what the model
            returns must be looked at.
        rounded: whether a layer ran in narrow precision (torch.autocast, or as it is stored).
    """

    def __init__(self, *, may_round: bool = False) -> None:
        self.close: Callable[[BackwardPass], None] = self.refuse_undelivered
        self.may_round, self.rounded = may_round, False
        self.looks = not may_round
        # the first that ran in narrow precision since a delivery
        self._narrow: str | None = None
        self._task = self._latest = OUTSIDE_BACKWARD
        self._pass = BackwardPass()

    @staticmethod
    def refuse_undelivered(finished: BackwardPass) -> None:
        """Refuse a pass on rows that no engine has delivered, or not any more."""
        if finished.entries and finished.reached and inside_another():
            raise PrivacyError(
                "backward passes ran inside another one, as in reversible layers (Reformer): "
                "a record's gradient would arrive in pieces. No isolation serves them. Fix: plain "
                "layers; to save memory, checkpoint(..., use_reentrant=False)."
            )
        if finished.entries and finished.reached:
            raise PrivacyError(
                "a backward pass ran on rows that private.batches() did not deliver, or a second "
                f"time on rows that it did. Fix: {BOTH_LOSSES}; {BY_INPUTS}; for a loss that only "
                "trains another model through this one (a GAN's generator), "
                "loss.backward(inputs=[*generator.parameters()]); no backward() inside custom "
                "functions (reversible layers); else draw every batch from private.batches(), and "
                "call private.backward(losses) once for each."
            )

    def begin(self, stored_narrow: str | None) -> None:
        """A new batch, or a part of one, is delivered to a model with such a layer, if any."""
        self._narrow = stored_narrow
        self.rounded |= stored_narrow is not None

    def note_narrow(self, layer: str) -> None:
        """A layer ran under torch.autocast."""
        self.rounded, self._narrow = True, self._narrow or layer

    def look(self, results: Any) -> None:
        """Note whether gradients of these tensors are handed on in narrow precision."""
        if self._narrow is None and (name := narrow_operation(results)) is not None:
            self.note_narrow(f"(an operation between layers or after them: {name})")

    def refuse_rounding(self) -> None:
        """Refuse a mean of which something ran in narrow precision.

        Autograd scales by one over the realised batch and then rounds to 8 or 11 bits: one record
        more would round every other record's gradient anew, B times as much as a record may add. A
        sum has no such factor.
        """
        if self._narrow is not None:
            raise PrivacyError(
                f"layer {self._narrow!r} ran in bfloat16 or float16 with a loss that is a mean "
                "(instead of one loss for each record, given to private.backward): its factor, one "
                "over the realised batch, would be rounded together with every record's gradient, "
                "and the bound on a record would not hold. Fix: private.backward(losses) with one "
                "loss for each record; or train in float32."
            )

    def current(self) -> BackwardPass:
        """The pass that autograd is in; opens it on its first entry."""
        task = graph_task()
        if task != self._task:
            if task < self._latest:
                raise PrivacyError(
                    "a backward pass ran inside another one, over a graph that was built before: "
                    "the outer one's records would be lost. Fix: one loss.backward() for each "
                    "batch, and no backward() inside custom functions, such as "
                    "checkpoint(..., use_reentrant=True): use_reentrant=False."
                )
            if devices_under_autocast():
                # rounds what plain operations hand back, wherever forward ran
                self.note_narrow("(the backward pass)")
            # Whatever an earlier, interrupted pass left behind goes with it.
            self._task, self._latest, self._pass = task, task, BackwardPass()
            after_backward(self._finish)
        return self._pass

    def _finish(self) -> None:
        finished, self._pass, self._task = self._pass, BackwardPass(), OUTSIDE_BACKWARD
        self.close(finished)

    def enter(self, entry: LayerUse) -> None:
        self.current().entries.append(entry)

    def reached(self, place: int) -> None:
        of_pass = self._pass if graph_task() == self._task else self.current()
        of_pass.reached.add(place)


def inside_another() -> bool:
    """Whether this backward pass was begun by another one, as this thread's calls show."""
    calls = [frame.f_code for frame, _ in traceback.walk_stack(None)]
    return calls.count(torch.autograd.backward.__code__) > 1


@never_compiled
def narrow_operation(results: Any) -> str | None:
    """The name of an operation on the way of these tensors' gradients that gets narrow ones."""
    for node in nodes_below(results):
        if any(each.dtype in NARROW for each in gradient_forms(node)):
            return node_name(node).removesuffix("0").removesuffix("Backward")
    return None


def nodes_below(results: Any) -> Iterator[Any]:
    """All nodes of autograd's graph that gradients of these tensors reach, each once."""
    leaves = pytree.tree_leaves(results)
    left: list[Any] = [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor)]
    seen: set[Any] = {None}
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            yield node
            left += [before for before, _ in node.next_functions]


def narrow_dtype(
    recorder: BackwardRecorder, layer: str, device: torch.device
) -> torch.dtype | None:
    """The dtype that torch.autocast computes in, or None; see `refuse_rounding`."""
    if not torch.is_autocast_enabled(device.type):
        return None
    recorder.note_narrow(layer)
    return torch.get_autocast_dtype(device.type)


@contextmanager
def full_precision(recorder: BackwardRecorder, layer: str, device: torch.device) -> Iterator[bool]:
    """Keep torch.autocast out of layers whose hooks do their own arithmetic, in float32.

    Yields whether inputs must be widened. Noted as by `narrow_dtype`: what goes in and comes out
    is rounded by others.
    """
    narrow = narrow_dtype(recorder, layer, device) is not None
    with torch.autocast(device.type, enabled=False) if narrow else nullcontext():
        yield narrow


def refuse_nested_backward(layer: str, forward_task: int) -> None:
    """Refuse to differentiate, in a backward pass, a graph that was built inside of one."""
    if forward_task != OUTSIDE_BACKWARD:
        raise PrivacyError(
            f"layer {layer!r} ran its forward pass inside a backward pass and was differentiated "
            "there (reentrant checkpointing): its records would be clipped piece by piece. Fix: "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
        )


def once_differentiable(backward: Function) -> Function:
    """A backward pass that cannot be differentiated; autograd hears of it where it asks."""
    refusing = torch.autograd.function.once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        # what is returned depends on the layer's weights where nothing that came depends on any
        came = (
            g if g is None or g.requires_grad else g.detach().requires_grad_() for g in gradients
        )
        return refusing(ctx, *came)

    return cast("Function", run)


class RuleFunction(torch.autograd.Function):
    """A layer with a rule; inputs: recorder, rule, module, name, x, parameters (as graph edges)."""

    @staticmethod
    def forward(
        ctx: Any,
        recorder: BackwardRecorder,
        rule: AnyRule,
        module: nn.Module,
        name: str,
        x: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        narrow = narrow_dtype(recorder, name, x.device)
        if narrow is None:
            output, saved = rule.forward(module, x)
        else:
            if x.is_floating_point() and x.dtype != torch.float64:  # which autocast leaves alone
                x = x.to(narrow if rule.narrow else torch.float32)
            if rule.casts:
                output, saved = rule.forward(module, x)
            else:
                # The cache would hand copies of weights that were made without autograd to
                # functional uses elsewhere.
                with torch.autocast(x.device.type, dtype=narrow, cache_enabled=False):
                    output, saved = rule.forward(module, x)
        ctx.save_for_backward(*saved)
        # not ctx.name: on a node of the graph, name() is autograd's
        ctx.recorder, ctx.rule, ctx.module, ctx.layer = recorder, rule, module, name
        ctx.parameters = len(parameters)
        ctx.forward_task = graph_task()
        # autograd lets nobody change a view in place
        return output.detach() if output._is_view() else output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        refuse_nested_backward(ctx.layer, ctx.forward_task)
        saved, rule, module, g = ctx.saved_tensors, ctx.rule, ctx.module, row_by_row(g)
        to_inputs, x_gradient = ctx.needs_input_grad[4], None
        at_once = rule.forms_at_once(module, saved, g)
        together = at_once and to_inputs and g.dtype not in NARROW

        def per_sample_grads() -> Mapping[str, PerSampleGrad]:
            given = (*saved, g) if rule.widens else widened((*saved, g))
            return rule.per_sample_grads(module, given[:-1], given[-1])

        with without_autocast(g.device.type):
            # where they are formed at once, what they were made of is free to go
            if together:
                x_gradient, formed = rule.all_gradients(module, widened(saved), g)
                per_sample_grads = partial(dict, formed)
            elif at_once:
                per_sample_grads = partial(dict, per_sample_grads())
            if to_inputs and not together:
                same = (
                    tuple(t.to(g.dtype) if t.is_floating_point() else t for t in saved)
                    if g.dtype in NARROW
                    else saved
                )
                x_gradient = rule.input_gradient(module, same, g)
        records = g.shape[0] // rule.positions
        # out here, where the recorder sees whether the pass runs under autocast
        ctx.recorder.enter(LayerUse(ctx.layer, module, records, per_sample_grads))
        return (None, None, None, None, x_gradient, *[None] * ctx.parameters)
