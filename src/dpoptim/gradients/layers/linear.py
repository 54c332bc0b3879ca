"""Linear layers: of PyTorch, of GPT-2, and those that do not train.

Any number of axes may lie between the records and the features.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.gradients.arithmetic.multiplication import linear, linear_of_constants, rows_leave_mkl
from dpoptim.gradients.arithmetic.precision import like_input
from dpoptim.gradients.layers.rule import LayerRule, PerSampleGrads, Saved
from dpoptim.gradients.memory import OF_OUTPUTS
from dpoptim.gradients.per_sample.joined import over_positions
from dpoptim.gradients.per_sample.sequence_outer import one_axis, positions


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether the module is GPT-2's linear layer, called Conv1D, its weight kept as (in, out).

    Known by name: Transformers is not imported.
    """
    kind = type(module)
    return (kind.__module__, kind.__qualname__) == ("transformers.pytorch_utils", "Conv1D")


class LinearRule(LayerRule[nn.Module]):
    """``x @ weight.T + bias``; transposed, ``x @ weight + bias``."""

    narrow = True
    casts = True
    widens = True

    def __init__(self, *, transposed: bool = False) -> None:
        self._transposed = transposed

    def forward(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Saved]:
        held = module._parameters["weight"]
        assert held is not None
        weight, bias = like_input(x, held, module._parameters.get("bias"))
        return linear(x, weight.T if self._transposed else weight, bias, OF_OUTPUTS), (x, held)

    def input_gradient(self, module: nn.Module, saved: Saved, g: Tensor) -> Tensor:
        return linear(g, saved[1] if self._transposed else saved[1].T)

    def per_sample_grads(self, module: nn.Module, saved: Saved, g: Tensor) -> PerSampleGrads:
        weight = positions(saved[0], g) if self._transposed else positions(g, saved[0])
        if module._parameters.get("bias") is None:
            return {"weight": weight}
        bias = over_positions(one_axis(g)) if self._transposed else weight.bias()
        return {"weight": weight, "bias": bias}


def faster_forward(module: nn.Module) -> Callable[..., Tensor] | None:
    """A faster forward pass for a frozen module; None where nothing would be gained."""
    transposed = is_transposed_linear(module)
    if not transposed and not (
        isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    ):
        return None
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or not rows_leave_mkl(weight, *weight.shape):
        return None
    return partial(multiply_by_constants, module, transposed)


def multiply_by_constants(module: nn.Module, transposed: bool, *args: Any, **kwargs: Any) -> Tensor:
    """A frozen layer\'s forward pass; that of its class where it has changed since."""
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    # others may have taken their place
    learns = any(p is not None and p.requires_grad for p in (weight, bias))
    if (
        weight is None or learns or kwargs or len(args) != 1 or torch.jit.is_tracing()  # type: ignore[attr-defined]
    ):
        return type(module).forward(module, *args, **kwargs)
    return linear_of_constants(args[0], weight.T if transposed else weight, bias)
