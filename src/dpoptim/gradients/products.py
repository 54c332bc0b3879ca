"""Weighted sums over records whose rounding error is bounded, so that clipping bounds what is really computed.

Clipping promises that one record moves the sum by at most C. Arithmetic in float32 breaks the promise: adding a record
changes how every other record's term is rounded, and those errors grow with the batch (9,194 bounded records, added in
order, moved by 1.49 C). So records are clipped to ``C (1 - margin)``, and the sums here move by rounding by at most
``margin * C``.

**Theorem.** Let u be the unit roundoff of the books' dtype, B at least the number of records in a logical batch, and
let record i enter layer l as a sum of products with factor c_i. Write N_i for the norm of record i's gradient and
A_i >= N_i for its *mass*: the norm that its gradient would have if nothing cancelled inside it. Suppose that

    c_i N_i <= C (1 - margin)    and    c_i A_i <= r C,

where r = 1 for layers whose per-record gradients are stored before they are summed (there A_i = N_i), and
r = CANCELLATION_LIMIT for the others. If every product sums at most ``k = margin / (3 u B r) - 4`` rows before its
result is added in float64, then the computed sums of any two batches that differ in one record differ by at most C.

*Proof.* A product of at most k rows has, in whatever order it is summed, the error gamma_{k+2} times the sum of the
absolute values of its terms (Higham 2002, section 3.1; the two extra roundings are those of c_i and of c_i g_i).
Adding the results in float64 costs less than one more u (fewer than 2^28 results). Over a layer's chunks the error's
norm is at most (k + 4) u sum_i c_i A_il, so over all layers, stored (S) and not (R), at most

    sum_i c_i sqrt((k_S + 4)^2 u^2 A_iS^2 + (k_R + 4)^2 u^2 A_iR^2)
        <= margin / (3 B) * sum_i sqrt(C^2 + C^2)   <=   0.48 margin C,

because c_i A_iS <= C and c_i A_iR <= r C. Both worlds may err in opposite directions: 0.96 margin C. The exact sums
differ by at most C (1 - margin).  QED. (tests/privacy/test_clipped_sum_sensitivity.py tries to falsify it.)

What this does not cover, and no per-sample clipping in floating point can: that the *forward pass* rounds record j
differently in the company of record i.
"""

import torch
from torch import Tensor

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
CANCELLATION_LIMIT = 32.0  # r of the theorem: random signs over 1,024 positions reach it
SHORTEST_CHUNK = 16  # below this a float64 product is faster than many short float32 ones
FLOAT64_ROWS = 1024  # rows converted to float64 at a time: they stay in cache
BATCHED_ELEMENTS = 1 << 21  # results of a batched product that are held at once


def margin(dtype: torch.dtype, capacity: int) -> float:
    """Share of the clip norm that is given up so that rounding cannot exceed it.

    Args:
        dtype: dtype of the books (float32 or float64).
        capacity: B of the theorem, records in a logical batch, at least 1.

    Returns:
        2^-8 for float32; for float64 2^-20, growing as capacity * 2^-32 beyond 4,096 records.
    """
    if dtype == torch.float32:
        return 2.0**-8
    return max(2.0**-20, capacity * 2.0**-32)


def chunk_rows(dtype: torch.dtype, capacity: int, cancellation: float) -> int:
    """Rows that one product may sum (k of the theorem); 0 where only a float64 product will do."""
    rows = int(margin(dtype, capacity) / (3 * UNIT_ROUNDOFF[dtype] * capacity * cancellation)) - 4
    if dtype == torch.float64:
        return max(rows // 2, 1)  # the other half of the allowance is for adding the results, here with the same u
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
