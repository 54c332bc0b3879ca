"""Coins of any chance, to 128 bits of it: what thresholded noise would say, without the noise.

A number with normal noise exceeds a threshold with a chance that is known beforehand. Where that
is all that is asked, a coin of this chance has the law of drawing and comparing.
"""

import math

import numpy as np
from numpy.typing import NDArray

from dpoptim.noise.sparse_bernoulli import BLOCK, heads_in_blocks
from dpoptim.noise.stream import KeyStream

MOST_ZEROS = 32  # of `sparse_bernoulli`
TWO_64 = 2.0**64


def toss_coins(stream: KeyStream, chances: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Toss a coin for each of ``chances``, all in [0, 1]: whether it shows heads, (k,).

    **Guarantee.** The coins are independent of each other and of all other draws. Each shows heads
    with its chance, rounded down to a multiple of 2^-128; 1 means always. Proof: a uniform number
    of 128 bits is compared with the chance, of which both halves are exact in float64; its lower
    half is drawn only where the upper ones are equal.
    """
    always = chances >= 1
    scaled = np.where(always, 0.0, chances) * TWO_64
    upper = np.floor(scaled)
    lower = np.floor((scaled - upper) * TWO_64).astype(np.uint64)
    drawn = random_words(stream, len(chances))
    heads = drawn < upper.astype(np.uint64)
    open_ = np.flatnonzero(drawn == upper.astype(np.uint64))
    heads[open_] = random_words(stream, len(open_)) < lower[open_]
    return np.asarray(heads | always)


def rare_heads(stream: KeyStream, coins: int, chance: float) -> NDArray[np.int64]:
    """Toss ``coins`` coins of one chance, in [0, 1]: the places of the heads, ascending.

    It costs the heads and not the coins: those whose number has zeros for its first bits are found
    by `sparse_bernoulli`, and of these alone the other bits are drawn.

    **Guarantee.** As for `toss_coins`; chances of at least 2^-32 are met to 2^-128 of themselves.
    """
    if chance <= 0 or coins == 0:
        return np.empty(0, np.int64)
    zeros = min(-math.frexp(chance)[1], MOST_ZEROS)  # chance = fraction 2^-zeros, at most
    if zeros < 1:
        return np.flatnonzero(toss_coins(stream, np.full(coins, chance)))
    found = heads_in_blocks(-(-coins // BLOCK), zeros, lambda count: random_words(stream, count))
    found = found[: np.searchsorted(found, coins)]  # the last block may have more than asked
    fraction = np.full(len(found), math.ldexp(chance, zeros))
    return found[toss_coins(stream, fraction)]


def random_words(stream: KeyStream, count: int) -> NDArray[np.uint64]:
    drawn = np.empty(count, np.uint64)
    stream.words(drawn)
    return drawn
