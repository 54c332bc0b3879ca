"""The precision that the sums' theorem assumes, whatever mode the user trains in."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dpoptim.runtime.torch_internals import autocast_is_on, matmul_precision, set_cudnn_tf32

NARROW = (torch.float16, torch.bfloat16)
# what of torch.backends may compute float32 in TF32 or narrower
MAY_ROUND = [("cuda", "matmul"), *(("cudnn", kind) for kind in ("conv", "rnn"))]
MAY_ROUND += [("mkldnn", kind) for kind in ("matmul", "conv", "rnn")]
EXACT = ("none", "ieee")  # precisions of float32 products
# PyTorch's older switches for these: read, set, and what they are without TF32
OLDER: dict[str, tuple[Callable[[], Any], Callable[[Any], None], Any]] = {
    "matmul": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
    "conv": (lambda: torch.backends.cudnn.allow_tf32, set_cudnn_tf32, False),
}
AS_IT_IS = nullcontext()


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the per-sample gradients of a parameter: float32 for bfloat16 and float16."""
    return torch.float32 if dtype in NARROW else dtype


def widened(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """float16 and bfloat16 as float32, where every product of two of them is exact."""
    return tuple(t.float() if t.dtype in NARROW else t for t in tensors)


def like_input(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A layer's parameters, cast as torch.autocast casts them for a narrow input."""
    if x.dtype not in NARROW:
        return weight, bias
    return weight.to(x.dtype), None if bias is None else bias.to(x.dtype)


@cache
def multiplies_narrow(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device multiplies such matrices to float32 results, as accelerators do fast."""
    if device.type == "cpu":
        return False
    ones = torch.ones(2, 16, 16, dtype=dtype, device=device)
    # with gaps, as `batch_invariant.matrices` has
    room = torch.zeros(2, 17, 16, device=device, dtype=torch.float32)[:, :16]
    try:
        torch.bmm(ones, ones, out_dtype=torch.float32, out=room)
    except torch.OutOfMemoryError:
        raise  # says nothing of what the device can do
    except (NotImplementedError, RuntimeError):
        return False
    return bool((room == 16).all())


def kinds_of_device() -> list[str]:
    """The kinds of device in use: "cpu", "cuda", and PyTorch's accelerator, if it is another."""
    accelerator = torch.accelerator.current_accelerator()
    return list(dict.fromkeys(["cpu", "cuda", *([accelerator.type] if accelerator else [])]))


def devices_under_autocast() -> list[str]:
    """The kinds of device in use that torch.autocast is on for."""
    if not autocast_is_on():
        return []
    return [device for device in kinds_of_device() if torch.is_autocast_enabled(device)]


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Keep torch.autocast out, where it is on."""
    on = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else AS_IT_IS


def in_full(names: Sequence[tuple[str, str]]) -> ExitStack:
    """Let these of `MAY_ROUND` compute in float32 what is float32, until it is closed.

    PyTorch's older switches say the same meanwhile: it refuses to read one that newer ones differ
    from, as `torch.backends.cudnn.flags` does in models.
    """
    restored = ExitStack()
    for name in MAY_ROUND:
        backend = backend_of(name)
        restored.callback(setattr, backend, "fp32_precision", backend.fp32_precision)
    for read, switch, exact in [OLDER[kind] for kind in {kind for _, kind in names} & {*OLDER}]:
        try:
            before = read()
        except RuntimeError:  # the user's newer switches differ from it already
            continue
        if before != exact:
            restored.callback(switch, before)  # first of all, as it changes newer ones
            switch(exact)
    for name in names:
        backend_of(name).fp32_precision = "ieee"
    return restored


def backend_of(name: tuple[str, str]) -> Any:
    return getattr(getattr(torch.backends, name[0]), name[1])


def no_tf32() -> ExitStack:
    """Keep all operations from TF32, where they use it: what is compared must be told from it.

    PyTorch's convolutions and recurrent layers use it on GPUs unless they are told not to, and then
    no record's gradient is what it is alone, by a thousandth of it.
    """
    return in_full([name for name in MAY_ROUND if backend_of(name).fp32_precision not in EXACT])


def exact_arithmetic() -> AbstractContextManager[object]:
    """Keep products as precise as the theorem in `products` assumes: no TF32 and no autocast."""
    rounding = [
        (name, "matmul") for name in ("cuda", "mkldnn") if matmul_precision(name) not in EXACT
    ]
    narrow = devices_under_autocast()
    if not rounding and not narrow:
        return AS_IT_IS
    restored = in_full(rounding)
    for device in narrow:
        restored.enter_context(torch.autocast(device, enabled=False))
    return restored
