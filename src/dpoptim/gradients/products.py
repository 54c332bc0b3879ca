"""Weighted sums over records whose rounding error is bounded, so that clipping bounds what is really computed.

Clipping promises that one record moves the sum by at most C. Arithmetic in float32 breaks the promise: adding a record
changes how every other record's term is rounded, and those errors grow with the batch (9,194 bounded records, added in
order, moved by 1.49 C). So a batch is summed in *groups*: each group is one float32 product, and the groups' sums are
added in float64. A record's group is chosen without looking at the other records, so one record touches the rounding
of its own group only, and that error fits into a small margin: records are clipped to ``C (1 - margin)``.

**Theorem.** Let u be the unit roundoff of the books' dtype and B at least the number of records in a physical batch. Let
two batches differ in one record, and suppose that

1. every other record has the same rows in both, but for one common rounding of the loss's factor (1/B against
   1/(B + 1) in float32 moves all gradients together, by at most 4 u each);
2. each clip factor c_i and each stored gradient G_i is computed from record i's rows alone, with c_i |G_i| at most
   C (1 - margin);
3. every other record belongs to the same group in both, in the same order, and the product of a group is a function of
   its rows (they start on 64-byte boundaries, so that the kernel finds them aligned alike);
4. a float32 product sums at most k = `GROUP_ROWS` rows; larger groups are multiplied in float64.

Then the computed sums differ by at most C if ``margin >= 2^-8 + 4 u B``.

*Proof.* Groups without the record are equal in both. The product of a group of s <= k rows has, in whatever order it is
summed, an error of at most gamma_{s+2} times the sum of the absolute values of its terms (Higham 2002, section 3.1; the
two extra roundings are those of c_i and of c_i g_i). Its terms are the entries of the c_i G_i themselves, one row to a
record, so nothing cancels inside a record, and the error is at most (k + 2) u' k C with u' = u / (1 - (k + 2) u); in both
worlds together at most 2 (k + 2) u' k C < 0.96 * 2^-8 C for k = 176. Adding the groups in float64 costs a relative 2^-53
for each addition of at most B / k + 1, far below 4 u. The common factor moves the other records' sum by at most
``4 u B C``. The differing record itself adds at most C (1 - margin).  QED.
(tests/privacy/test_clipped_sum_sensitivity.py tries to falsify it.)

Under zero-out and replace-one, neighbours have equally many rows: consecutive groups of k rows satisfy condition 3. Under
add-or-remove-one a removed record shifts all that follow it, so there the sampler draws each record's group with a coin
of its own (`sampling.into_groups`); with the coins coupled, condition 3 holds.

What this does not cover, and no per-sample clipping in floating point can: that forward and backward pass round
record j differently in the company of record i (other kernels for other batch sizes, other padding).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
SUM_MARGIN = 2.0**-8  # of float32 sums
GROUP_ROWS = 176  # k of the theorem
FLOAT64_ROWS = 1024  # rows converted to float64 at a time: they stay in cache
ALIGNMENT = 64  # bytes
NORM_BLOCK = 1024  # entries whose squares are added in float32
SMALLEST_SQUARE = 2.0**-126  # what the square of one float32 entry may lose to underflow


def margin(dtype: torch.dtype, capacity: int) -> float:
    """Share of the clip norm that is given up so that rounding cannot exceed it.

    Args:
        dtype: dtype of the books (float32 or float64).
        capacity: B of the theorem, records in a physical batch, at least 1.

    Returns:
        2^-8 + capacity * 2^-22 for float32; for float64 2^-20, growing as capacity * 2^-32 beyond 4,096 records.

    Raises:
        ValueError: a float32 batch so large that rounding could eat most of the bound.
    """
    if dtype != torch.float32:
        return max(2.0**-20, capacity * 2.0**-32)
    share = SUM_MARGIN + 4 * UNIT_ROUNDOFF[dtype] * capacity
    if share > 0.5:
        raise ValueError(
            f"a batch of {capacity} records is too large to be summed in float32 with a proven bound. "
            "Fix: a smaller batch_size, or model.double()."
        )
    return share


def consecutive_groups(rows: int) -> list[int]:
    """Sizes of groups for neighbours that keep every other record in its place."""
    whole, rest = divmod(rows, GROUP_ROWS)
    return [GROUP_ROWS] * whole + [rest] * (rest > 0)


def slices(groups: Sequence[int]) -> Iterator[slice]:
    start = 0
    for rows in groups:
        yield slice(start, start + rows)
        start += rows


def aligned(x: Tensor) -> Tensor:
    """``x``, or a copy of it that starts on a 64-byte boundary."""
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def add_weighted_outer(total: Tensor, g: Tensor, a: Tensor, weights: Tensor, groups: Sequence[int]) -> None:
    """Add ``sum_r weights[r] * outer(g[r], a[r])`` to ``total`` in place.

    Args:
        total: float64, shape (p, d).
        g, a: the books' dtype, shapes (R, p) and (R, d); finite.
        weights: float64, shape (R,); zero where a row does not count.
        groups: sizes of the groups that the rows are summed in; they add up to R.
    """
    narrow = None if g.dtype == torch.float64 else weights.to(g.dtype)[:, None]
    for part in slices(groups):
        if narrow is not None and part.stop - part.start <= GROUP_ROWS:
            total.add_(torch.mm((g[part] * narrow[part]).T, aligned(a[part])))
            continue
        for start in range(part.start, part.stop, FLOAT64_ROWS):
            rows = slice(start, min(start + FLOAT64_ROWS, part.stop))
            total.addmm_((g[rows].double() * weights[rows, None]).T, a[rows].double())


def add_weighted_rows(total: Tensor, values: Tensor, weights: Tensor, groups: Sequence[int]) -> None:
    """Add ``sum_r weights[r] * values[r]`` to ``total`` in place: values of shape (R, N), total float64 of shape (N,)."""
    narrow = None if values.dtype == torch.float64 else weights.to(values.dtype)
    for part in slices(groups):
        if narrow is not None and part.stop - part.start <= GROUP_ROWS:
            total.add_(torch.mv(aligned(values[part]).T, narrow[part]))
            continue
        for start in range(part.start, part.stop, FLOAT64_ROWS):
            rows = slice(start, min(start + FLOAT64_ROWS, part.stop))
            total.addmv_(values[rows].double().T, weights[rows])


def row_squared_norms(x: Tensor) -> Tensor:
    """At least the squared Euclidean norm of each record, and hardly more: shape (B, ...) -> (B,), float64.

    float32 would read long rows low (5e-3 at eight million entries), and lose what is below 1e-19; both break the bound.
    So blocks of 1,024 squares are added in float32, blocks in float64, and the result is raised by the most that this
    can have lost: (N + 4) 2^-24 of the square for blocks of N entries, and 2^-126 for each entry. Beyond 1e19 the
    result is infinite.
    """
    rows = x.reshape(x.shape[0], -1) if x.dim() > 1 else x[:, None]
    if rows.dtype == torch.float64:
        return torch.linalg.vecdot(rows, rows)
    entries = rows.shape[1]
    if entries <= NORM_BLOCK:
        squared = torch.linalg.vector_norm(rows, dim=1).double().square_()
    else:
        whole = entries - entries % NORM_BLOCK
        blocks = torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, NORM_BLOCK)), dim=2)
        squared = blocks.double().square_().sum(1)
        if whole < entries:
            squared += torch.linalg.vector_norm(rows[:, whole:], dim=1).double().square_()
    # A square, N - 1 additions of non-negative terms, and the root, which counts twice: each errs by at most 2^-24.
    raised = 1 + (min(entries, NORM_BLOCK) + 4) * UNIT_ROUNDOFF[torch.float32]
    return squared.mul_(raised).add_(entries * SMALLEST_SQUARE)
