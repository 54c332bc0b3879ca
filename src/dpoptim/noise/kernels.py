"""Triton kernels that add standard normal draws, times a number, to tensors on an accelerator.

A vector of many tensors is cut into regions of up to `REGION` entries of one tensor. `add_throws`
makes ChaCha20 blocks (RFC 8439) in registers, one a lane, of which each gives eight words; a word
becomes a draw by the ziggurat, as in `ziggurat.throw`, and is added. The 0.4 % that are no draws
yet it lists, region by region; `add_settled` decides them as `ziggurat.settle` does, and adds them.
Nothing of this comes back to the host, and nothing of the tensors' size is kept.

Words. The counter and the first word of the nonce say what a block is for; the rest of the nonce
is 0. Throws have nonce 0, and as counter the number of the lane among all regions' lanes. The n-th
attempt to settle an entry has nonce n >= 1, and as counter the number of the entry among all
regions'. So no block of a key comes twice. `on_device_reference` computes the same on the CPU.

Products and sums are to be rounded one by one (``enable_fp_fusion=False``): the draws of a key are
the same on every device, to the last bit.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpoptim.noise import ziggurat_layers
from dpoptim.noise.series import ODD_TERMS, TERMS

LANES = tl.constexpr(512)  # of a program that throws
TILES = tl.constexpr(4)  # programs of a region
REGION = tl.constexpr(1 << 14)  # entries: 8 words of each lane of each program
LISTED = tl.constexpr(256)  # of a region's entries: more, of 70 expected, have odds below 2^-200
SETTLERS = tl.constexpr(128)  # lanes of a program that settles
PARTS = tl.constexpr(2)  # programs for the list of a region, of which the second is seldom needed
ATTEMPTS = tl.constexpr(64)  # more have odds below 2^-250; a device that errs must not hang
LAYERS = tl.constexpr(ziggurat_layers.LAYERS)
# Places in `on_device.tables`: step, inner, floor and rise of each layer, then these.
EXP_TERMS = tl.constexpr(4 * ziggurat_layers.LAYERS)
LAST_TERM = tl.constexpr(len(TERMS) - 1)
LOG_TERMS = tl.constexpr(4 * ziggurat_layers.LAYERS + len(TERMS))
LAST_ODD_TERM = tl.constexpr(len(ODD_TERMS) - 1)
CONSTANTS = tl.constexpr(4 * ziggurat_layers.LAYERS + len(TERMS) + len(ODD_TERMS))
# They change with each call, and a kernel must not be compiled for each.
NUMBERS = ["k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "std_low", "std_high"]


@triton.jit
def wrapped(x, y):
    """Their sum, modulo 2^32 for uint32."""
    return tl.add(x, y, sanitize_overflow=False)


@triton.jit
def quarter_round(a, b, c, d):
    a = wrapped(a, b)
    d = d ^ a
    d = (d << 16) | (d >> 16)
    c = wrapped(c, d)
    b = b ^ c
    b = (b << 12) | (b >> 20)
    a = wrapped(a, b)
    d = d ^ a
    d = (d << 8) | (d >> 24)
    c = wrapped(c, d)
    b = b ^ c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def chacha(counter, nonce, k0, k1, k2, k3, k4, k5, k6, k7):
    """Blocks of 16 words of 32 bits; ``counter`` is uint32 (lanes,), ``nonce`` and key integers."""
    zero = counter ^ counter
    n = zero + nonce.to(tl.uint32)
    k0, k1, k2, k3 = k0.to(tl.uint32), k1.to(tl.uint32), k2.to(tl.uint32), k3.to(tl.uint32)
    k4, k5, k6, k7 = k4.to(tl.uint32), k5.to(tl.uint32), k6.to(tl.uint32), k7.to(tl.uint32)
    a0, a1, a2, a3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    b0, b1, b2, b3 = zero + k0, zero + k1, zero + k2, zero + k3
    c0, c1, c2, c3 = zero + k4, zero + k5, zero + k6, zero + k7
    d0, d1, d2, d3 = counter, n, zero, zero
    for _ in range(10):
        a0, b0, c0, d0 = quarter_round(a0, b0, c0, d0)
        a1, b1, c1, d1 = quarter_round(a1, b1, c1, d1)
        a2, b2, c2, d2 = quarter_round(a2, b2, c2, d2)
        a3, b3, c3, d3 = quarter_round(a3, b3, c3, d3)
        a0, b1, c2, d3 = quarter_round(a0, b1, c2, d3)
        a1, b2, c3, d0 = quarter_round(a1, b2, c3, d0)
        a2, b3, c0, d1 = quarter_round(a2, b3, c0, d1)
        a3, b0, c1, d2 = quarter_round(a3, b0, c1, d2)
    a0, a1 = wrapped(a0, zero + 0x61707865), wrapped(a1, zero + 0x3320646E)
    a2, a3 = wrapped(a2, zero + 0x79622D32), wrapped(a3, zero + 0x6B206574)
    b0, b1, b2, b3 = wrapped(b0, k0), wrapped(b1, k1), wrapped(b2, k2), wrapped(b3, k3)
    c0, c1, c2, c3 = wrapped(c0, k4), wrapped(c1, k5), wrapped(c2, k6), wrapped(c3, k7)
    d0, d1 = wrapped(d0, counter), wrapped(d1, n)
    return a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3


@triton.jit
def joined(low, high):
    """A word of 64 bits, as a signed integer."""
    bits = low.to(tl.uint32).to(tl.uint64) | (high.to(tl.uint32).to(tl.uint64) << 32)
    return bits.to(tl.int64, bitcast=True)


@triton.jit
def thrown(word, tables):
    """Place, layer, and whether that is no draw yet."""
    layer = (word & (LAYERS - 1)).to(tl.int32)
    place = tl.load(tables + layer) * word.to(tl.float64)
    return place, layer, tl.abs(place) >= tl.load(tables + LAYERS + layer)


@triton.jit
def uniform(word):
    return (word.to(tl.uint64, bitcast=True).to(tl.float64) + 0.5) * 5.421010862427522e-20  # 2^-64


@triton.jit
def polynomial(x, terms, LAST: tl.constexpr):
    total = x * 0.0 + tl.load(terms + LAST)
    for i in tl.static_range(LAST):
        total = total * x + tl.load(terms + (LAST - 1 - i))
    return total


@triton.jit
def exponential(x, tables):
    """`series.exponential`."""
    constants = tables + CONSTANTS
    rounding = tl.load(constants + 4)
    k = (x * tl.load(constants) + rounding) - rounding
    rest = (x - k * tl.load(constants + 2)) - k * tl.load(constants + 3)
    power = ((k.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return polynomial(rest, tables + EXP_TERMS, LAST_TERM) * power


@triton.jit
def logarithm(x, tables):
    """`series.logarithm`."""
    constants = tables + CONSTANTS
    bits = x.to(tl.int64, bitcast=True)
    k = (bits >> 52) - 1022
    m = ((bits & 0xFFFFFFFFFFFFF) | (1022 << 52)).to(tl.float64, bitcast=True)
    low = m < tl.load(constants + 1)
    m = tl.where(low, m + m, m)
    exponent = tl.where(low, k - 1, k).to(tl.float64)
    s = (m - 1.0) / (m + 1.0)
    series = (s + s) * polynomial(s * s, tables + LOG_TERMS, LAST_ODD_TERM)
    return exponent * tl.load(constants + 2) + (series + exponent * tl.load(constants + 3))


@triton.jit
def add_throw(
    word, begin, length, region, target, std, tables, found, listed, listed_words,
    ELEMENT: tl.constexpr,
):  # fmt: skip
    """One word of each lane: a draw is added to its entry, or the entry and the word are listed."""
    place, _, outside = thrown(word, tables)
    lane = tl.arange(0, LANES)
    at = begin + lane
    there = at < length
    outside = outside & there
    rank = tl.atomic_add(found + region + lane * 0, 1, mask=outside, sem="relaxed")
    fits = rank < LISTED
    tl.store(listed + region * LISTED + rank, at, mask=outside & fits)
    tl.store(listed_words + region * LISTED + rank, word, mask=outside & fits)
    total = tl.load(target + at, mask=there, other=0.0).to(tl.float64) + std * place
    # What does not fit the list gets no draw; it must not go without noise unseen.
    total = tl.where(outside, float("nan"), total)
    tl.store(target + at, total.to(ELEMENT), mask=there & ((outside & fits) == 0))


@triton.jit(do_not_specialize=NUMBERS)
def add_throws(
    regions, tables, found, listed, listed_words,
    k0, k1, k2, k3, k4, k5, k6, k7, std_low, std_high,
    ELEMENT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    region = program // TILES
    begin = (program % TILES) * (8 * LANES)
    length = tl.load(regions + 2 * region + 1).to(tl.int32)
    if begin < length:
        target = tl.load(regions + 2 * region).to(tl.pointer_type(ELEMENT))
        std = joined(std_low, std_high).to(tl.float64, bitcast=True)
        counter = (program * LANES + tl.arange(0, LANES)).to(tl.uint32)
        words = chacha(counter, program * 0, k0, k1, k2, k3, k4, k5, k6, k7)
        for i in tl.static_range(8):
            add_throw(
                joined(words[2 * i], words[2 * i + 1]), begin + i * LANES, length, region,
                target, std, tables, found, listed, listed_words, ELEMENT,
            )  # fmt: skip


@triton.jit
def attempted(place, layer, first, second, tables):
    """One attempt to settle throws with two words each: place, layer, and whether that is a draw.

    Beyond R the words are a draw from the tail and its uniform height; on a curved end they are the
    uniform height and the new throw of what is refused.
    """
    tail_start = tl.load(tables + CONSTANTS + 5)
    beyond = layer == 0
    u = uniform(first)
    excess = -logarithm(u, tables) / tail_start
    in_tail = -2.0 * logarithm(uniform(second), tables) > excess * excess
    magnitude = tail_start + excess
    from_tail = tl.where(place < 0, -magnitude, magnitude)
    floor = tl.load(tables + 2 * LAYERS + layer)
    rise = tl.load(tables + 3 * LAYERS + layer)
    under = floor + u * rise < exponential(-0.5 * place * place, tables)
    fresh, fresh_layer, outside = thrown(second, tables)
    settled = (beyond & in_tail) | ((beyond == 0) & (under | (outside == 0)))
    kept = (beyond & (in_tail == 0)) | ((beyond == 0) & under)
    moved = tl.where(kept, place, tl.where(beyond, from_tail, fresh))
    return moved, tl.where(kept | beyond, layer, fresh_layer), settled


@triton.jit(do_not_specialize=NUMBERS)
def add_settled(
    regions, tables, found, listed, listed_words,
    k0, k1, k2, k3, k4, k5, k6, k7, std_low, std_high,
    ELEMENT: tl.constexpr,
):  # fmt: skip
    region = tl.program_id(0) // PARTS
    slot = (tl.program_id(0) % PARTS) * SETTLERS + tl.arange(0, SETTLERS)
    there = slot < tl.minimum(tl.load(found + region), LISTED)
    target = tl.load(regions + 2 * region).to(tl.pointer_type(ELEMENT))
    std = joined(std_low, std_high).to(tl.float64, bitcast=True)
    at = tl.load(listed + region * LISTED + slot, mask=there, other=0)
    word = tl.load(listed_words + region * LISTED + slot, mask=there, other=0)
    place, layer, _ = thrown(word, tables)
    counter = (region * REGION + at).to(tl.uint32)
    missing = there.to(tl.int32)
    attempt = region * 0
    while (tl.sum(missing, 0) > 0) & (attempt < ATTEMPTS):
        attempt += 1
        words = chacha(counter, attempt, k0, k1, k2, k3, k4, k5, k6, k7)
        moved, moved_layer, settled = attempted(
            place, layer, joined(words[0], words[1]), joined(words[2], words[3]), tables
        )
        place = tl.where(missing != 0, moved, place)
        layer = tl.where(missing != 0, moved_layer, layer)
        missing = tl.where(settled, 0, missing)
    place = tl.where(missing != 0, float("nan"), place)
    total = tl.load(target + at, mask=there, other=0.0).to(tl.float64) + std * place
    tl.store(target + at, total.to(ELEMENT), mask=there)


ELEMENTS = {torch.float32: tl.float32, torch.float64: tl.float64}


def serves(device: torch.device) -> bool:
    """Whether they may run there; a device of the CPU's memory under Triton's interpreter."""
    interpreted = not isinstance(add_throws, triton.JITFunction)
    return device.type == "cpu" if interpreted else device.type in ("cuda", "xpu")


def launch(
    regions: Tensor, tables: Tensor, dtype: torch.dtype, key: Sequence[int], std: Sequence[int]
) -> None:
    """Add draws to all entries of the regions.

    Args:
        regions: int64 (n, 2), n up to 2^17: the address and the number of entries of each.
        tables: as `on_device.tables`.
        dtype: of the entries, in `ELEMENTS`.
        key: eight signed integers of 32 bits, never used before.
        std: the two halves of a float64, the lower one first, as signed integers.
    """
    n, device = len(regions), regions.device
    found = torch.zeros(n, dtype=torch.int32, device=device)
    listed = torch.empty(n * LISTED.value, dtype=torch.int32, device=device)
    words = torch.empty(n * LISTED.value, dtype=torch.int64, device=device)
    given = (regions, tables, found, listed, words, *key, *std, ELEMENTS[dtype])
    add_throws[(n * TILES.value,)](*given, num_warps=8, enable_fp_fusion=False)
    add_settled[(n * PARTS.value,)](*given, num_warps=4, enable_fp_fusion=False)
