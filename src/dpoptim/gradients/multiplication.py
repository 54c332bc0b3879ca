"""Matrix products by the faster of the two libraries that PyTorch has for them.

PyTorch multiplies float32 matrices with MKL, which uses the wide vectors (AVX-512) of Intel's processors only. oneDNN, which
PyTorch carries for convolutions, uses them on all, and there multiplies in half the time. Which library is used depends on
the processor, on the user's switch (``torch.backends.mkldnn``) and on the size of one matrix, never on how many rows there
are, which records could influence.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

WORTH_A_CALL = 1 << 12  # entries of a matrix above which oneDNN's longer way to its kernel pays


@cache
def onednn_is_faster() -> bool:
    """Whether this processor has wide vectors that MKL leaves alone, and this PyTorch has oneDNN's products."""
    processor = torch.cpu.get_capabilities()
    if processor.get("architecture") != "x86_64" or not processor.get("avx512_f"):
        return False
    if "intel" in str(processor.get("cpu_name", "intel")).lower() or not torch.backends.mkl.is_available():
        return False
    return bool(torch._C._has_mkldnn) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_multiplies(x: Tensor, rows: int, columns: int) -> bool:
    """Whether oneDNN multiplies a tensor like ``x`` with a (rows, columns) matrix, or to one.

    Not vectors: how it adds up their products depends on how they lie (`alike`). Nor what only looks like a tensor, such as
    those that `shared` and torch.func follow through a model: they would lose sight of it.
    """
    return (
        min(rows, columns) > 1
        and type(x) in (Tensor, nn.Parameter)
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and rows * columns > WORTH_A_CALL
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and onednn_is_faster()
        and bool(torch.backends.mkldnn.enabled)
        and torch.backends.mkldnn.matmul.fp32_precision in ("none", "ieee")  # type: ignore[attr-defined]
    )


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ w.T + bias``: x of shape (..., k), w (n, k), bias (n,) -> (..., n). Not for autograd."""
    if w.dtype != x.dtype or not x.numel() or not onednn_multiplies(x, *w.shape):
        return F.linear(x, w, bias)
    if x.numel() > x.shape[-1]:
        return by_onednn(x, w, bias)
    return by_onednn(torch.cat([x.reshape(1, -1)] * 2), w, bias)[:1].view(*x.shape[:-1], -1)  # one row has another kernel


def by_onednn(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` of float32 on the CPU, in new memory."""
    if not w.is_contiguous() and not w.T.is_contiguous():
        w = w.contiguous()  # oneDNN knows no rows that overlap
    return torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")


def linear_of_constants(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` for autograd, of detached weights, under torch.autocast as torch runs it."""
    if (
        torch.is_autocast_enabled(x.device.type)
        or type(w) not in (Tensor, nn.Parameter)
        or not onednn_multiplies(x, *w.shape)
    ):
        return F.linear(x, w, bias)
    return LinearOfConstants.apply(x, w, bias)


class LinearOfConstants(torch.autograd.Function):
    """Inputs: x (..., k), w (n, k), bias (n,) or None. Only x gets a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(w)
        return linear(x, w, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (w,) = ctx.saved_tensors
        return linear(g, w.T), None, None
