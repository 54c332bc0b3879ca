"""Any other module with parameters: per-record gradients by torch.func over the whole module. Slower, but right.

The forward pass runs as it always did. In the backward pass the module is run again for each record (vectorised by
``vmap``) and differentiated, so it must treat its records alike and draw no random numbers of its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from dpoptim.errors import PrivacyError, quoted
from dpoptim.gradients.arithmetic import widened
from dpoptim.gradients.backward_pass import BackwardRecorder, LayerUse, full_precision, refuse_nested_backward
from dpoptim.gradients.per_sample_grads import Dense, PerSampleGrad, blocks

# Whether layers inside a module that the fallback runs do so without hooks.
AS_THEY_ARE = ContextVar("layers run as they are", default=False)
TENSOR = object()  # marks the place of a tensor among a call's arguments


class OriginalForward(nn.Module):
    """Calls a module's own forward pass, so that ``functional_call`` can put other parameters in its place."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = module
        self.original = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)


@dataclass(frozen=True)
class Call:
    """One call of a fallback module: its tensors apart from the structure around them."""

    shim: OriginalForward
    name: str
    leaves: tuple[Any, ...]  # TENSOR in place of each tensor
    structure: pytree.TreeSpec
    batched: tuple[bool, ...]  # per tensor: whether its first axis is the record; else all records share it
    trainable: tuple[str, ...]

    def run(self, tensors: Sequence[Tensor]) -> Any:
        fill = iter(tensors)
        leaves = [next(fill) if leaf is TENSOR else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return self.shim.original(*args, **kwargs)

    def record_outputs(self, parameters: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Differentiable outputs for one record, without a record axis."""
        rows = [t[None] if batched else t for t, batched in zip(tensors, self.batched, strict=True)]
        fill = iter(rows)
        leaves = [next(fill) if leaf is TENSOR else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        named = {f"inner.{key}": value for key, value in parameters.items()}
        outputs = torch.func.functional_call(self.shim, named, args, kwargs)
        leaves = [out for out in pytree.tree_leaves(outputs) if differentiable(out)]
        if any(out.dim() == 0 or out.shape[0] != 1 for out in leaves):
            raise PrivacyError(
                f"module {self.name!r} ({type(self.shim.inner).__name__}) has no rule of its own, and computes more than "
                "one row for one record: it uses data of a whole batch that its call did not get as tensors with the batch "
                "on their first axis. Fix: hand all of a batch's data to the module's call that way."
            )
        return tuple(out[0] for out in leaves)

    def differentiate(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor], parameters: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], tuple[Tensor | None, ...]]:
        """Per-record gradients of parameters and of batched inputs: everything with its record axis in front."""
        moving = [i for i, t in enumerate(tensors) if self.batched[i] and differentiable(t)]

        def one(record: tuple[Tensor, ...], g: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
            def outputs(weights: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                filled = list(record)
                for place, value in zip(moving, inputs, strict=True):
                    filled[place] = value
                return self.record_outputs(weights, filled)

            pull_back = torch.func.vjp(outputs, dict(parameters), tuple(record[i] for i in moving))[1]
            return pull_back(g)

        in_front = tuple(0 if batched else None for batched in self.batched)
        try:
            with as_they_are():
                weights, inputs = torch.func.vmap(one, in_dims=(in_front, 0), randomness="error")(
                    tuple(tensors), tuple(gradients)
                )
        except RuntimeError as error:
            raise PrivacyError(
                f"module {self.name!r} ({type(self.shim.inner).__name__}) has parameters but no rule of its own, and "
                f"torch.func cannot differentiate it record by record: {quoted(error)}. "
                "Fix: move its parameters into supported layers, make its dropout a layer of its own, or freeze it."
            ) from None
        by_input: list[Tensor | None] = [None] * len(tensors)
        for place, value in zip(moving, inputs, strict=True):
            by_input[place] = value
        return weights, tuple(by_input)


def differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class FallbackFunction(torch.autograd.Function):
    """A module without a rule. Inputs: recorder, call, a list to receive the output's structure, tensors, parameters."""

    @staticmethod
    def forward(
        ctx: Any, recorder: BackwardRecorder, call: Call, structure: list[Any], count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        inputs = tensors[:count]
        ctx.recorder, ctx.call, ctx.count = recorder, call, count
        ctx.forward_task = torch._C._current_graph_task_id()
        with full_precision(recorder, call.name, inputs[0].device) as widen:
            inputs = widened(inputs) if widen else inputs
            leaves, spec = pytree.tree_flatten(call.run(inputs))
        ctx.save_for_backward(*inputs, *tensors[count:])
        outputs = tuple(leaves)
        structure.append(spec)
        ctx.mark_non_differentiable(*(o for o in outputs if isinstance(o, Tensor) and not differentiable(o)))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(ctx.saved_tensors[0].device.type, enabled=False):
            return FallbackFunction._backward(ctx, *gradients)

    @staticmethod
    def _backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        refuse_nested_backward(call.name, ctx.forward_task)
        inputs, values = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        parameters = dict(zip(call.trainable, (v.detach() for v in values), strict=True))
        for batched, needed in zip(call.batched, ctx.needs_input_grad[4:], strict=False):
            if needed and not batched:
                raise PrivacyError(
                    f"module {call.name!r} got a differentiable input that all records share. "
                    "Fix: expand it to one row per record before the call."
                )
        outputs = [g for g in gradients if differentiable(g)]
        records = outputs[0].shape[0]
        size = sum(p.numel() for p in parameters.values())
        pieces = []
        for part in blocks(records, 2 * size):
            piece = [t[part] if batched else t for t, batched in zip(inputs, call.batched, strict=True)]
            pieces.append(call.differentiate(piece, [g[part] for g in outputs], parameters))
        weights = {name: torch.cat([piece[0][name] for piece in pieces]) for name in call.trainable}
        ctx.recorder.enter(
            LayerUse(call.name, call.shim.inner, records, partial(dense_per_sample_grads, weights)),
        )
        columns = [[piece[1][i] for piece in pieces] for i in range(ctx.count)]
        by_input = [
            torch.cat([g for g in column if g is not None]) if needed else None
            for column, needed in zip(columns, ctx.needs_input_grad[4:], strict=False)
        ]
        return (None, None, None, None, *by_input, *[None] * len(call.trainable))


@contextmanager
def as_they_are() -> Iterator[None]:
    before = AS_THEY_ARE.set(True)
    try:
        yield
    finally:
        AS_THEY_ARE.reset(before)


def leaves_of(outputs: Any) -> list[Tensor]:
    """The tensors at the ends of the graph that outputs were computed by."""
    nodes = [out.grad_fn for out in pytree.tree_leaves(outputs) if isinstance(out, Tensor) and out.grad_fn is not None]
    seen, leaves = set(nodes), []
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        following = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= following
        nodes.extend(following)
    return leaves


def dense_per_sample_grads(weights: Mapping[str, Tensor]) -> dict[str, PerSampleGrad]:
    return {name: Dense(value) for name, value in weights.items()}


class FallbackLayer:
    """Replaces the forward pass of a module that has no rule; its submodules run inside it as they are."""

    hooks_children = False

    def __init__(self, recorder: BackwardRecorder, module: nn.Module, name: str, trainable: Sequence[str]) -> None:
        self.recorder, self.module, self.name = recorder, module, name
        self.trainable = tuple(trainable)
        self.shim = OriginalForward(module, module.forward)
        # Which tensors have the batch first, by how many tensors a call has: fixed by the first call that tells, best one on
        # made-up records of a number unlike every other axis. A mask may later be as long as a batch.
        self.batched: dict[int, tuple[bool, ...]] = {}

    def __call__(self, rows: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors:
            raise PrivacyError(
                f"module {self.name!r} has parameters but its call has no tensor input, so no record axis. Fix: let "
                "the module that sees the data use its parameters."
            )
        batch = tensors[0].shape[0] if rows is None and tensors[0].dim() else rows
        batched = self.batched.get(len(tensors))
        if batched is None:
            self._refuse_foreign_parameters(args, kwargs)
            batched = tuple(t.dim() > 0 and t.shape[0] == batch for t in tensors)
            if batch != 1:
                self.batched[len(tensors)] = batched
        if not any(batched):
            raise PrivacyError(
                f"module {self.name!r} got {len(tensors)} tensors, none with the batch on its first axis. "
                "Fix: keep the batch axis first (batch_first=True)."
            )
        call = Call(
            self.shim,
            self.name,
            tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves),
            structure,
            batched,
            self.trainable,
        )
        named = dict(self.module.named_parameters())
        spec: list[Any] = []
        outputs = FallbackFunction.apply(
            self.recorder, call, spec, len(tensors), *tensors, *(named[name] for name in self.trainable)
        )
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        for out in filter(differentiable, outputs):
            if out.dim() == 0 or out.shape[0] != batch:
                raise PrivacyError(
                    f"module {self.name!r} ({type(self.module).__name__}) has no rule of its own and returns a tensor "
                    "whose first axis is not the batch. "
                    "Fix: keep the batch axis first in its outputs, or move its parameters into supported layers."
                )
        return pytree.tree_unflatten(list(outputs), spec[0])

    def _refuse_foreign_parameters(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Parameters of other modules (passed in, say) would get no gradient through this one, and nobody would know."""
        inputs = pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        with torch.enable_grad(), as_they_are():
            reached = leaves_of(self.shim.original(*inputs[0], **inputs[1]))
        own = {id(p) for p in self.module.parameters()}
        if any(id(p) not in own for p in reached):
            raise PrivacyError(
                f"module {self.name!r} ({type(self.module).__name__}) has no rule of its own and uses trainable parameters "
                "of other modules, which its per-record gradients would miss. Fix: freeze those, or let their own module "
                "apply them."
            )
