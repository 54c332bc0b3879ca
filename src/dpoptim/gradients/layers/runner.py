"""Stand-ins for whole forward passes, where one input and one output are not enough."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpoptim.gradients.arithmetic.precision import widened
from dpoptim.gradients.backward_pass import (
    BackwardRecorder,
    LayerUse,
    narrow_dtype,
    once_differentiable,
    refuse_nested_backward,
)
from dpoptim.gradients.per_sample.per_sample_grads import PerSampleGrad
from dpoptim.runtime.torch_internals import graph_task


class Runner(Protocol):
    """Runs one module, under hooks.

    Attributes:
        hooks_children: whether the module's children get hooks of their own.
    """

    hooks_children: bool

    def __call__(self, rows: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module on the caller's arguments; ``rows``: records in its input, or None."""
        ...


def holder(parameters: Mapping[str, Tensor | None]) -> nn.Module:
    """A module that owns just these parameters: for what is recorded of some of a module's."""
    module = nn.Module()
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.Parameter):
            module.register_parameter(name, parameter)
    return module


@dataclass(frozen=True)
class Use:
    """A use of some parameters in a larger module.

    Attributes:
        held: the module that owns them, and no others (see `holder`).
        per_sample_grads: their per-record gradients by name, from what `tap` saved and the
            gradient of what it was put on.
    """

    recorder: BackwardRecorder
    label: str
    held: nn.Module
    per_sample_grads: Callable[[tuple[Tensor, ...], Tensor], Mapping[str, PerSampleGrad]]


def tap(use: Use, z: Tensor, *saved: Tensor) -> Tensor:
    """``z`` (B, ...), whose gradient is entered in the recorder on its way back.

    For a value that was computed from *detached* parameters: autograd takes care of everything
    else in the module.
    """
    return Tap.apply(use, z, len(saved), *(s.detach() for s in saved), *use.held.parameters())


def enter(use: Use, forward_task: int, saved: tuple[Tensor, ...], g: Tensor) -> None:
    """Enter a use in the recorder, from inside a backward pass.

    Args:
        forward_task: `graph_task` of the forward pass.
        saved, g: for ``use.per_sample_grads``.
    """
    refuse_nested_backward(use.label, forward_task)
    use.recorder.enter(
        LayerUse(
            use.label,
            use.held,
            g.shape[0],
            lambda: use.per_sample_grads(widened(saved), *widened([g])),
        )
    )


class Tap(torch.autograd.Function):
    """The identity; inputs: use, z, number of tensors to save, these, parameters (graph edges)."""

    @staticmethod
    def forward(ctx: Any, use: Use, z: Tensor, count: int, *tensors: Tensor) -> Tensor:
        narrow_dtype(use.recorder, use.label, z.device)
        ctx.save_for_backward(*tensors[:count])
        ctx.use, ctx.tensors = use, len(tensors)
        ctx.forward_task = graph_task()
        return z.view_as(z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        enter(ctx.use, ctx.forward_task, ctx.saved_tensors, g)
        return (None, g, None, *[None] * ctx.tensors)
