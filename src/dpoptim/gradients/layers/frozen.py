"""Linear layers that do not train, as under low-rank adapters: no hooks, but fast products."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.gradients.arithmetic.multiplication import linear_of_constants, rows_leave_mkl
from dpoptim.gradients.layers.hugging_face import is_transposed_linear


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
    return partial(multiply, module, transposed)


def multiply(module: nn.Module, transposed: bool, *args: Any, **kwargs: Any) -> Tensor:
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    # others may have taken their place
    learns = any(p is not None and p.requires_grad for p in (weight, bias))
    if (
        weight is None or learns or kwargs or len(args) != 1 or torch.jit.is_tracing()  # type: ignore[attr-defined]
    ):
        return type(module).forward(module, *args, **kwargs)
    return linear_of_constants(args[0], weight.T if transposed else weight, bias)
