"""Triton kernels of `fused_outer`: every record's gradient a tile at a time, in registers.

Import it where `fused_outer.serves`: Triton is no requirement.
"""

import triton
import triton.language as tl


@triton.jit
def looked_up(found, index, values, edges, record, tile, tiles, rows, columns, d, lookups):
    """Add the gradients of looked-up rows of a table, in the order of `index`."""
    first = tl.load(edges + record * (tiles + 1) + tile)
    last = tl.load(edges + record * (tiles + 1) + tile + 1)
    base = record * lookups
    for k in range(first, last):
        row = tl.load(index + base + k)
        value = tl.load(values + (base + k) * d + columns, mask=columns < d, other=0.0)
        found += tl.where(rows[:, None] == row, value[None, :], 0.0)
    return found


@triton.jit(
    do_not_specialize=[
        *("measuring", "begin", "end", "share"),
        *("column", "across", "way", "records"),
    ]
)
def measure_or_add(
    g,
    a,
    weights,
    squares,
    total,
    index,
    values,
    edges,
    measuring,
    begin,
    end,
    share,
    column,
    across,
    way,
    records,
    T,
    p,
    d,
    lookups,
    LOOKED_UP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take ``share`` of the records from begin to end, in one tile of their gradients.

    Measuring: write the squared norm of each record's tile to ``squares`` (B, across), float64, in
    the columns from ``column`` on. Otherwise write ``sum_i weights[way, i] * gradient_i`` to
    ``total``, float32, (shares, p, d). One compiled function does both, so that it is the same
    numbers that are measured and added.

    Records and their positions are one loop, so that the next record is on its way from memory
    while the last is multiplied.
    """
    down, wide = tl.cdiv(p, BLOCK_P), tl.cdiv(d, BLOCK_D)
    number = tl.program_id(0)
    tile, turn = number % (down * wide), number // (down * wide)
    rows = (tile // wide) * BLOCK_P + tl.arange(0, BLOCK_P)
    columns = (tile % wide) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = begin + turn * share
    last = tl.minimum(first + share, end)
    steps = tl.cdiv(T, BLOCK_T)
    found = tl.zeros((BLOCK_P, BLOCK_D), dtype=tl.float32)
    sums = tl.zeros((BLOCK_P, BLOCK_D), dtype=tl.float32)
    nothing = tl.program_id(0).to(tl.int64) * 0  # makes numbers ones of 64 bits
    for step in range(0, (last - first) * steps):
        record = nothing + first + step // steps
        t = (step % steps) * BLOCK_T + tl.arange(0, BLOCK_T)
        there = (t < T)[:, None]
        left = tl.load(
            g + record * T * p + t[:, None] * p + rows[None, :],
            mask=there & (rows < p)[None, :],
            other=0.0,
        )
        right = tl.load(
            a + record * T * d + t[:, None] * d + columns[None, :],
            mask=there & (columns < d)[None, :],
            other=0.0,
        )
        found = tl.dot(tl.trans(left), right, found, input_precision=PRECISION)
        if step % steps == steps - 1:
            if LOOKED_UP:
                found = looked_up(
                    found,
                    index,
                    values,
                    edges,
                    record,
                    tile // wide,
                    down,
                    rows,
                    columns,
                    d,
                    lookups,
                )
            if measuring != 0:
                exact = found.to(tl.float64)
                tl.store(squares + record * across + column + tile, tl.sum(exact * exact))
            else:
                weight = tl.load(weights + way * records + record).to(tl.float32)
                sums += tl.where(weight == 0, 0.0, weight * found)  # also of what is not finite
            found = tl.zeros((BLOCK_P, BLOCK_D), dtype=tl.float32)
    if measuring == 0:
        inside = (rows < p)[:, None] & (columns < d)[None, :]
        place = (nothing + turn) * p * d + rows[:, None] * d + columns[None, :]
        tl.store(total + place, sums, mask=inside)
