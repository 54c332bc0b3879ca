"""Sums over a record's positions where Triton compiles: of many layers in one call.

PyTorch's operations take a call for each layer and factor, and write what they multiply.

**Guarantee.** As of `position_sums`: positions are added in blocks of one size, in an order that
depends on how many there are alone.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dpoptim.gradients.arithmetic.precision import NARROW
from dpoptim.gradients.arithmetic.triton_calls import (
    KINDS,
    firsts,
    on_device_of,
    owners,
    tried_on,
    upload,
)

BLOCK_T, BLOCK_N = 32, 64  # positions and columns that a program takes at a time


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
    """Whether the kernels are there, and right, on a device: see `tried_on`."""

    def agree() -> bool:
        g = (torch.arange(2 * 40 * 70, device=device) % 7).to(dtype).view(2, 40, 70)
        mean = torch.ones(2, 40, device=device)
        exact = g.double().sum(1)
        expected = [torch.cat([exact, exact], 1), 2 * g.double().square().sum(1), exact]
        found = [sums_of([g, g]), *normalised_sums(g.float() + 1, mean, mean + 1, g)]
        return all(torch.equal(a.double(), b) for a, b in zip(found, expected, strict=True))

    return tried_on(device, dtype, agree, "sums over positions")


@cache
def kernels() -> Any:
    """The compiled kernels; Triton takes a moment to import."""
    from dpoptim.gradients.arithmetic import position_kernels

    return position_kernels
