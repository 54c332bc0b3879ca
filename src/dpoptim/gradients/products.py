"""Weighted sums over records whose rounding error is bounded, so that clipping bounds what is really computed.

Clipping promises that one record moves the sum by at most C. Arithmetic in float32 breaks the promise: adding a record
changes how every other record's term is rounded, and those errors grow with the batch (9,194 bounded records, added in
order, moved by 1.49 C). So records are clipped to ``C (1 - margin)``, and what rounding moves stays below ``margin C``.

**Theorem.** Let u be the unit roundoff of the books' dtype and B at least the number of records in a logical batch. Let
two batches differ in one record, and suppose that

1. every other record has the same rows in both, but for one common rounding of the loss's factor (1/B against
   1/(B + 1) in float32 moves all gradients together, by at most 4 u each);
2. each clip factor c_i and each stored gradient G_i is computed from record i's rows alone, with c_i |G_i| at most
   C (1 - margin);
3. every product sums at most ``k = 2^-8 / (3 u B) - 4`` rows before its result is added in float64.

Then the computed sums differ by at most C if ``margin >= 2^-8 + 4 u B``.

*Proof.* A product of at most k rows has, in whatever order it is summed, an error of at most gamma_{k+2} times the sum
of the absolute values of its terms (Higham 2002, section 3.1; the two extra roundings are those of c_i and of c_i g_i).
Its terms are the entries of the c_i G_i themselves, one row to a record, so nothing cancels inside a record. Adding the
results in float64 costs less than one more u (fewer than 2^28 results). So each world's sum errs by at most
``(k + 4) u sum_i c_i |G_i| <= (k + 4) u B C <= 2^-8 C / 3``, and both together by less than 2^-8 C. The common factor
moves the other records' sum by at most ``4 u B C``. The differing record itself adds at most C (1 - margin).  QED.
(tests/privacy/test_clipped_sum_sensitivity.py tries to falsify it.)

What this does not cover, and no per-sample clipping in floating point can: that forward and backward pass round
record j differently in the company of record i (other kernels for other batch sizes, other padding).
"""

import torch
from torch import Tensor

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
SUM_MARGIN = 2.0**-8  # of float32 sums
SHORTEST_CHUNK = 16  # below this a float64 product is faster than many short float32 ones
FLOAT64_ROWS = 1024  # rows converted to float64 at a time: they stay in cache
LARGE_RESULT = 1 << 14  # entries from which products are added one by one: adding costs less than starting them
BATCHED_ELEMENTS = 1 << 21  # results of a batched product that are held at once


def margin(dtype: torch.dtype, capacity: int) -> float:
    """Share of the clip norm that is given up so that rounding cannot exceed it.

    Args:
        dtype: dtype of the books (float32 or float64).
        capacity: B of the theorem, records in a logical batch, at least 1.

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


def chunk_rows(dtype: torch.dtype, capacity: int) -> int:
    """Rows that one product may sum (k of the theorem); 0 where only a float64 product will do."""
    if dtype == torch.float64:
        # Half of the allowance, since the results are added with the same u.
        return max(int(margin(dtype, capacity) / (6 * UNIT_ROUNDOFF[dtype] * capacity)) - 4, 1)
    rows = int(SUM_MARGIN / (3 * UNIT_ROUNDOFF[dtype] * capacity)) - 4
    return rows if rows >= SHORTEST_CHUNK else 0


def add_weighted_outer(total: Tensor, g: Tensor, a: Tensor, weights: Tensor, rows_per_product: int) -> None:
    """Add ``sum_r weights[r] * outer(g[r], a[r])`` to ``total`` in place.

    Args:
        total: float64, shape (p, d).
        g, a: the books' dtype, shapes (R, p) and (R, d); finite.
        weights: float64, shape (R,); zero where a row does not count.
        rows_per_product: from `chunk_rows`; 0 converts to float64 before multiplying.
    """
    if rows_per_product == 0 and g.dtype != torch.float64:
        for start in range(0, g.shape[0], FLOAT64_ROWS):
            rows = slice(start, start + FLOAT64_ROWS)
            total.addmm_((g[rows].double() * weights[rows, None]).T, a[rows].double())
        return
    scaled = g * weights.to(g.dtype)[:, None]
    if g.shape[0] <= rows_per_product:
        total.add_(scaled.T @ a)
        return
    if total.numel() > LARGE_RESULT:
        product = scaled.new_empty(total.shape)
        for left, right in zip(scaled.split(rows_per_product), a.split(rows_per_product), strict=True):
            total.add_(torch.mm(left.T, right, out=product))
        return
    whole = g.shape[0] // rows_per_product
    at_once = max(1, BATCHED_ELEMENTS // max(1, total.numel()))
    for first in range(0, whole, at_once):
        count = min(at_once, whole - first)
        rows = slice(first * rows_per_product, (first + count) * rows_per_product)
        left = scaled[rows].view(count, rows_per_product, -1)
        right = a[rows].reshape(count, rows_per_product, -1)
        products = torch.bmm(left.transpose(1, 2), right)
        total.add_(products[0] if count == 1 else products.sum(0, dtype=torch.float64))
    rest = slice(whole * rows_per_product, None)
    total.add_(scaled[rest].T @ a[rest])


def row_squared_norms(x: Tensor) -> Tensor:
    """Squared Euclidean norm of each record, accumulated in float64: shape (B, ...) -> (B,), float64.

    float32 would read long rows low (5e-3 at eight million entries) and overflow at 1e20; both break the bound.
    Records are taken in blocks that stay in cache, because a float64 copy of the whole would cost more than the sum.
    """
    rows = x.reshape(x.shape[0], -1) if x.dim() > 1 else x[:, None]
    block = max(1, (1 << 18) // max(1, rows.shape[1]))
    if rows.dtype == torch.float64:
        return torch.linalg.vecdot(rows, rows)
    if rows.shape[0] <= block:
        return rows.double().square_().sum(1)
    return torch.cat([part.double().square_().sum(1) for part in rows.split(block)])
