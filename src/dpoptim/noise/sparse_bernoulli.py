"""Coins that seldom show heads, at the cost of the heads and not of the coins.

Coins are tossed in blocks of `BLOCK`, with a chance of 2^-j: first how many heads a block has, then
which. The number is drawn by inverting its distribution function on a uniform number U. That
function's values are ratios of whole numbers, known exactly; 64 bits of U nearly always tell which
two of them it lies between, and where they do not, more bits are drawn.

**Theorem.** The heads are those of independent coins of chance 2^-j, exactly. Proof: a binomial
number of heads, and given it all such sets as likely, is the law of independent coins. The
number is binomial, since U is compared with exact values. The set is the same for all: it holds the
first so many different ones of independent uniform places. []
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK", "heads_in_blocks"]

PLACE_BITS = 14
BLOCK = 1 << PLACE_BITS
Words = NDArray[np.uint64]
Draw = Callable[[int], Words]


def heads_in_blocks(blocks: int, j: int, draw: Draw) -> NDArray[np.int64]:
    """Return the heads among ``blocks * BLOCK`` coins of chance 2^-j, ascending.

    Args:
        j: 1 to 32.
        draw: so many uniform words of 64 bits.
    """
    starts = np.arange(0, blocks * BLOCK, BLOCK)

    def places_in(blocks_of: NDArray[np.int64]) -> NDArray[np.int64]:
        places = draw(len(blocks_of)) >> np.uint64(64 - PLACE_BITS)
        return np.sort(blocks_of + places.view(np.int64))

    heads = places_in(np.repeat(starts, numbers_of_heads(blocks, j, draw)))
    while len(again := np.flatnonzero(heads[1:] == heads[:-1])):  # drawn before: another place
        others = places_in(heads[again] & -BLOCK)
        heads = np.delete(heads, again)
        heads = np.insert(heads, np.searchsorted(heads, others), others)
    return heads


def numbers_of_heads(blocks: int, j: int, draw: Draw) -> NDArray[np.int64]:
    """Return how many heads each block has, int64 of shape (blocks,)."""
    floors = distribution_floors(j)
    uniform = draw(blocks)
    numbers = np.searchsorted(floors, uniform, side="right")
    # searchsorted has found the largest floor that is not above
    for place in np.flatnonzero(floors[np.maximum(numbers, 1) - 1] == uniform):
        numbers[place] = number_of_heads(int(uniform[place]), 64, j, draw)
    return numbers.astype(np.int64)


@lru_cache(maxsize=64)
def distribution_floors(j: int) -> Words:
    """Return ``floor(2^64 P(heads <= k))`` for k = 0, 1, ..., to the first that is 2^64 - 1."""
    found: list[int] = []
    for total in distribution(j):
        found.append(total >> (j * BLOCK - 64))
        if found[-1] == 2**64 - 1:
            return np.array(found, np.uint64)
    raise AssertionError("a distribution function ends at one")


def distribution(j: int) -> Iterator[int]:
    """Yield ``2^(j BLOCK) P(heads <= k)`` for k = 0, 1, ..., BLOCK: whole numbers."""
    term = (2**j - 1) ** BLOCK
    total = term
    yield total
    for k in range(BLOCK):
        term = term * (BLOCK - k) // ((k + 1) * (2**j - 1))  # divides without a remainder
        total += term
        yield total


def number_of_heads(uniform: int, bits: int, j: int, draw: Draw) -> int:
    """Return the number of heads of U, of which the first bits are known, drawing more of them."""
    for heads, value in enumerate(distribution(j)):
        # U is in [uniform, uniform + 1) / 2^bits: below the value, at least it, or not yet known
        while uniform << (j * BLOCK) < value << bits < (uniform + 1) << (j * BLOCK):
            uniform, bits = (uniform << 64) + int(draw(1)[0]), bits + 64
        if value << bits > uniform << (j * BLOCK):
            return heads
    raise AssertionError("a distribution function ends at one")
