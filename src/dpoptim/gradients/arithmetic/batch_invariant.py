"""Operations that round a record's numbers the same way in any place, and beside any others.

What cancels inside a record leaves rounding, and clipping makes that as long as the clip norm. So
a kernel that adds in another order, because the record lies elsewhere in memory or because there
are more or fewer of them, would let one record turn what all others add: conditions 2 and 3 of the
theorem in `products` are about that. Kernels are the vendor's: tested, not proved. With a fixed
shape (`slots`) nothing in here is needed; without one, each of these holds the bound, as was seen
by leaving it out (how far one record then moves the sum, in clip norms):

* Matrices start on 64-byte boundaries, for every record, and lie row by row: what an
  elementwise operation returns may lie otherwise for one record than for two (1.3). That holds of
  large ones, too: on Intel's processors MKL adds up sums of a thousand terms by their layout.
* Few records are filled up with zeros: threads divide few matrices among them, but take many
  one by one (1.35 from two threads on). And several threads take a single sum in two passes, from
  32,768 entries on (2).
* Sums over positions want one record after the other in memory: else kernels run across records
  (2.5).
* Convolutions take a fixed number of records at once (`layers.convolution`; 1.2).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dpoptim.gradients.arithmetic.multiplication import plain
from dpoptim.gradients.arithmetic.position_sums import sum_positions
from dpoptim.gradients.arithmetic.precision import NARROW, widened
from dpoptim.runtime.worker_threads import worker_threads

ALIGNMENT = 64  # bytes; kernels do the same on operands that start on such boundaries
FEW = 32  # rows or columns up to which layouts are left to kernels


def aligned(x: Tensor) -> Tensor:
    """``x``, or a copy of it that starts on a 64-byte boundary."""
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def matrices(records: int, rows: int, columns: int, like: Tensor) -> Tensor:
    """Room for a (rows, columns) matrix of each record, each on a 64-byte boundary."""
    step = ALIGNMENT // like.element_size()
    stride = -(-rows * columns // step) * step
    room = like.new_empty(records * stride)
    return room.as_strided((records, rows, columns), (stride, columns, 1))


def fewest_records(x: Tensor) -> int:
    """Records from which threads take matrices one by one: a third of the threads, at least two."""
    return max(2, torch.get_num_threads() // 2) if x.device.type == "cpu" else 2


def aligned_records(x: Tensor, *, together: int | None = None) -> Tensor:
    """``x`` (B, T, d) row by row, maybe copied: each record on a 64-byte boundary, zeros added.

    Args:
        together: how many records come at once, unless they are the last ones; None: as many as
            there are.
    """
    size = x.element_size()
    records = max(len(x), min(together or fewest_records(x), fewest_records(x)))
    if (
        records == len(x)
        and are_dense_rows(x)
        and x.data_ptr() % ALIGNMENT == 0
        and (len(x) == 1 or x.stride(0) * size % ALIGNMENT == 0)
    ):
        return x
    room = matrices(records, x.shape[1], x.shape[2], like=x)
    room[: len(x)] = x
    room[len(x) :] = 0
    return room


def row_by_row(x: Tensor) -> Tensor:
    """``x``, or a dense copy where records (T, d) lie transposed, as under a loss of (B, d, T).

    Copied one by one, which takes a fifth of the time of copying all at once; PyTorch copies such a
    matrix on one thread, so each thread copies records of its own.
    """
    lies_transposed = x.dim() == 3 and not are_dense_rows(x) and are_dense_rows(x.transpose(1, 2))
    if not (lies_transposed and plain(x) and x.is_cpu and min(x.shape[1:]) > FEW):
        return x
    copy = torch.empty_like(x, memory_format=torch.contiguous_format)
    with worker_threads(torch.get_num_threads()) as run:
        run([partial(out.copy_, record) for record, out in zip(x, copy, strict=True)])
    return copy


def are_dense_rows(x: Tensor) -> bool:
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


def with_dense_rows(x: Tensor) -> Tensor:
    """``x``, or a copy of it, whose numbers lie side by side along the last axis."""
    return x if x.stride(-1) == 1 else x.contiguous()


def record_products(
    g: Tensor, a: Tensor, out: Tensor | None = None, *, together: int | None = None
) -> Tensor:
    """``sum_t outer(g[i, t], a[i, t])`` of each record: (B, T, p) and (B, T, d) -> (B, p, d).

    Args:
        g, a: float32 or float64; or narrower, for a float32 result, where `multiplies_narrow`.
        out: `matrices` for the result.
        together: as for `aligned_records`.
    """
    dtype = torch.float32 if g.dtype in NARROW else g.dtype
    records = len(g)
    g, a = (aligned_records(x, together=together) for x in (g, a))
    like = g.new_empty(0, dtype=dtype)
    room = (
        matrices(len(g), g.shape[2], a.shape[2], like=like)
        if out is None or len(g) > records
        else out
    )
    if dtype == g.dtype:
        torch.bmm(g.transpose(1, 2), a, out=room)
    else:
        torch.bmm(g.transpose(1, 2), a, out_dtype=dtype, out=room)
    products = room[:records]
    return products if out is None or room is out else out.copy_(products)


def record_matrix(x: Tensor) -> Tensor:
    """One record's ``x`` (T, d) row by row on a 64-byte boundary; see `aligned_records`."""
    if 1 in x.shape:
        x = x.reshape(-1).view(x.shape)  # strides of such axes may be anything
    return aligned(x.contiguous())


def record_matrices(x: Tensor) -> Callable[[int], Tensor]:
    """Look-up of `record_matrix` by record, of ``x`` (B, T, d), widened."""
    records = x.unbind()
    starts = x.data_ptr(), x.stride(0) * x.element_size()
    aligned_as_it_is = all(start % ALIGNMENT == 0 for start in starts)
    if x.dtype not in NARROW and x.is_contiguous() and 1 not in x.shape and aligned_as_it_is:
        return records.__getitem__

    def one(record: int) -> Tensor:
        return record_matrix(*widened([records[record]]))

    return one


def gram(x: Tensor, y: Tensor) -> Tensor:
    """``x[i] @ y[i].T`` of `aligned_records`: (B, s, d), (B, t, d) -> aligned (B, s, t)."""
    return torch.bmm(x, y.transpose(1, 2), out=matrices(len(x), x.shape[1], y.shape[1], like=x))


def sum_over(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Sum (B, ...) over axes after the first, which stay, with size 1."""
    kept = [axis for axis in range(1, x.dim()) if axis not in axes]
    positions, columns = (math.prod(x.shape[axis] for axis in some) for some in (axes, kept))
    sums = sum_positions(x.permute(0, *axes, *kept).reshape(len(x), positions, columns))
    return sums.view(len(x), *(1 if axis in axes else x.shape[axis] for axis in range(1, x.dim())))
