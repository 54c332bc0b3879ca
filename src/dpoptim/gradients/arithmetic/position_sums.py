"""Sums over a record's positions: gradients of biases, and of normalisations' weights.

`position_sums.c` reads what is added up once, and writes nothing but the sums; records are dealt to
threads. Without it PyTorch's operations do the same, a few records at a time, with other last
bits.

**Guarantee.** A record's sums are functions of its own rows, to the last bit, whoever else is in
the batch and on however many threads: its positions are added in their order, in blocks of one
size.
"""

import struct
from functools import cache

import torch
from torch import Tensor

from dpoptim.gradients.arithmetic import positions_there
from dpoptim.gradients.arithmetic.precision import computed_in, widened
from dpoptim.gradients.choose_formula import MEMORY_CAP
from dpoptim.gradients.per_sample import native
from dpoptim.runtime.compiled import library
from dpoptim.runtime.compiled_work import A_NUMBER, Piece, Task, run_in_turn

IN_CACHE = 1 << 17  # elements of a temporary
ROWS = struct.Struct("=14q")  # `Rows` of `position_sums.c`


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
    if positions_there.serves(g):
        return positions_there.sums_of([g])
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
    if positions_there.serves(g, x):
        return positions_there.normalised_sums(x, mean, scale, g)
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
    (records, positions, columns), (piece, level) = g.shape, adds_up()
    g, x = _row_by_row(g), None if x is None else _row_by_row(x)
    mean, scale = (None if each is None else each.contiguous() for each in (mean, scale))
    sums = torch.zeros(2, records, columns, dtype=torch.float32, device="cpu")
    places = [0 if each is None else each.data_ptr() for each in (mean, scale)]
    given = ROWS.pack(
        *(records, positions, columns, g.data_ptr(), g.stride(0), g.stride(1)),
        *((0, 0, 0) if x is None else (x.data_ptr(), x.stride(0), x.stride(1))),
        *(*places, sums[0].data_ptr(), sums[1].data_ptr(), level),
    )
    work = A_NUMBER * g.numel() * (1 if x is None else 2)
    run_in_turn(given, [Task(piece, work, 2 * columns)])
    return sums[1], sums[0]


def _row_by_row(x: Tensor) -> Tensor:
    """(B, T, p) with columns side by side, and their signs with them, unlike a conjugate's."""
    return x.resolve_neg() if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()
