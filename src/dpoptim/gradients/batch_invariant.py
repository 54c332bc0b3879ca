"""Operations that round a record's numbers the same way in any place, and beside any others.

What cancels inside a record leaves rounding, and clipping makes that as long as the clip norm. So
a kernel that adds in another order, because the record lies elsewhere in memory or because there
are more or fewer of them, would let one record turn what all others add: conditions 2 and 3 of the
theorem in `products` are about that. Kernels are the vendor's: tested, not proved. With a fixed
shape (`training.slots`) nothing in here is needed; without one, each of these holds the bound, as
was seen by leaving it out (how far one record then moves the sum, in clip norms):

* Matrices start on 64-byte boundaries, for every record, and lie row by row: what an
  elementwise operation returns may lie otherwise for one record than for two. Of matrices with
  many rows and columns kernels make copies of their own, so their layout does not matter (1.3).
* Few records are filled up with zeros: threads divide few matrices among them, but take many
  one by one (1.35 from two threads on). And several threads take a single sum in two passes, from
  32,768 entries on (2).
* Sums over positions want one record after the other in memory: else kernels run across records
  (2.5).
* Convolutions take a fixed number of records at once (`layers.convolution`; 1.2).
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dpoptim.gradients.arithmetic import NARROW, widened

ALIGNMENT = 64  # bytes; kernels do the same on operands that start on such boundaries
LARGE, WHOLE = 32, 16  # see `large`


def large(positions: int, *columns: int) -> bool:
    """Whether float32 products do not depend on their operands' layout.

    Not below `LARGE` rows or columns (they did up to 8, and up to 72 with several threads where
    columns do not fill whole vectors).
    """
    return min(positions, *columns) >= LARGE and all(each % WHOLE == 0 for each in columns)


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


def aligned_records(x: Tensor, *, together: int | None = None, freely: bool = False) -> Tensor:
    """``x`` (B, T, d) row by row, maybe copied: each record on a 64-byte boundary, zeros added.

    Args:
        together: how many records come at once, unless they are the last ones; None: as many as
            there are.
        freely: whether it and all that it is multiplied with is `large`, so that dense transposed
            records (what a loss of logits in shape (B, classes, T) sends back) may stay so in
            float32.
    """
    turned = x.transpose(1, 2)
    apart = x.stride(0) >= x.shape[1] * x.shape[2]  # strides tell it of a single record, too
    if freely and x.dtype == torch.float32 and not rows_dense(x) and rows_dense(turned) and apart:
        return aligned_records(turned, together=together).transpose(1, 2)
    size = x.element_size()
    records = max(len(x), min(together or fewest_records(x), fewest_records(x)))
    if (
        records == len(x)
        and rows_dense(x)
        and x.data_ptr() % ALIGNMENT == 0
        and (len(x) == 1 or x.stride(0) * size % ALIGNMENT == 0)
    ):
        return x
    room = matrices(records, x.shape[1], x.shape[2], like=x)
    room[: len(x)] = x
    room[len(x) :] = 0
    return room


def rows_dense(x: Tensor) -> bool:
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


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
    freely = large(g.shape[1], g.shape[2], a.shape[2])
    g, a = (aligned_records(x, together=together, freely=freely) for x in (g, a))
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


def record_matrix(x: Tensor, *, freely: bool) -> Tensor:
    """One record's ``x`` (T, d) row by row on a 64-byte boundary; see `aligned_records`."""
    if 1 in x.shape:
        x = x.reshape(-1).view(x.shape)  # strides of such axes may be anything
    dense = x.is_contiguous() or (freely and x.dtype == torch.float32 and x.T.is_contiguous())
    return aligned(x if dense else x.contiguous())


def record_matrices(x: Tensor, *, freely: bool) -> Callable[[int], Tensor]:
    """Look-up of `record_matrix` by record, of ``x`` (B, T, d), widened."""
    records = x.unbind()
    starts = x.data_ptr(), x.stride(0) * x.element_size()
    aligned_as_it_is = all(start % ALIGNMENT == 0 for start in starts)
    if x.dtype not in NARROW and x.is_contiguous() and 1 not in x.shape and aligned_as_it_is:
        return records.__getitem__

    def one(record: int) -> Tensor:
        return record_matrix(*widened([records[record]]), freely=freely)

    return one


def gram(x: Tensor, y: Tensor) -> Tensor:
    """``x[i] @ y[i].T`` of `aligned_records`: (B, s, d), (B, t, d) -> aligned (B, s, t)."""
    return torch.bmm(x, y.transpose(1, 2), out=matrices(len(x), x.shape[1], y.shape[1], like=x))


def never_alone(x: Tensor) -> Tensor:
    """Lay the records of ``x`` (B, ...) one after the other in memory.

    A single one gets a second of zeros, which kernels would add up otherwise.
    """
    x = x.contiguous()
    return torch.cat([x, torch.zeros_like(x)]) if len(x) == 1 else x


def sum_positions(x: Tensor) -> Tensor:
    """Sum (B, T, p) over T: shape (B, p)."""
    return never_alone(x).sum(1)[: len(x)]


def sum_over(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Sum (B, ...) over axes after the first, which stay, with size 1."""
    kept = [axis for axis in range(1, x.dim()) if axis not in axes]
    positions, columns = (math.prod(x.shape[axis] for axis in some) for some in (axes, kept))
    sums = sum_positions(x.permute(0, *axes, *kept).reshape(len(x), positions, columns))
    return sums.view(len(x), *(1 if axis in axes else x.shape[axis] for axis in range(1, x.dim())))
