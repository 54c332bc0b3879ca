"""The exponential mechanism, drawn exactly: no rounding of weights or noise changes its odds.

Gumbel noise in floating point has the mechanism's odds only to about n^2 2^-52, which is a delta
that a guarantee of pure epsilon-DP would have to state. Here the weights are enclosed in
intervals, and a uniform number is refined until it lies in one candidate's share whatever the rest
of its digits are.
"""

from bisect import bisect_left
from collections.abc import Sequence
from decimal import MAX_EMAX, MIN_EMIN, ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction
from itertools import accumulate

import numpy as np

from dpoptim.noise.stream import KeyStream

_DIGITS = 40  # of the weights at first; so many are not enough about once in 10^37 draws
_WORDS = 2  # of 64 bits, by which the uniform number grows


def exponential_choice(stream: KeyStream, exponents: Sequence[Fraction]) -> int:
    """An index i, with probability exactly proportional to ``exp(exponents[i])``.

    Args:
      stream: of the uniform number.
      exponents: any rational numbers, at least one.

    **Proof.** Let W be the sum of all weights, C_i that of the first i, and U uniform in [0, 1).
    The index with ``C_i <= U W < C_(i+1)`` has the stated law. `weights` encloses every weight,
    and the words drawn so far enclose U; an index is returned only if the inequalities hold for
    all numbers within, else both enclosures shrink. []
    """
    # counts have many ties, most of which callers hold as one object
    objects = {id(x): x for x in exponents}
    distinct = {(x.numerator, x.denominator): x for x in objects.values()}
    places = {key: place for place, key in enumerate(distinct)}
    place_of = {key: places[x.numerator, x.denominator] for key, x in objects.items()}
    of_index = [place_of[id(x)] for x in exponents]
    largest = max(distinct.values())
    below = [exponent - largest for exponent in distinct.values()]
    uniform = bits = 0
    digits = _DIGITS
    while True:
        words = np.empty(_WORDS, np.uint64)
        stream.words(words)
        for word in words.tolist():
            uniform, bits = (uniform << 64) | word, bits + 64
        lows, highs = weights(below, digits)
        # the weights up to each index, itself included
        low_ends = list(accumulate(map(lows.__getitem__, of_index)))
        high_ends = list(accumulate(map(highs.__getitem__, of_index)))
        least, most = uniform * low_ends[-1], (uniform + 1) * high_ends[-1]
        # the first whose share cannot end before the number; no later one can begin by then
        index = bisect_left(low_ends, -(-most >> bits))
        starts_after = high_ends[index - 1] << bits if index else 0
        if index < len(low_ends) and least >= starts_after:
            return index
        digits *= 2


def weights(exponents: Sequence[Fraction], digits: int) -> tuple[list[int], list[int]]:
    """Whole numbers below and above ``exp(x) 10^digits``, for every exponent x <= 0.

    The quotient's relative error of 10^-digits moves exp(x) by at most |x| exp(x) 10^-digits, and
    |x| exp(x) < 0.4; the exponential and the product round by half a unit each. So three units are
    more than enough.
    """
    context = Context(digits, ROUND_HALF_EVEN, MIN_EMIN, MAX_EMAX)
    scale = Decimal(10) ** digits
    lows, highs = [], []
    for x in exponents:
        unit = 0
        if x > -3 * digits:  # exp of anything smaller is below 10^-digits
            quotient = context.divide(Decimal(x.numerator), Decimal(x.denominator))
            unit = int(context.multiply(context.exp(quotient), scale))
        lows.append(max(0, unit - 3))
        highs.append(unit + 3)
    return lows, highs
