"""Triton kernels of `position_sums`: sums over a record's positions.

Import it where that says so: Triton is no requirement. Nothing is known of sizes and addresses when
they are compiled, so that the same numbers are added in the same order wherever they lie.
"""

import triton
import triton.language as tl

COLUMNS = tl.constexpr(7)  # of the table of `sum_many`


@triton.jit
def rows_of(x, T, n, of_record, of_row, record, t, columns):
    """Some positions of a record, in float32, with zeros where there is nothing."""
    inside = (t < T)[:, None] & (columns < n)[None, :]
    place = record * of_record + t[:, None].to(tl.int64) * of_row + columns[None, :]
    return tl.load(x + place, inside, 0.0).to(tl.float32)


@triton.jit(do_not_specialize=["width", "blocks"])
def sum_many(table, owners, out, like, width, blocks, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sum several tensors (B, T, n) over T, to columns of ``out``, float32, (B, width).

    In so many blocks of columns.

    A row of the table is a tensor's address, T, n, numbers from one record to the next and from one
    position to the next, the first of its columns of ``out``, and the first block of its columns.
    """
    number = tl.program_id(0)
    block, record = number % blocks, tl.cast(number // blocks, tl.int64)
    row = table + tl.load(owners + block).to(tl.int64) * COLUMNS
    x = tl.load(row).to(tl.pointer_type(like.dtype.element_ty))
    T, n = tl.load(row + 1), tl.load(row + 2)
    of_record, of_row = tl.load(row + 3), tl.load(row + 4)
    columns = (block - tl.load(row + 6)) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for start in range(0, T, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        sums += rows_of(x, T, n, of_record, of_row, record, t, columns)
    place = record * width + tl.load(row + 5) + columns
    tl.store(out + place, tl.sum(sums, 0), columns < n)


@triton.jit(
    do_not_specialize=["T", "n", "x_of_record", "x_of_row", "g_of_record", "g_of_row"],
    do_not_specialize_on_alignment=["x", "mean", "scale", "g", "of_x", "of_g"],
)
def sum_normalised(
    x,
    mean,
    scale,
    g,
    of_x,
    of_g,
    T,
    n,
    x_of_record,
    x_of_row,
    g_of_record,
    g_of_row,
    CENTRED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sum ``(x - mean) * scale * g`` over T to ``of_x``, and g to ``of_g``: float32, (B, n).

    x and g: (B, T, n), with columns side by side; mean, read where CENTRED, and scale: (B, T),
    dense.
    """
    number, blocks = tl.program_id(0), tl.cdiv(n, BLOCK_N)
    record = tl.cast(number // blocks, tl.int64)
    columns = number % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    normalised = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for start in range(0, T, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        slope = rows_of(g, T, n, g_of_record, g_of_row, record, t, columns)
        value = rows_of(x, T, n, x_of_record, x_of_row, record, t, columns)
        if CENTRED:
            value -= tl.load(mean + record * T + t, t < T, 0.0)[:, None]
        sums += slope
        normalised += value * tl.load(scale + record * T + t, t < T, 0.0)[:, None] * slope
    tl.store(of_x + record * n + columns, tl.sum(normalised, 0), columns < n)
    tl.store(of_g + record * n + columns, tl.sum(sums, 0), columns < n)
