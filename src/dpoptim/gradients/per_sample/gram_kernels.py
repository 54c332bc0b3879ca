"""Triton kernels of `fused_outer`: norms claimed from Gram products, and held to.

Import it where `fused_outer.serves`: Triton is no requirement.
"""

import triton
import triton.language as tl

from dpoptim.gradients.per_sample.outer_kernels import (
    COLUMNS,
    FIRST,
    ROWS,
    STEP_OF_A,
    STEP_OF_G,
    TILES,
    WIDTH,
    A,
    G,
    rows_of,
    side_of,
    sizes_of,
    tile_of,
)

# what measuring reads too low at most: of all, and of each square that leaves float32 below
MEASURED_ABOVE, LEAST_SQUARE = tl.constexpr(2.0**-16), tl.constexpr(2.0**-126)
CLAIMED_ABOVE = tl.constexpr(2.0**-15)


@triton.jit
def raised(squared, entries):
    """Squared lengths, float64, as measured, and no less than they are: see `fused_outer`."""
    return squared + squared * MEASURED_ABOVE + entries * LEAST_SQUARE


@triton.jit
def dot_products(
    x,
    step,
    here,
    there,
    T,
    width,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """``x_s . x_t`` of the positions from here on and from there on, of one record's rows."""
    rows = rows_of(x, step, T, width, BLOCK_T, BLOCK_K, DESCRIBED)
    found = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
    for k in range(0, width, BLOCK_K):
        left = tile_of(rows, step, T, width, here, k, BLOCK_T, BLOCK_K, DESCRIBED)
        right = tile_of(rows, step, T, width, there, k, BLOCK_T, BLOCK_K, DESCRIBED)
        found = tl.dot(left, tl.trans(right), found, input_precision=PRECISION)
    return found


@triton.jit(do_not_specialize=["most"])
def gram_products(
    table,
    squares,
    lengths,
    like,
    most,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Add up ``(g_s . g_t) (a_s . a_t)`` for two blocks of a record's positions.

    Writes the sum, twice it for different blocks, to ``squares``, and that of ``|g_t| |a_t|`` to
    ``lengths``: float64, (layers, B, most), zero above the diagonal; ``most`` blocks squared.
    """
    number, layer = tl.program_id(0), tl.program_id(1)
    row = table + layer * COLUMNS
    T, p, d = sizes_of(row)
    blocks = tl.cdiv(T, BLOCK_T)
    part, record = number % most, tl.cast(number // most, tl.int64)
    here, there = part // blocks * BLOCK_T, part % blocks * BLOCK_T
    of_g = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
    of_a = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
    if (there <= here) & (here < T):
        g, step_of_g, wide_g = side_of(row, G, STEP_OF_G, p, like)
        a, step_of_a, wide_a = side_of(row, A, STEP_OF_A, d, like)
        g, a = g + record * T * step_of_g, a + record * T * step_of_a
        of_g = dot_products(
            g, step_of_g, here, there, T, wide_g, BLOCK_T, BLOCK_K, PRECISION, DESCRIBED
        )
        of_a = dot_products(
            a, step_of_a, here, there, T, wide_a, BLOCK_T, BLOCK_K, PRECISION, DESCRIBED
        )
    s, t = here + tl.arange(0, BLOCK_T), there + tl.arange(0, BLOCK_T)
    products = of_g.to(tl.float64) * of_a.to(tl.float64)
    own = tl.sum(tl.where(s[:, None] == t[None, :], products, 0.0), 1)
    place = layer.to(tl.int64) * tl.num_programs(0) + number
    tl.store(squares + place, tl.sum(products) * tl.where(here == there, 1, 2))
    tl.store(lengths + place, tl.sum(tl.sqrt(tl.maximum(own, 0.0))))


@triton.jit
def claim(squares, lengths, claims, parts, BLOCK: tl.constexpr):
    """Add up a record's `gram_products`: the squared ghost norm, raised by about its rounding.

    And by what measuring raises, so that hardly anything is shortened.
    """
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
    tl.store(claims + record, ghost + ghost * CLAIMED_ABOVE)


@triton.jit(
    do_not_specialize=["begin", "of_layer", "records", "tiles"],
    do_not_specialize_on_alignment=["weights"],
)
def hold(
    table,
    squares,
    claims,
    weights,
    shorter,
    exceeded,
    begin,
    of_layer,
    records,
    tiles,
    BLOCK: tl.constexpr,
):
    """Find whether what was added of a record is longer than was claimed, and shorten it then.

    Writes its weight, or less, to ``shorter``, (layers, B), and 1 to the layer's ``exceeded``
    where it is less.
    """
    record, layer = begin + tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = table + layer * COLUMNS
    first, parts = tl.load(row + FIRST), tl.load(row + TILES)
    place = tl.arange(0, BLOCK)
    squared = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, parts, BLOCK):
        inside = start + place < parts
        squared += tl.load(squares + record * tiles + first + start + place, inside, 0.0)
    entries = tl.load(row + ROWS) * tl.load(row + WIDTH)
    measured = raised(tl.sum(squared), entries)
    claimed = tl.load(claims + layer * records + record)
    weight = tl.load(weights + layer * of_layer + record)
    fits = (measured <= claimed) | (weight == 0)  # not if it is NaN
    factor = tl.sqrt(claimed / measured)
    factor = tl.where(factor < 1, factor, 0.0)
    tl.store(shorter + layer * records + record, tl.where(fits, weight, weight * factor))
    tl.atomic_max(exceeded + layer, tl.where(fits, 0, 1))
