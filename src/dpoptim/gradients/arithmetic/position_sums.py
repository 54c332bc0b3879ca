"""Sums over a record's positions: gradients of biases, and of normalisations' weights.

`position_sums.c` reads what is added up once, and writes nothing but the sums; records are dealt to
threads. Where Triton compiles, its kernels (`position_kernels`) sum many layers in one call, since
PyTorch's operations take a call for each layer and factor, and write what they multiply. Without
either PyTorch's operations do the same, a few records at a time, with other last bits.

**Guarantee.** A record's sums are functions of its own rows, to the last bit, whoever else is in
the batch and on however many threads: its positions are added in their order, in blocks of one
size, or, by Triton, in an order that depends on how many there are alone.
"""

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dpoptim.gradients.arithmetic.precision import NARROW, computed_in, widened
from dpoptim.gradients.arithmetic.triton_calls import (
    KINDS,
    firsts,
    on_device_of,
    owners,
    tried_on,
    upload,
)
from dpoptim.gradients.choose_formula import MEMORY_CAP
from dpoptim.gradients.per_sample import native
from dpoptim.runtime.compiled import library
from dpoptim.runtime.compiled_work import A_NUMBER, Piece, Task, run_in_turn

IN_CACHE = 1 << 17  # elements of a temporary
ROWS = struct.Struct("=14q")  # `Rows` of `position_sums.c`
NO_FACTORS = (0,) * 5  # addresses and strides of what g is multiplied with
BLOCK_T, BLOCK_N = 32, 64  # positions and columns that a program takes at a time


@cache
def adds_up() -> tuple[Piece, int]:
    """The compiled function, and the width of vectors that it may use, which changes no bit."""
    found = library()
    assert found is not None
    return Piece("dpoptim_sum_positions"), found.level


def sum_positions(g: Tensor) -> Tensor:
    """Sum (B, T, p) over T, narrow numbers in float32: shape (B, p)."""
    if g.is_cpu:
        (g,) = widened([g])
    if native.serves(g):
        _, sums = _compiled_sums(g)
        return sums
    if triton_serves(g):
        return sums_by_triton([g])
    return never_alone(g).sum(1, dtype=computed_in(g.dtype))[: len(g)]


def sum_normalised(
    x: Tensor, mean: Tensor | None, scale: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum ``(x - mean) * scale * g`` and g over T.

    Args:
        x, g: (B, T, p).
        mean, scale: (B, T); no mean: zero.

    Returns:
        Both sums, (B, p).
    """
    if all(native.serves(each) for each in (x, scale, g)):
        return _compiled_sums(g, x, mean, scale)
    if triton_serves(g, x):
        return normalised_by_triton(x, mean, scale, g)
    most = IN_CACHE if x.is_cpu else MEMORY_CAP
    step = max(1, most // max(1, x[0].numel())) if len(x) else 1
    parts = []
    for start in range(0, max(1, len(x)), step):  # temporaries beyond cache cost more than sums
        rows = slice(start, start + step)
        centred = x[rows] if mean is None else x[rows] - mean[rows, :, None]
        parts.append(sum_positions((centred * scale[rows, :, None]).mul_(g[rows])))
    return torch.cat(parts), sum_positions(g)


def never_alone(x: Tensor) -> Tensor:
    """Lay the records of ``x`` (B, ...) one after the other in memory.

    A single one gets a second of zeros, which kernels would add up otherwise.
    """
    x = x.contiguous()
    return torch.cat([x, torch.zeros_like(x)]) if len(x) == 1 else x


def _compiled_sums(
    g: Tensor, x: Tensor | None = None, mean: Tensor | None = None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    (records, _, columns), (piece, _) = g.shape, adds_up()
    g, x = _row_by_row(g), None if x is None else _row_by_row(x)
    mean, scale = (None if each is None else each.contiguous() for each in (mean, scale))
    sums = torch.zeros(2, records, columns, dtype=torch.float32, device="cpu")
    of_x = (0, 0, 0) if x is None else (x.data_ptr(), x.stride(0), x.stride(1))
    factors = (*of_x, *(0 if each is None else each.data_ptr() for each in (mean, scale)))
    work = A_NUMBER * g.numel() * (1 if x is None else 2)
    given = _packed(g, factors, sums[0], sums[1])
    run_in_turn(given, [Task(piece, work, 2 * columns)])
    return sums[1], sums[0]


def _packed(g: Tensor, factors: Sequence[int], sums: Tensor, scaled: Tensor | None) -> bytes:
    """Rows of g (B, T, n), and what is multiplied, as the compiled function reads them."""
    at = (g.data_ptr(), g.stride(0), g.stride(1))
    results = (sums.data_ptr(), 0 if scaled is None else scaled.data_ptr())
    return ROWS.pack(*g.shape, *at, *factors, *results, adds_up()[1])


def sums_side_by_side(several: Sequence[Tensor]) -> Tensor:
    """Sums of tensors (B, T, n) over T, side by side, in one call: (B, the sum of n).

    Args:
        several: of one dtype, on one device, as `served_together`.
    """
    if not native.serves(several[0]):
        return sums_by_triton(several)
    several, (piece, _) = [_row_by_row(g) for g in several], adds_up()
    sums = [torch.zeros(len(g), g.shape[2], dtype=torch.float32, device="cpu") for g in several]
    given = [_packed(g, NO_FACTORS, of, None) for g, of in zip(several, sums, strict=True)]
    tasks = [
        Task(piece, A_NUMBER * g.numel(), 2 * g.shape[2], at * ROWS.size)
        for at, g in enumerate(several)
    ]
    run_in_turn(b"".join(given), tasks)
    return torch.cat(sums, 1)


def served_together(g: Tensor) -> bool:
    """Whether such numbers, (B, T, n), of several layers are summed in one call."""
    return native.serves(g) or triton_serves(g)


def _row_by_row(x: Tensor) -> Tensor:
    """(B, T, p) with columns side by side, and their signs with them, unlike a conjugate's."""
    return x.resolve_neg() if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def triton_serves(*tensors: Tensor) -> bool:
    """Whether such numbers, (B, T, n), are summed by the kernels."""
    return all(
        each.device.type in KINDS
        and (each.dtype == torch.float32 or each.dtype in NARROW)
        and each.stride(2) == 1
        and not each.is_neg()
        and compiles_on(each.device, each.dtype)
        for each in tensors
    )


def sums_by_triton(several: Sequence[Tensor]) -> Tensor:
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


def normalised_by_triton(
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
        found = [sums_by_triton([g, g]), *normalised_by_triton(g.float() + 1, mean, mean + 1, g)]
        return all(torch.equal(a.double(), b) for a, b in zip(found, expected, strict=True))

    return tried_on(device, dtype, agree, "sums over positions")


@cache
def kernels() -> Any:
    """The compiled kernels; Triton takes a moment to import."""
    from dpoptim.gradients.arithmetic import position_kernels

    return position_kernels
