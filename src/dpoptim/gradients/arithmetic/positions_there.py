"""Sums over a record's positions where Triton compiles: of many layers in one call.

PyTorch's operations take a call for each layer and factor, and write what they multiply.

**Guarantee.** As of `position_sums`: positions are added in blocks of one size, in an order that
depends on how many there are alone.
"""

import importlib.util
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpoptim.gradients.arithmetic.precision import NARROW

BLOCK_T, BLOCK_N = 32, 64  # positions and columns that a program takes at a time
KINDS = ("cuda", "xpu")  # of device that Triton compiles for; ROCm's are "cuda", too


def serves(*tensors: Tensor) -> bool:
    """Whether such numbers, (B, T, n), are summed by the kernels."""
    return all(
        each.device.type in KINDS
        and (each.dtype == torch.float32 or each.dtype in NARROW)
        and each.stride(2) == 1
        and not each.is_neg()
        and compiles_on(each.device, each.dtype)
        for each in tensors
    )


def sums_of(several: Sequence[Tensor]) -> Tensor:
    """Sums of tensors (B, T, n) over T, side by side: float32, (B, the sum of n).

    Args:
        several: of one dtype, on one device.
    """
    first, device = several[0], several[0].device
    widths = [each.shape[2] for each in several]
    blocks = tuple(-(-width // BLOCK_N) for width in widths)
    out = torch.empty(len(first), sum(widths), dtype=torch.float32, device=device)
    if not out.numel():
        return out
    starts = zip(several, firsts(widths), firsts(blocks), strict=True)
    table = upload(
        [[x.data_ptr(), *x.shape[1:], *x.stride()[:2], *at] for x, *at in starts], device
    )
    with on_device_of(first):
        kernels().sum_many[(sum(blocks) * len(first),)](
            *(table, owners(blocks, device), out, first[:0], out.shape[1], sum(blocks)),
            **{"BLOCK_T": BLOCK_T, "BLOCK_N": BLOCK_N},
        )
    return out


def normalised_sums(
    x: Tensor, mean: Tensor | None, scale: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Sums over T of ``(x - mean) * scale * g`` and of g: float32, (B, n); no mean: zero."""
    records, T, n = g.shape
    of_x, of_g = (torch.empty(records, n, dtype=torch.float32, device=g.device) for _ in range(2))
    if not of_g.numel():
        return of_x, of_g
    scale = scale.contiguous()
    centre = scale if mean is None else mean.contiguous()
    with on_device_of(g):
        kernels().sum_normalised[(-(-n // BLOCK_N) * records,)](
            *(x, centre, scale, g, of_x, of_g, T, n, *x.stride()[:2], *g.stride()[:2]),
            **{"CENTRED": mean is not None, "BLOCK_T": BLOCK_T, "BLOCK_N": BLOCK_N},
        )
    return of_x, of_g


@cache
def compiles_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton is there, compiles the kernels for the device, and they are right there."""
    if importlib.util.find_spec("triton") is None:
        return False
    g = (torch.arange(2 * 40 * 70, device=device) % 7).to(dtype).view(2, 40, 70)
    mean = torch.ones(2, 40, device=device)
    exact = g.double().sum(1)
    expected = [torch.cat([exact, exact], 1), 2 * g.double().square().sum(1), exact]
    try:
        found = [sums_of([g, g]), *normalised_sums(g.float() + 1, mean, mean + 1, g)]
        right = all(torch.equal(a.double(), b) for a, b in zip(found, expected, strict=True))
        reason = "they compute something else"
    except torch.OutOfMemoryError:
        raise  # says nothing of what the device can do
    except Exception as error:  # compilers and drivers raise their own kinds
        right, reason = False, f"{type(error).__name__}: {str(error)[:300]}"
    if right:
        return True
    warnings.warn(
        f"sums over positions on {device} are formed by PyTorch's operations, which takes longer: "
        f"Triton's kernels failed there for {dtype} ({reason}).",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def upload(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """A table of whole numbers on a device: int64; nothing waits for it."""
    table = torch.from_numpy(np.array(rows, dtype=np.int64))
    pinned = device.type == "cuda"
    return (table.pin_memory() if pinned else table).to(device, non_blocking=pinned)


@lru_cache(maxsize=1024)
def owners(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Which layer each tile or block belongs to, where layers have so many: int32."""
    return torch.from_numpy(np.repeat(np.arange(len(counts), dtype=np.int32), counts)).to(device)


def firsts(counts: Sequence[int]) -> list[int]:
    """Where each layer's tiles or blocks begin."""
    return [0, *np.cumsum(counts)[:-1].tolist()] if len(counts) else []


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """A kernel runs on the current device, whatever its tensors lie on."""
    return torch.get_device_module(x.device).device(x.device)


@cache
def kernels() -> Any:
    """The compiled kernels; Triton takes a moment to import."""
    from dpoptim.gradients.arithmetic import position_kernels

    return position_kernels
