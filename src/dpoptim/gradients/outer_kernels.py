"""Triton kernels of `fused_outer`: every record's gradient a tile at a time, in registers.

Import it where `fused_outer.serves`: Triton is no requirement.
"""

import triton
import triton.language as tl


@triton.jit
def gradient_tile(
    g,
    a,
    record,
    tile,
    rows,
    columns,
    T,
    p,
    d,
    index,
    values,
    edges,
    lookups,
    edges_per_record,
    LOOKED_UP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``sum_t outer(g[record, t], a[record, t])`` in these rows and columns: float32.

    Where a table is looked up, too, the gradients of its rows are added, in the order of `index`.
    """
    steps = tl.arange(0, BLOCK_T)
    g += record * T * p
    a += record * T * d
    found = tl.zeros((BLOCK_P, BLOCK_D), dtype=tl.float32)
    for start in range(0, T, BLOCK_T):
        t = start + steps
        there = (t < T)[:, None]
        left = tl.load(
            g + t[:, None] * p + rows[None, :], mask=there & (rows < p)[None, :], other=0.0
        )
        right = tl.load(
            a + t[:, None] * d + columns[None, :], mask=there & (columns < d)[None, :], other=0.0
        )
        found = tl.dot(tl.trans(left), right, found, input_precision=PRECISION)
    if LOOKED_UP:
        first = tl.load(edges + record * edges_per_record + tile)
        last = tl.load(edges + record * edges_per_record + tile + 1)
        base = record * lookups
        for k in range(first, last):
            row = tl.load(index + base + k)
            value = tl.load(values + (base + k) * d + columns, mask=columns < d, other=0.0)
            found += tl.where(rows[:, None] == row, value[None, :], 0.0)
    return found


@triton.jit(do_not_specialize=["measuring", "begin", "end", "share"])
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
    """Take ``share`` records of begin to end, in one tile of their gradients.

    Measuring: write the squared norm of each record's tile, float64, to ``squares`` (B, tiles).
    Otherwise write ``sum_i weights[i] * gradient[i]`` to ``total`` (shares, p, d). It is one
    compiled function that does both, so that it is the same numbers that are measured and added.
    """
    across = tl.cdiv(d, BLOCK_D)
    tiles = tl.cdiv(p, BLOCK_P) * across
    number = tl.program_id(0)
    tile, turn = number % tiles, number // tiles
    rows = (tile // across) * BLOCK_P + tl.arange(0, BLOCK_P)
    columns = (tile % across) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = begin + turn * share
    last = tl.minimum(first + share, end)
    sums = tl.zeros((BLOCK_P, BLOCK_D), dtype=tl.float32)
    for each in range(first, last):
        record = each + tl.program_id(0).to(tl.int64) * 0  # as 64 bits, which products may need
        found = gradient_tile(
            g,
            a,
            record,
            tile // across,
            rows,
            columns,
            T,
            p,
            d,
            index,
            values,
            edges,
            lookups,
            tl.cdiv(p, BLOCK_P) + 1,
            LOOKED_UP,
            BLOCK_T,
            BLOCK_P,
            BLOCK_D,
            PRECISION,
        )
        if measuring != 0:
            exact = found.to(tl.float64)
            tl.store(squares + record * tiles + tile, tl.sum(exact * exact))
        else:
            weight = tl.load(weights + record)
            sums += tl.where(weight == 0, 0.0, weight * found)  # of what is not finite, too
    if measuring == 0:
        inside = (rows < p)[:, None] & (columns < d)[None, :]
        place = turn.to(tl.int64) * p * d + rows.to(tl.int64)[:, None] * d + columns[None, :]
        tl.store(total + place, sums, mask=inside)
