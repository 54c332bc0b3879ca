"""Squared norms of records, never read low, and what becomes of too long ones."""

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache

import torch
from torch import Tensor

from dpoptim.gradients.arithmetic.products import UNIT_ROUNDOFF

NORM_BLOCK = 32  # entries whose squares are added in float32
# the same where no factor is common to all records: faster, and read up to 3e-5 higher
LONG_BLOCK = 1024
SMALLEST_SQUARE = 2.0**-126  # what the square of one float32 entry may lose to underflow
# the same for float64, and a sum for which it might matter
SMALLEST_SQUARE_64, SMALLEST_SUM = 2.0**-1022, 2.0**-900
# squared norms that float32 can add up; others are added in float64
SAFE_SQUARES = (2.0**-60, 2.0**120)
RAISED_IN_FLOAT64 = 1 + 2.0**-30  # by what 2^22 additions can lose
TAPER_OCTAVES = 8
DIVIDED_SUM = 1 << 15  # numbers from which on threads divide sums among them (`batch_invariant`)


def row_squared_norms(x: Tensor, *, block: int = NORM_BLOCK) -> Tensor:
    """At least each record's squared norm, and hardly more: (B, ...) -> (B,), float64.

    float32 would read long rows low (5e-3 at eight million entries), and lose what is below 1e-19;
    both break the bound. So blocks of 32 squares are added in float32, blocks in float64, and the
    result is raised by the most that this can have lost: (N + 4) 2^-24 of the square for blocks of
    N entries, and 2^-126 for each entry. Records whose squares leave float32's range are measured
    in float64, so zero is zero, and only what is not finite has no finite norm.

    Args:
        block: N; a public constant. Under a mean it must be `NORM_BLOCK` (see `products`).
    """
    rows = x.flatten(1) if x.dim() > 1 else x[:, None]
    if rows.stride(1) != 1 or rows.stride(0) < rows.shape[1]:
        rows = rows.contiguous()  # else kernels would run across records (`batch_invariant`)
    if rows.dtype == torch.float64:
        squared = torch.linalg.vecdot(rows, rows)
        tiny = squared < SMALLEST_SUM
        if bool(tiny.any()):
            squared[tiny] += SMALLEST_SQUARE_64 * (rows[tiny] != 0).sum(1, dtype=torch.float64)
        return squared
    if not rows.is_cpu:  # bound by memory; and asking for extremes would wait for the device
        return in_float64(rows)
    squared = raised(in_blocks(rows, block), rows.shape[1], block)
    if len(squared) and not within_safe_squares(squared):
        measure_extremes(squared, rows)
    return squared


def squared_norms_together(
    several: Sequence[Tensor], *, block: int = NORM_BLOCK
) -> tuple[Sequence[Tensor], bool]:
    """`row_squared_norms` of several (B, entries), to the same bits, in fewer operations.

    Returns:
        Those of each, float64, (B,), and whether all are known to lie within `SAFE_SQUARES`.
    """
    usual = all(x.is_cpu and x.dtype == torch.float32 and x.is_contiguous() for x in several)
    if not usual or not several[0].shape[0]:
        return [row_squared_norms(x, block=block) for x in several], False
    entries = tuple(x.shape[1] for x in several)
    if max(entries) <= block:
        norms = torch.stack([torch.linalg.vector_norm(x, dim=1) for x in several])
        squared = norms.double().square_()
    else:
        squared = torch.stack([in_blocks(x, block) for x in several])
    factors, terms = most_lost_by_each(entries, block)
    tame = within_safe_squares(squared.mul_(factors).add_(terms))
    each = squared.unbind()
    if not tame:
        for one, rows in zip(each, several, strict=True):
            measure_extremes(one, rows)
    return each, tame


def within_safe_squares(squared: Tensor) -> bool:
    """Whether all lie within `SAFE_SQUARES`; not where one is NaN."""
    smallest, largest = squared.aminmax()
    return SAFE_SQUARES[0] < float(smallest) <= float(largest) < SAFE_SQUARES[1]


def measure_extremes(squared: Tensor, rows: Tensor) -> None:
    """Measure in float64 what float32 cannot, (B,), in place."""
    extreme = ~((squared > SAFE_SQUARES[0]) & (squared < SAFE_SQUARES[1]))
    squared[extreme] = in_float64(rows[extreme])


def blocks_in(entries: int, block: int) -> int:
    """How many norms `read_part` writes."""
    return -(-entries // block)


def read_part(part: Tensor, out: Tensor, *, block: int = NORM_BLOCK) -> None:
    """Write the norms of the blocks of dense float32 vectors on the CPU to ``out``.

    Args:
        part: (..., entries).
        out: float32, (..., `blocks_in`); for `squared_norms_of_parts`.
    """
    entries = part.shape[-1]
    whole = entries - entries % block
    if whole == entries:
        torch.linalg.vector_norm(part.unflatten(-1, (-1, block)), dim=-1, out=out)
        return
    if whole:
        blocks = part[..., :whole].unflatten(-1, (-1, block))
        torch.linalg.vector_norm(blocks, dim=-1, out=out[..., :-1])
    torch.linalg.vector_norm(part[..., whole:], dim=-1, out=out[..., -1])


def squared_norms_of_parts(
    parts: Sequence[Sequence[Tensor] | Tensor], read: Tensor, *, block: int = NORM_BLOCK
) -> Tensor:
    """`row_squared_norms` of some records whose numbers lie in several places: float64, (b,).

    Args:
        parts: each place's dense vectors of float32 on the CPU, one a record.
        read: what `read_part` wrote of them, one place after the other, as float64: (b, blocks).
    """
    squares = read.square()
    squared = (
        squares.sum(1)
        if squares.numel() < DIVIDED_SUM
        else torch.stack([each.sum(0) for each in squares])
    )
    # By as much for short parts, whatever other parts there are.
    raised(squared, max(block, sum(part[0].shape[0] for part in parts)), block)
    extreme = ~((squared > SAFE_SQUARES[0]) & (squared < SAFE_SQUARES[1]))  # also where it is NaN
    for record in extreme.nonzero().view(-1).tolist():
        squared[record] = torch.cat([in_float64(part[record][None]) for part in parts]).sum()
    return squared


def block_norms(rows: Tensor, block: int) -> Iterator[Tensor]:
    """Norms of the blocks of float32 rows (B, entries): (B, whole), and (B, 1) of a shorter end."""
    entries = rows.shape[1]
    whole = entries - entries % block
    if whole:
        yield torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, block)), dim=2)
    if whole < entries:
        yield torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True)


def in_blocks(rows: Tensor, block: int) -> Tensor:
    """Squared norms of dense float32 rows (B, entries), to be `raised`: float64, (B,)."""
    if rows.shape[1] <= block:
        return torch.linalg.vector_norm(rows, dim=1).double().square_()
    parts = [norms.double().square_().sum(1) for norms in block_norms(rows, block)]
    return parts[0] if len(parts) == 1 else parts[0].add_(parts[1])


def raised(squared: Tensor, entries: int, block: int) -> Tensor:
    """Raise what `in_blocks` read, in place, by the most that it may have lost."""
    factor, term = most_lost(entries, block)
    return squared.mul_(factor).add_(term)


@lru_cache(maxsize=1024)
def most_lost(entries: int, block: int) -> tuple[float, float]:
    """Factor and term that raise a squared norm by the most that `in_blocks` may have lost."""
    # A square, N - 1 additions of non-negative terms, and the root, which counts twice: each errs
    # by at most 2^-24.
    loss = (min(entries, block) + 4) * UNIT_ROUNDOFF[torch.float32]
    return 1 + loss, entries * SMALLEST_SQUARE


@cache
def most_lost_by_each(entries: Sequence[int], block: int) -> tuple[Tensor, Tensor]:
    """`most_lost` of rows of each of these lengths: two columns, (k, 1)."""
    of_each = [most_lost(each, block) for each in entries]
    factors, terms = torch.tensor(of_each, dtype=torch.float64, device="cpu").T.contiguous()
    return factors[:, None], terms[:, None]


def added_in_turn(parts: Sequence[Tensor]) -> Tensor:
    """The sum of vectors, one at least, in new memory.

    Each entry's terms are added in this order, wherever it lies: `torch.sum` over them adds those
    at a vector's end otherwise.
    """
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def in_float64(rows: Tensor) -> Tensor:
    """Squared norms of rows of float32, raised by what 2^22 additions in float64 can lose."""
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms.square_().mul_(RAISED_IN_FLOAT64)


def taper(squared_lengths: Tensor) -> Tensor:
    """Multiplier of clip factors: 1 for lengths up to 2^54, steadily down to 0 at 2^62.

    Lengths beyond cannot be told from infinite ones everywhere. Under a mean all of them are
    rounded with its factor, which depends on how many records there are: a threshold would let one
    record decide whether all others count.

    Args:
        squared_lengths: float64, not negative; NaN stays NaN.
    """
    return ((62.0 - squared_lengths.log2() / 2) / TAPER_OCTAVES).clamp(0.0, 1.0)
