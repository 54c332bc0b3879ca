"""Any other module with parameters: per-record gradients by torch.func over the whole module. Slower, but right.

The forward pass runs as it always did. In the backward pass the module is run again for each record (vectorised by
``vmap``) and differentiated, so it must treat its records alike and draw no random numbers of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from dpoptim.errors import PrivacyError
from dpoptim.gradients.books import Books, Entry, refuse_autocast, refuse_nested_backward
from dpoptim.gradients.contributions import Contribution, Direct, blocks
from dpoptim.gradients.layers.recurrent import record_axes, with_initial_state, without_fused_kernel

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
    axes: tuple[int | None, ...]  # per tensor: where its records are; None for one that all records share
    trainable: tuple[str, ...]

    def run(self, tensors: Sequence[Tensor]) -> Any:
        fill = iter(tensors)
        leaves = [next(fill) if leaf is TENSOR else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return self.shim.original(*args, **kwargs)

    def record_outputs(self, parameters: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Differentiable outputs for one record, without a record axis."""
        rows = [t if axis is None else t.unsqueeze(axis) for t, axis in zip(tensors, self.axes, strict=True)]
        fill = iter(rows)
        leaves = [next(fill) if leaf is TENSOR else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        named = {f"inner.{key}": value for key, value in parameters.items()}
        outputs = torch.func.functional_call(self.shim, named, args, kwargs)
        leaves = [out for out in pytree.tree_leaves(outputs) if differentiable(out)]
        return tuple(out.select(self.output_axis(i), 0) for i, out in enumerate(leaves))

    def output_axis(self, number: int) -> int:
        """Where the records are in a differentiable output."""
        return record_axes(self.shim.inner)[min(number, 1)]

    def differentiate(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor], parameters: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], tuple[Tensor | None, ...]]:
        """Per-record gradients of parameters and of batched inputs: everything with its record axis in front."""
        moving = [i for i, t in enumerate(tensors) if self.axes[i] is not None and differentiable(t)]

        def one(record: tuple[Tensor, ...], g: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
            def outputs(weights: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                filled = list(record)
                for place, value in zip(moving, inputs, strict=True):
                    filled[place] = value
                return self.record_outputs(weights, filled)

            pull_back = torch.func.vjp(outputs, dict(parameters), tuple(record[i] for i in moving))[1]
            return pull_back(g)

        in_front = tuple(None if axis is None else 0 for axis in self.axes)
        try:
            with without_fused_kernel(self.shim.inner):
                weights, inputs = torch.func.vmap(one, in_dims=(in_front, 0), randomness="error")(
                    tuple(tensors), tuple(gradients)
                )
        except RuntimeError as error:
            # The text of torch's error speaks of operators, never of values.
            raise PrivacyError(
                f"module {self.name!r} ({type(self.shim.inner).__name__}) has parameters but no rule of its own, and "
                f"torch.func cannot differentiate it record by record: {str(error).splitlines()[0].rstrip('.')}. "
                "Fix: move its parameters into supported layers, make its dropout a layer of its own, or freeze it."
            ) from error
        by_input: list[Tensor | None] = [None] * len(tensors)
        for place, value in zip(moving, inputs, strict=True):
            by_input[place] = value
        return weights, tuple(by_input)


def differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class BookedModule(torch.autograd.Function):
    """A module without a rule. Inputs: books, call, a list to receive the output's structure, tensors, parameters."""

    @staticmethod
    def forward(
        ctx: Any, books: Books, call: Call, structure: list[Any], count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        inputs = tensors[:count]
        refuse_autocast(call.name, inputs[0])
        ctx.save_for_backward(*inputs, *tensors[count:])
        ctx.books, ctx.call, ctx.count = books, call, count
        ctx.forward_task = torch._C._current_graph_task_id()
        leaves, spec = pytree.tree_flatten(call.run(inputs))
        outputs = tuple(leaves)
        structure.append(spec)
        ctx.mark_non_differentiable(*(o for o in outputs if isinstance(o, Tensor) and not differentiable(o)))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        refuse_nested_backward(call.name, ctx.forward_task)
        inputs, values = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        parameters = dict(zip(call.trainable, (v.detach() for v in values), strict=True))
        for axis, needed in zip(call.axes, ctx.needs_input_grad[4:], strict=False):
            if needed and axis is None:
                raise PrivacyError(
                    f"module {call.name!r} got a differentiable input that all records share. "
                    "Fix: expand it to one row per record before the call."
                )
        refuse_autocast(call.name, gradients[0])
        differentiated = [g for g in gradients if differentiable(g)]
        outputs = [g.movedim(call.output_axis(i), 0) for i, g in enumerate(differentiated)]
        inputs = [t if axis is None else t.movedim(axis, 0) for t, axis in zip(inputs, call.axes, strict=True)]
        records = outputs[0].shape[0]
        size = sum(p.numel() for p in parameters.values())
        pieces = []
        for part in blocks(records, 2 * size):
            piece = [t if axis is None else t[part] for t, axis in zip(inputs, call.axes, strict=True)]
            pieces.append(call.differentiate(piece, [g[part] for g in outputs], parameters))
        weights = {name: torch.cat([piece[0][name] for piece in pieces]) for name in call.trainable}
        ctx.books.enter(
            Entry(call.name, call.shim.inner, records, partial(direct_contributions, weights)),
        )
        columns = [[piece[1][i] for piece in pieces] for i in range(ctx.count)]
        by_input = [
            torch.cat([g for g in column if g is not None]).movedim(0, axis) if needed and axis is not None else None
            for column, axis, needed in zip(columns, call.axes, ctx.needs_input_grad[4:], strict=False)
        ]
        return (None, None, None, None, *by_input, *[None] * len(call.trainable))


def direct_contributions(weights: Mapping[str, Tensor]) -> dict[str, Contribution]:
    return {name: Direct(value) for name, value in weights.items()}


class FallbackLayer:
    """Replaces the forward pass of a module that has no rule; its submodules run inside it as they are."""

    books_children = False

    def __init__(self, books: Books, module: nn.Module, name: str, trainable: Sequence[str]) -> None:
        self.books, self.module, self.name = books, module, name
        self.trainable = tuple(trainable)
        self.shim = OriginalForward(module, module.forward)
        # Fixed by the first call that tells: a mask may later be as long as a batch.
        self.axes: tuple[int | None, ...] | None = None

    def __call__(self, rows: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(self.module, nn.RNNBase):
            args, kwargs = with_initial_state(self.module, args, kwargs), {}
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors:
            raise PrivacyError(
                f"module {self.name!r} has parameters but its call has no tensor input, so no record axis. Fix: let "
                "the module that sees the data use its parameters."
            )
        first, others = record_axes(self.module)
        batch = tensors[0].shape[first] if rows is None and tensors[0].dim() > first else rows
        axes = self.axes
        if axes is None or len(axes) != len(tensors):
            places = (first, *[others] * (len(tensors) - 1))
            axes = tuple(
                axis if t.dim() > axis and t.shape[axis] == batch else None for t, axis in zip(tensors, places, strict=True)
            )
            if batch != 1:
                self.axes = axes
        if all(axis is None for axis in axes):
            raise PrivacyError(
                f"module {self.name!r} got {len(tensors)} tensors, none with the batch on its first axis. "
                "Fix: keep the batch axis first (batch_first=True)."
            )
        call = Call(
            self.shim,
            self.name,
            tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves),
            structure,
            axes,
            self.trainable,
        )
        named = dict(self.module.named_parameters())
        spec: list[Any] = []
        outputs = BookedModule.apply(
            self.books, call, spec, len(tensors), *tensors, *(named[name] for name in self.trainable)
        )
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        for i, out in enumerate(filter(differentiable, outputs)):
            axis = call.output_axis(i)
            if out.dim() <= axis or out.shape[axis] != batch:
                raise PrivacyError(
                    f"module {self.name!r} ({type(self.module).__name__}) has no rule of its own and returns a tensor "
                    "whose first axis is not the batch. "
                    "Fix: keep the batch axis first in its outputs, or move its parameters into supported layers."
                )
        return pytree.tree_unflatten(list(outputs), spec[0])
