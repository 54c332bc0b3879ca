"""Modules vectorised as a whole: one call for all records, a row of the parameters for each.

The module's parameters are expanded to one row a record, and ``vmap`` runs its forward pass over
rows and records. A record cannot reach another one's numbers there, so the gradient of row i is
record i's own, whatever the module does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpoptim.errors import PrivacyError, quoted
from dpoptim.gradients.arithmetic.precision import widened
from dpoptim.gradients.backward_pass import (
    BackwardRecorder,
    LayerUse,
    full_precision,
    once_differentiable,
    refuse_nested_backward,
)
from dpoptim.gradients.hooks.forwards import as_they_are, forward_of
from dpoptim.gradients.layers.runner import holder
from dpoptim.gradients.layers.torch_func import ByHand, called_with, vmap
from dpoptim.gradients.per_sample.per_sample_grads import Dense, PerSampleGrad
from dpoptim.runtime.torch_internals import graph_task, pytree

One = Callable[..., tuple[Tensor, ...]]  # a record's results, of its parameters and its tensors
TENSOR = object()  # marks the place of a tensor among a call's arguments or results
# results that are the same for every record
PLAIN = (type(None), bool, int, float, complex, str, bytes)
# What to write instead, by what is in an error of ``torch.func``; the first that is found.
INSTEAD = {
    "setup_context": "setup_context and generate_vmap_rule = True in the custom autograd.Function",
    "inplace": "operations that write nothing in place into tensors that are made there",
    "vmap": "torch.where in place of numbers read with item(), masks that pick rows, and branches "
    "that data decide",
}
# beside an axis: where a result has its records
SHARED, FLATTENED, EACH = "shared", "flattened", "each"


class NotVectorisedError(PrivacyError):
    """A module that ``torch.func`` cannot vectorise; it may run record by record."""


class OwnForwardOf(nn.Module):
    """Calls a module's own forward pass, so that `called_with` can replace parameters."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = module
        self.original = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)


class OneRowARecord(torch.autograd.Function):
    """Parameters as a row for each record; inputs: recorder, label, holder, records, parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        recorder: BackwardRecorder,
        label: str,
        held: nn.Module,
        rows: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.recorder, ctx.label, ctx.held, ctx.rows = recorder, label, held, rows
        ctx.forward_task = graph_task()
        ctx.set_materialize_grads(False)
        return tuple(p.expand(rows, *p.shape) for p in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        refuse_nested_backward(ctx.label, ctx.forward_task)
        found: dict[str, PerSampleGrad] = {}
        for (name, p), g in zip(ctx.held.named_parameters(), gradients, strict=True):
            found[name] = Dense(
                p.detach().new_zeros(1).expand(ctx.rows, p.numel()) if g is None else g
            )
        ctx.recorder.enter(LayerUse(ctx.label, ctx.held, ctx.rows, lambda: found))
        return (None,) * (4 + len(gradients))


@dataclass(frozen=True)
class Layout:
    """Where the records are in a call's tensors and in its results.

    Attributes:
        inputs: each tensor's axis of records; None: all records share it.
        outputs: each resulting tensor's axis of records; or `SHARED` (all records have the same),
            `FLATTENED` (records and positions on the first axis), `EACH` (a number, which becomes
            one number for each record).
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[int | str, ...]


class VmapLayer:
    """Runs a module for all records at once, each with its own row of the parameters.

    Random numbers are drawn for each record by itself. Numbers that the module returns without any
    axis come back as one for each record: shape (rows,). What it returns beside tensors and plain
    values (a cache, say) comes back as None.

    Args:
        batch_axis: where records are looked for first in tensors with several axes.
        forward: instead of the module's own.
    """

    hooks_children = False

    def __init__(
        self,
        recorder: BackwardRecorder,
        module: nn.Module,
        name: str,
        trainable: Sequence[str],
        batch_axis: int = 0,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        self.recorder, self.module, self.name = recorder, module, name
        self.shim = OwnForwardOf(module, forward or forward_of(module))
        self.axes = (1, 0) if batch_axis else (0,)
        named = dict(module.named_parameters())
        self._names = tuple(trainable)
        self._held = holder({str(i): named[key] for i, key in enumerate(self._names)})
        # By what a call looks like: fixed by the first call that tells, best one on made-up
        # records of a number unlike every other axis. A mask may later be as long as a batch.
        self._layouts: dict[Any, Layout] = {}

    def __call__(self, rows: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors:
            raise self._refusal("its call has no tensor input, so no record axis")
        if rows is None:
            rows = tensors[0].shape[self.axes[0]] if tensors[0].dim() > self.axes[0] else 0
        skeleton = [TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        with full_precision(self.recorder, self.name, tensors[0].device) as widen:
            tensors = list(widened(tensors)) if widen else tensors
            layout = self._layout(rows, tensors, skeleton, structure)
            return self._run(rows, tensors, skeleton, structure, layout)

    def _layout(
        self, rows: int, tensors: list[Tensor], skeleton: list[Any], structure: pytree.TreeSpec
    ) -> Layout:
        looks = (structure, tuple((t.dim(), t.dtype) for t in tensors))
        known = self._layouts.get(looks)
        if known is not None:
            return known
        inputs = tuple(self._axis(t.shape, rows) for t in tensors)
        if all(axis is None for axis in inputs):
            raise self._refusal("none of the tensors that it got has the batch on its first axis")
        with torch.no_grad(), as_they_are():
            copies = [t.clone() for t in tensors]  # which may be written in place
            args, kwargs = filled_arguments(skeleton, structure, copies)
            results = pytree.tree_leaves(self.shim.original(*args, **kwargs))
        shapes = [r.shape for r in results if isinstance(r, Tensor)]
        layout = Layout(inputs, tuple(self._place(shape, rows) for shape in shapes))
        if rows != 1:
            self._layouts[looks] = layout
        return layout

    def _axis(self, shape: torch.Size, rows: int) -> int | None:
        """The axis of records in a tensor of this shape."""
        return next((a for a in self.axes if len(shape) > a and shape[a] == rows), None)

    def _place(self, shape: torch.Size, rows: int) -> int | str:
        if not shape:
            return EACH
        axis = self._axis(shape, rows)
        if axis is not None:
            return axis
        return FLATTENED if shape[0] % rows == 0 and rows > 1 else SHARED

    def _run(
        self,
        rows: int,
        tensors: list[Tensor],
        skeleton: list[Any],
        structure: pytree.TreeSpec,
        layout: Layout,
    ) -> Any:
        named = dict(self.module.named_parameters())
        parameters = OneRowARecord.apply(
            self.recorder, self.name, self._held, rows, *(named[name] for name in self._names)
        )
        # the results' structure, and what is no tensor among them, by call
        found: list[tuple[Any, list[Any]]] = []

        def one(parameters: tuple[Tensor, ...], *record: Tensor) -> tuple[Tensor, ...]:
            whole = [
                t if a is None else t.unsqueeze(a)
                for t, a in zip(record, layout.inputs, strict=True)
            ]
            args, kwargs = filled_arguments(skeleton, structure, whole)
            own = {f"inner.{n}": p for n, p in zip(self._names, parameters, strict=True)}
            results, spec = pytree.tree_flatten(called_with(self.shim, own, args, kwargs))
            found.append(
                (spec, [TENSOR if isinstance(r, Tensor) else plain_value(r) for r in results])
            )
            return tuple(r for r in results if isinstance(r, Tensor))

        results = self._of_each(one, parameters, tensors, layout.inputs)
        spec, others = self._same_for_all(found)
        back = [
            self._together(r, place, rows) for r, place in zip(results, layout.outputs, strict=True)
        ]
        fresh = iter(back)
        return pytree.tree_unflatten([next(fresh) if o is TENSOR else o for o in others], spec)

    def _of_each(
        self,
        one: One,
        parameters: tuple[Tensor, ...],
        tensors: list[Tensor],
        axes: tuple[int | None, ...],
    ) -> tuple[Tensor, ...]:
        """Results of all records, (rows, *a record's): those of ``one``, a record's each.

        Args:
            axes: where the tensors have their records; None: all share them.
        """
        try:
            with as_they_are(), sdpa_kernel(SDPBackend.MATH), ByHand():
                return vmap(one, in_dims=(0, *axes), randomness="different")(parameters, *tensors)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = quoted(error).split(". For more details", 1)[0].split(", please file", 1)[0]
            fix = next((f"{INSTEAD[key]}; or " for key in INSTEAD if key in reason), "")
            raise NotVectorisedError(
                self._without_rule(
                    f"torch.func cannot vectorise it: {reason}. Fix: {fix}"
                    'dpoptim.attach(..., isolation="alone").'
                ),
                layer=self.name,
            ) from None

    def _same_for_all(self, found: list[tuple[Any, list[Any]]]) -> tuple[Any, list[Any]]:
        """The structure of a call's results, and what is no tensor among them."""
        if any(each != found[0] for each in found):
            raise self._refusal("what it returns beside tensors is not the same for all records")
        return found[0]

    def _together(self, result: Tensor, place: int | str, rows: int) -> Tensor:
        """One resulting tensor of a batch, from those of its records: (rows, *a record's)."""
        if place == EACH:
            return result
        if place == FLATTENED:
            return result.flatten(0, 1)
        axis = place if isinstance(place, int) else 0
        if place == SHARED and not result.requires_grad:
            if differs_by_record(result):
                raise self._refusal("what it returns without records is not the same for all")
            return result[0]
        if result.shape[axis + 1] != 1:
            raise self._refusal("it returns a tensor whose first axis is not the batch")
        return result.squeeze(axis + 1).movedim(0, axis)

    def _refusal(self, reason: str) -> PrivacyError:
        return PrivacyError(
            self._without_rule(
                f"{reason}. Fix: keep the batch axis first in what it is given and returns; or "
                'dpoptim.attach(..., isolation="alone").'
            ),
            layer=self.name,
        )

    def _without_rule(self, rest: str) -> str:
        kind = type(self.module).__name__
        return f"module {self.name!r} ({kind}) has no rule of its own, and {rest}"


def filled_arguments(
    skeleton: Sequence[Any], structure: pytree.TreeSpec, tensors: Sequence[Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments, with these tensors in their places."""
    fresh = iter(tensors)
    leaves = [next(fresh) if leaf is TENSOR else leaf for leaf in skeleton]
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return args, kwargs


def plain_value(value: Any) -> Any:
    """A result that is no tensor; None if it might hold tensors, which ``vmap`` makes void."""
    return value if isinstance(value, PLAIN) else None


def differs_by_record(result: Tensor) -> bool:
    """Whether records have something else in a result each."""
    if result.stride(0) == 0 or len(result) == 1:
        return False
    first = result[:1]
    return bool(((result != first) & ~(result.isnan() & first.isnan())).any())
