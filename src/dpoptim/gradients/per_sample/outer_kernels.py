"""Triton kernels of `fused_outer`: every record's gradient a tile at a time, in registers.

Import it where `fused_trial.serves`: Triton is no requirement.
"""

import triton
import triton.language as tl

ADD, MEASURE, BOTH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # kinds of work


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
        *("work", "begin", "end", "share"),
        *("column", "across", "way", "records"),
    ],
    # which is no reason to compile another function for one of the passes
    do_not_specialize_on_alignment=["weights", "squares"],
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
    wanted,
    work,
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
    row_of_g,
    row_of_a,
    lookups,
    LOOKED_UP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take ``share`` of the records from begin to end, in one tile of their gradients.

    To measure is to write the squared norm of each record's tile to ``squares`` (B, across),
    float64, in the columns from ``column`` on; to add, to write ``sum_i weights[way, i] *
    gradient_i`` to ``total``, float32, (shares, p, d); nothing is done unless it is ``wanted``. One
    compiled function does it all, so that it is the same numbers that are measured and added.

    Rows of g and a, of p and d numbers, begin every ``row_of_g`` and ``row_of_a``.

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
    go = tl.load(wanted)
    for step in range(0, (last - first) * steps * go):
        record = nothing + first + step // steps
        t = (step % steps) * BLOCK_T + tl.arange(0, BLOCK_T)
        there = (t < T)[:, None]
        left = tl.load(
            g + (record * T + t[:, None]) * row_of_g + rows[None, :],
            mask=there & (rows < p)[None, :],
            other=0.0,
        )
        right = tl.load(
            a + (record * T + t[:, None]) * row_of_a + columns[None, :],
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
            if work != ADD:
                exact = found.to(tl.float64)
                tl.store(squares + record * across + column + tile, tl.sum(exact * exact))
            if work != MEASURE:
                weight = tl.load(weights + way * records + record).to(tl.float32)
                sums += tl.where(weight == 0, 0.0, weight * found)  # also of what is not finite
            found = tl.zeros((BLOCK_P, BLOCK_D), dtype=tl.float32)
    if work != MEASURE:
        inside = (rows < p * go)[:, None] & (columns < d)[None, :]
        place = ((nothing + turn) * p + rows[:, None]) * d + columns[None, :]
        tl.store(total + place, sums, mask=inside)


@triton.jit
def dot_products(
    x,
    first,
    s,
    t,
    T,
    columns,
    row,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``x_s . x_t`` of a record's positions s and t, whose rows begin with number ``first``."""
    found = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
    for start in range(0, columns, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (k < columns)[None, :]
        left = tl.load(x + (first + s[:, None]) * row + k[None, :], (s < T)[:, None] & inside, 0.0)
        right = tl.load(x + (first + t[:, None]) * row + k[None, :], (t < T)[:, None] & inside, 0.0)
        found = tl.dot(left, tl.trans(right), found, input_precision=PRECISION)
    return found


@triton.jit
def gram_products(
    g,
    a,
    squares,
    lengths,
    T,
    p,
    d,
    row_of_g,
    row_of_a,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add up ``(g_s . g_t) (a_s . a_t)`` for two blocks of a record's positions.

    Writes the sum, twice it for different blocks, to ``squares``, and that of ``|g_t| |a_t|`` to
    ``lengths``: float64, (B, blocks, blocks), zero above the diagonal.
    """
    blocks = tl.cdiv(T, BLOCK_T)
    number = tl.program_id(0)
    record = (number // (blocks * blocks)).to(tl.int64)
    here, there = (number // blocks) % blocks, number % blocks
    s, t = here * BLOCK_T + tl.arange(0, BLOCK_T), there * BLOCK_T + tl.arange(0, BLOCK_T)
    first = record * T
    if there <= here:
        of_g = dot_products(g, first, s, t, T, p, row_of_g, BLOCK_T, BLOCK_K, PRECISION)
        of_a = dot_products(a, first, s, t, T, d, row_of_a, BLOCK_T, BLOCK_K, PRECISION)
    else:
        of_g = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
        of_a = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
    products = of_g.to(tl.float64) * of_a.to(tl.float64)
    own = tl.sum(tl.where(s[:, None] == t[None, :], products, 0.0), 1)
    tl.store(squares + number, tl.sum(products) * tl.where(here == there, 1, 2))
    tl.store(lengths + number, tl.sum(tl.sqrt(tl.maximum(own, 0.0))))


@triton.jit
def claim(squares, lengths, claims, parts, BLOCK: tl.constexpr):
    """Add up a record's `gram_products`: the squared ghost norm, raised by about its rounding."""
    record = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    squared = tl.zeros((BLOCK,), dtype=tl.float64)
    length = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, parts, BLOCK):
        inside = start + place < parts
        squared += tl.load(squares + record * parts + start + place, inside, 0.0)
        length += tl.load(lengths + record * parts + start + place, inside, 0.0)
    whole = tl.sum(length)
    found = tl.sum(squared)
    found = tl.where(found > 0, found, found * 0.0)  # NaN stays, as a maximum would not have it
    ghost = found + whole * whole * 2.0**-22
    tl.store(claims + record, ghost + ghost * 2.0**-20)


@triton.jit(do_not_specialize=["begin", "way", "records"])
def hold(
    squares,
    claims,
    weights,
    shorter,
    exceeded,
    begin,
    way,
    records,
    parts,
    BLOCK: tl.constexpr,
):
    """Find whether what was added of a record is longer than was claimed, and shorten it then.

    Writes its weight, or less, to ``shorter``, and 1 to ``exceeded`` where it is less.
    """
    record = begin + tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    squared = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, parts, BLOCK):
        inside = start + place < parts
        squared += tl.load(squares + record * parts + start + place, inside, 0.0)
    measured = tl.sum(squared)
    measured += measured * 2.0**-30  # what adding up may have lost
    claimed = tl.load(claims + record)
    weight = tl.load(weights + way * records + record)
    fits = (measured <= claimed) | (weight == 0)  # not if it is NaN
    factor = tl.sqrt(claimed / measured)
    factor = tl.where(factor < 1, factor, 0.0)
    tl.store(shorter + way * records + record, tl.where(fits, weight, weight * factor))
    tl.atomic_max(exceeded, tl.where(fits, 0, 1))
