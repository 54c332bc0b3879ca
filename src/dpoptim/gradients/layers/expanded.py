"""One row per record of what all records share, and the way back to the parameters' gradients."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from dpoptim.errors import PrivacyError, quoted
from dpoptim.gradients.arithmetic.batch_invariant import sum_over
from dpoptim.gradients.arithmetic.position_sums import never_alone
from dpoptim.gradients.backward_pass import (
    BackwardRecorder,
    LayerUse,
    narrow_dtype,
    once_differentiable,
    refuse_nested_backward,
)
from dpoptim.gradients.layers.functional import layer_of
from dpoptim.gradients.layers.rule import AnyRule
from dpoptim.gradients.layers.runner import holder
from dpoptim.gradients.layers.torch_func import vmap
from dpoptim.gradients.per_sample.per_sample_grads import Dense, PerSampleGrad
from dpoptim.runtime.torch_internals import graph_task

Values = dict[int, Tensor]  # by id: parameters, and what was made of them so far


def places_of(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """The holder and name of a module's trainable parameters, those in lists and dicts too.

    And those that it computes its weights of.
    """
    containers: list[nn.Module] = [
        child
        for child in module.children()
        if isinstance(child, nn.ParameterList | nn.ParameterDict)
    ]
    if is_parametrized(module):
        containers += [*module.get_submodule("parametrizations").modules()]
    return [
        (place, name, p)
        for place in (module, *containers)
        for name, p in place._parameters.items()
        if p is not None and p.requires_grad
    ]


class Owner:
    """The module whose parameters are shared, as its shared tensors know it.

    Args:
        windows: whether a first axis that is a multiple of the records is theirs, with several
            rows for each.
    """

    def __init__(
        self, recorder: BackwardRecorder, label: str, module: nn.Module, *, windows: bool = False
    ) -> None:
        self.recorder, self.label, self.module, self.windows = recorder, label, module, windows
        self.places = places_of(module)
        self.constants: set[int] = set()
        self.sees_constants_only = False  # for now: the module runs on what is no data
        self.rows: int | None = None  # records in the model's current input, where known
        self.differentiates = False  # whether the forward pass is one for gradients
        self.first_axes: set[int] = set()  # of the tensors that the module was called with
        self._layers: dict[tuple[Any, ...], nn.Module] = {}
        self._holders: dict[tuple[int, ...], nn.Module] = {}

    def begin(self, rows: int | None) -> None:
        """A forward pass over so many records begins."""
        self.rows, self.differentiates = rows, torch.is_grad_enabled()

    @contextmanager
    def making(self) -> Iterator[None]:
        """While weights are computed: from parameters and constants, and no data."""
        before, self.sees_constants_only = self.sees_constants_only, True
        try:
            yield
        finally:
            self.sees_constants_only = before

    def records_on(self, axis: int) -> int | None:
        """How many records a first axis of this length has; None: it is none of records."""
        if self.rows is None or axis == self.rows:
            return axis
        if self.has_windows(axis):
            return self.rows
        # the model's first input may have another axis first
        return axis if axis != 1 and axis in self.first_axes else None

    def has_windows(self, axis: int) -> bool:
        """Whether a first axis of this length has several rows for each record."""
        return bool(self.windows and self.rows and axis != self.rows and axis % self.rows == 0)

    @property
    def behind_autograd(self) -> bool:
        """Whether what is made now has no gradient, or that of a custom function around it."""
        return self.differentiates and not torch.is_grad_enabled()

    def is_constant(self, t: Tensor) -> bool:
        """Whether a tensor is no data."""
        if t.requires_grad:
            return False
        one_for_all = t.dim() == 0 or (t.shape[0] == 1 and self.rows not in (None, 1))
        return one_for_all or self.sees_constants_only or id(t) in self.constants

    def see_constants(self) -> None:
        """Tensors of the module that are no data: buffers and frozen parameters."""
        frozen = (p for p in self.module.parameters() if not p.requires_grad)
        self.constants = {id(t) for t in (*self.module.buffers(), *frozen)}

    def holder(self, parameters: Sequence[nn.Parameter]) -> nn.Module:
        """The module that the recorder's entries about just these parameters are about."""
        key = tuple(map(id, parameters))
        if key not in self._holders:
            self._holders[key] = holder({str(i): p for i, p in enumerate(parameters)})
        return self._holders[key]

    def layer(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[AnyRule, nn.Module, Tensor] | None:
        """Rule, stand-in (always the same) and input of the layer that a call amounts to."""
        found = layer_of(name, args, kwargs)
        if found is None:
            return None
        rule, layer, x = found
        key = (name, *(id(p) for p in layer.parameters()), repr(layer))
        if key not in self._layers:
            rule.check(layer, self.label)
            self._layers[key] = layer
        return rule, self._layers[key], x


@dataclass(frozen=True)
class Parameter:
    """How a parameter is made of the parameters: it is one of them."""

    key: int

    def __call__(self, values: Values) -> Tensor:
        return values[self.key]


@dataclass(frozen=True)
class Transposed:
    """How the transposition of a parameter is made of it."""

    key: int

    def __call__(self, values: Values) -> Tensor:
        return values[self.key].mT


class ExpandParameter(torch.autograd.Function):
    """One row per record, or several, of what all records share.

    Inputs: owner, recipe, its parameters, value, how many records, the shape (rows first) that it
    takes, and the parameters again (for the graph's edges).

    The first axis of ``value``, if it has as many as the shape, is 1 or the rows of a record. Of
    the whole shape, so that positions are added up here (`batch_invariant`), not by autograd,
    which lets others change the order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        owner: Owner,
        make: Callable[[Values], Tensor],
        parameters: tuple[nn.Parameter, ...],
        value: Tensor,
        records: int,
        shape: torch.Size,
        *edges: Tensor,
    ) -> Tensor:
        narrow_dtype(owner.recorder, owner.label, value.device)
        ctx.owner, ctx.make, ctx.parameters, ctx.shape = owner, make, parameters, value.shape
        ctx.forward_task = graph_task()
        ctx.save_for_backward(*edges)
        one = value.reshape(*[1] * (len(shape) - value.dim()), *value.shape)  # a record's
        ctx.records, ctx.per_record = records, (shape[0] // max(1, records), *shape[1:])
        each = zip(one.shape, ctx.per_record, strict=True)
        ctx.repeated = [axis for axis, (own, size) in enumerate(each, 1) if own != size]
        return one.expand(records, *ctx.per_record).reshape(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, ...]:
        refuse_nested_backward(ctx.owner.label, ctx.forward_task)
        owner, make, parameters = ctx.owner, ctx.make, ctx.parameters
        values = ctx.saved_tensors
        g = g.reshape(ctx.records, *ctx.per_record)
        per_record = (sum_over(g, ctx.repeated) if ctx.repeated else g).reshape(
            g.shape[0], *ctx.shape
        )
        owner.recorder.enter(
            LayerUse(
                owner.label,
                owner.holder(parameters),
                g.shape[0],
                lambda: pull_back(owner.label, make, parameters, values, per_record),
            )
        )
        return (None,) * (6 + len(parameters))


def pull_back(
    label: str,
    make: Callable[[Values], Tensor],
    parameters: Sequence[nn.Parameter],
    values: Sequence[Tensor],
    g: Tensor,
) -> dict[str, PerSampleGrad]:
    """Per-record gradients of parameters from those of what they became: ``g`` (B, ...)."""
    if isinstance(make, Parameter):
        return {"0": Dense(g.reshape(len(g), -1))}

    def one(g: Tensor) -> tuple[Tensor, ...]:
        def again(*values: Tensor) -> Tensor:
            return make(dict(zip(map(id, parameters), values, strict=True)))

        return tuple(torch.func.vjp(again, *values)[1](g))

    try:
        rows = vmap(one, randomness="error")(never_alone(g))
    except RuntimeError as error:
        raise PrivacyError(
            f"what module {label!r} makes of its parameters before they meet data cannot be "
            f"differentiated record by record: {quoted(error)}. Fix: apply dropout after "
            "parameters and data have met."
        ) from None
    return {str(i): Dense(row[: len(g)].reshape(len(g), -1)) for i, row in enumerate(rows)}
