"""How many trials a private search makes, of which settings: coins that read no data."""

import math
from functools import lru_cache

import numpy as np
from scipy.optimize import brentq

from dpoptim.noise.stream import KeyStream

_BITS = 256  # of the weights


def logarithmic_parameter(mean: float) -> float:
    """gamma in (0, 1) of the logarithmic law of this mean > 1: (1/gamma - 1) / log(1/gamma)."""
    return float(
        brentq(
            lambda gamma: (1 / gamma - 1) / -math.log(gamma) - mean, 1e-12, 1 - 1e-12, xtol=1e-16
        )
    )


def logarithmic_count(stream: KeyStream, mean: float) -> int:
    """K >= 1 with P(K = k) proportional to (1 - gamma)^k / k (Papernot, Steinke 2022, eta = 0).

    The weights are whole numbers, cut at 2^-256 of their unit, and the choice among them is exact:
    the law is right to a total variation of 2^-230.
    """
    ends = _ends(mean)
    drawn = even_choice(stream, ends[-1])
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if ends[middle] <= drawn else (low, middle)
    return low + 1


@lru_cache(maxsize=16)
def _ends(mean: float) -> tuple[int, ...]:
    """Sums of the weights of the first k counts."""
    numerator, denominator = (1 - logarithmic_parameter(mean)).as_integer_ratio()
    power, ends, total, k = 1 << _BITS, [], 0, 1
    while (power := power * numerator // denominator) // k > 0:
        total += power // k
        ends.append(total)
        k += 1
    return tuple(ends)


def even_choice(stream: KeyStream, limit: int) -> int:
    """A whole number in [0, limit), every one equally likely; by rejection, exactly."""
    words = np.empty(-(-limit.bit_length() // 64), np.uint64)
    while True:
        stream.words(words)
        drawn = 0
        for word in words.tolist():
            drawn = drawn << 64 | word
        drawn >>= 64 * len(words) - limit.bit_length()
        if drawn < limit:
            return drawn
