"""Triton kernels of `fused_outer`: records' gradients of several layers, a tile at a time.

Import it where `fused_outer.serves`: Triton is no requirement. (`gram_kernels` has the others.)

A *table* has a row of `COLUMNS` int64 numbers for each layer, and `layers` says which layer a tile
belongs to. So one call does the work of many layers, whose own calls would take longer than it.
"""

import triton
import triton.language as tl

ADD, MEASURE, BOTH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # kinds of work
# columns of the table: addresses of both sides and of what is written, sizes, numbers from one
# position to the next, and which tiles are the layer's
G, A, OUT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
POSITIONS, ROWS, WIDTH = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
STEP_OF_G, STEP_OF_A = tl.constexpr(6), tl.constexpr(7)
FIRST, TILES = tl.constexpr(8), tl.constexpr(9)
COLUMNS = tl.constexpr(10)


@triton.jit
def sizes_of(row):
    """A layer's T, p and d."""
    T, p = tl.load(row + POSITIONS).to(tl.int32), tl.load(row + ROWS).to(tl.int32)
    return T, p, tl.load(row + WIDTH).to(tl.int32)


@triton.jit
def side_of(row, side: tl.constexpr, step: tl.constexpr, n, like):
    """One side of a layer, (B, T, n): where it starts, its step, and numbers in each row.

    The step leads from one position to the next. Rows are read to a multiple of sixteen bytes,
    which `fused_factors.in_rows` filled up.
    """
    numbers: tl.constexpr = 128 // like.dtype.element_ty.primitive_bitwidth
    start = tl.load(row + side).to(tl.pointer_type(like.dtype.element_ty))
    width = tl.cdiv(n, numbers) * numbers
    return (
        tl.multiple_of(start, 16),
        tl.multiple_of(tl.load(row + step), numbers),
        tl.multiple_of(width, numbers),
    )


@triton.jit
def rows_of(start, step, T, width, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr):
    """One record's rows, as `tile_of` reads them: described to the device, or where they start."""
    if D:
        return tl.make_tensor_descriptor(start, [T, width], [step, 1], [BLOCK_T, BLOCK])
    else:
        return start


@triton.jit
def tile_of(
    rows, step, T, width, t, first, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr
):
    """A tile of one record's rows, from position t and column ``first`` on; zeros beyond them."""
    if D:
        return rows.load([t, first])
    else:
        place, columns = t + tl.arange(0, BLOCK_T), first + tl.arange(0, BLOCK)
        inside = (place < T)[:, None] & (columns < width)[None, :]
        return tl.load(rows + place[:, None] * step + columns[None, :], inside, 0.0)


@triton.jit
def looked_up(found, index, values, edges, record, tile, tiles, first_row, first, d, lookups):
    """Add the gradients of looked-up rows of a table, in the order of `index`."""
    rows = first_row + tl.arange(0, found.shape[0])
    columns = first + tl.arange(0, found.shape[1])
    edge = edges + record.to(tl.int64) * (tiles + 1) + tile
    first_of, last_of = tl.load(edge), tl.load(edge + 1)
    base = record.to(tl.int64) * lookups
    for k in range(first_of, last_of):
        row = tl.load(index + base + k)
        value = tl.load(values + (base + k) * d + columns, mask=columns < d, other=0.0)
        found += tl.where(rows[:, None] == row, value[None, :], 0.0)
    return found


@triton.jit
def squared_length(found):
    """The squared length of a tile, float64: of its rows in float32, see `gram_kernels.raised`."""
    return tl.sum(tl.sum(found * found, 1).to(tl.float64))


@triton.jit
def added(sums, weight, found):
    """The sums and a weighted tile; nothing of one without weight, which need not be finite."""
    if weight != 0:
        sums += weight * found
    return sums


@triton.jit
def store_tile(start, tile, rows_left, columns_left, d):
    """Write a tile to a matrix of d columns, where it has so many rows and columns left."""
    rows, columns = tl.arange(0, tile.shape[0]), tl.arange(0, tile.shape[1])
    inside = (rows < rows_left)[:, None] & (columns < columns_left)[None, :]
    tl.store(start + (rows[:, None] * d + columns[None, :]), tile, mask=inside)


@triton.jit(do_not_specialize=["tiles", "lookups"])
def form(
    table,
    layers,
    squares,
    like,
    tiles,
    index,
    values,
    edges,
    lookups,
    LOOKED_UP: tl.constexpr,
    DIVISOR: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write each record's gradients, float32, (B, p, d), and squared lengths of their tiles.

    These go to ``squares``, float64, (B, tiles). DIVISOR divides each layer's d. DESCRIBED: whether
    memory is described to the device, which then reads tiles by itself.
    """
    number = tl.program_id(0)
    tile, record = number % tiles, number // tiles
    row = table + tl.load(layers + tile).to(tl.int64) * COLUMNS
    own = tile - tl.load(row + FIRST).to(tl.int32)
    T, p, d = sizes_of(row)
    d = tl.multiple_of(d, DIVISOR)
    wide = tl.cdiv(d, BLOCK_D)
    r, c = own // wide * BLOCK_P, own % wide * BLOCK_D
    g, step_of_g, wide_g = side_of(row, G, STEP_OF_G, p, like)
    a, step_of_a, wide_a = side_of(row, A, STEP_OF_A, d, like)
    before = record.to(tl.int64) * T
    of_g = rows_of(g + before * step_of_g, step_of_g, T, wide_g, BLOCK_T, BLOCK_P, DESCRIBED)
    of_a = rows_of(a + before * step_of_a, step_of_a, T, wide_a, BLOCK_T, BLOCK_D, DESCRIBED)
    found = tl.zeros((BLOCK_P, BLOCK_D), dtype=tl.float32)
    for t in range(0, T, BLOCK_T):
        left = tile_of(of_g, step_of_g, T, wide_g, t, r, BLOCK_T, BLOCK_P, DESCRIBED)
        right = tile_of(of_a, step_of_a, T, wide_a, t, c, BLOCK_T, BLOCK_D, DESCRIBED)
        found = tl.dot(tl.trans(left), right, found, input_precision=PRECISION)
    if LOOKED_UP:
        down = tl.cdiv(p, BLOCK_P)
        found = looked_up(found, index, values, edges, record, own // wide, down, r, c, d, lookups)
    tl.store(squares + record.to(tl.int64) * tiles + tile, squared_length(found))
    out = tl.load(row + OUT).to(tl.pointer_type(tl.float32))
    out = tl.multiple_of(out, 16) + (record.to(tl.int64) * p + r) * d + c
    store_tile(out, found, p - r, d - c, d)


@triton.jit(
    do_not_specialize=[
        *("tiles", "work", "begin", "end", "share"),
        *("of_layer", "of_turn", "records", "lookups"),
    ],
    # which is no reason to compile another function for one of the passes
    do_not_specialize_on_alignment=["weights", "squares"],
)
def measure_or_add(
    table,
    layers,
    squares,
    weights,
    wanted,
    like,
    tiles,
    work,
    begin,
    end,
    share,
    of_layer,
    of_turn,
    records,
    index,
    values,
    edges,
    lookups,
    LOOKED_UP: tl.constexpr,
    DIVISOR: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take ``share`` of the records from begin to end, in one tile of their gradients.

    To measure is to write the squared length of each record's tile to ``squares``, float64, (B,
    tiles); to add, to write ``sum_i weights[layer, i] * gradient_i``, float32, (p, d), where the
    table says, ``of_turn`` numbers on for each share. Nothing is done of layers that are not
    ``wanted``. One compiled function does it all, so that it is the same numbers that are measured
    and added. Weights are float64, ``of_layer`` numbers from one layer to the next.

    Records and their positions are one loop, so that the next record is on its way from memory
    while the last is multiplied.
    """
    number = tl.program_id(0)
    tile, turn = number % tiles, number // tiles
    layer = tl.load(layers + tile)
    row = table + layer.to(tl.int64) * COLUMNS
    own = tile - tl.load(row + FIRST).to(tl.int32)
    T, p, d = sizes_of(row)
    d = tl.multiple_of(d, DIVISOR)
    wide = tl.cdiv(d, BLOCK_D)
    r, c = own // wide * BLOCK_P, own % wide * BLOCK_D
    g, step_of_g, wide_g = side_of(row, G, STEP_OF_G, p, like)
    a, step_of_a, wide_a = side_of(row, A, STEP_OF_A, d, like)
    if DESCRIBED:
        of_g = tl.make_tensor_descriptor(
            g, [records, T, wide_g], [T * step_of_g, step_of_g, 1], [1, BLOCK_T, BLOCK_P]
        )
        of_a = tl.make_tensor_descriptor(
            a, [records, T, wide_a], [T * step_of_a, step_of_a, 1], [1, BLOCK_T, BLOCK_D]
        )
    first = begin + turn * share
    last = tl.minimum(first + share, end)
    steps = tl.cdiv(T, BLOCK_T)
    go = tl.load(wanted + layer)
    found = tl.zeros((BLOCK_P, BLOCK_D), dtype=tl.float32)
    sums = tl.zeros((BLOCK_P, BLOCK_D), dtype=tl.float32)
    for step in range(0, (last - first) * steps * go):
        record = first + step // steps
        t = (step % steps) * BLOCK_T
        if DESCRIBED:
            left = of_g.load([record, t, r]).reshape(BLOCK_T, BLOCK_P)
            right = of_a.load([record, t, c]).reshape(BLOCK_T, BLOCK_D)
        else:
            before = record.to(tl.int64) * T
            of_g, of_a = g + before * step_of_g, a + before * step_of_a
            left = tile_of(of_g, step_of_g, T, wide_g, t, r, BLOCK_T, BLOCK_P, False)
            right = tile_of(of_a, step_of_a, T, wide_a, t, c, BLOCK_T, BLOCK_D, False)
        found = tl.dot(tl.trans(left), right, found, input_precision=PRECISION)
        if step % steps == steps - 1:
            if LOOKED_UP:
                down = tl.cdiv(p, BLOCK_P)
                found = looked_up(
                    found, index, values, edges, record, own // wide, down, r, c, d, lookups
                )
            if work != ADD:
                tl.store(squares + record.to(tl.int64) * tiles + tile, squared_length(found))
            if work != MEASURE:
                weight = tl.load(weights + layer * of_layer + record).to(tl.float32)
                sums = added(sums, weight, found)
            found = tl.zeros((BLOCK_P, BLOCK_D), dtype=tl.float32)
    if work != MEASURE:
        out = tl.load(row + OUT).to(tl.pointer_type(tl.float32))
        out = tl.multiple_of(out, 16) + turn.to(tl.int64) * of_turn
        out += r.to(tl.int64) * d + c
        store_tile(out, sums, (p - r) * go, d - c, d)


@triton.jit(
    do_not_specialize=["begin", "end", "of_layer"], do_not_specialize_on_alignment=["weights"]
)
def add_kept(
    table,
    layers,
    weights,
    begin,
    end,
    of_layer,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up what `form` wrote: ``sum_i weights[layer, i] * gradient_i`` for a block of entries.

    A row of the table is four numbers: addresses of the gradients, (B, entries), and of the sum,
    how many entries, and the layer's first block. In float64 where it is to be EXACT.
    """
    block = tl.program_id(0)
    layer = tl.load(layers + block)
    row = table + layer.to(tl.int64) * 4
    kept = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16)
    entries = tl.load(row + 2)
    place = (block - tl.load(row + 3)) * BLOCK + tl.arange(0, BLOCK)
    inside = place < entries
    dtype: tl.constexpr = tl.float64 if EXACT else tl.float32
    sums = tl.zeros((BLOCK,), dtype=dtype)
    for record in range(begin, end):
        weight = tl.load(weights + layer * of_layer + record).to(dtype)
        value = tl.load(kept + record * entries + place, inside, 0.0).to(dtype)
        sums += tl.where(weight == 0, 0.0, weight * value)  # also of what is not finite
    tl.store(tl.load(row + 1).to(tl.pointer_type(dtype)) + place, sums, inside)
