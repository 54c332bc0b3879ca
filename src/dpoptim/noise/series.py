"""exp and log of products and sums in one order, the same on every processor.

`settle.c` does the same, to the last bit.
"""

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

TERMS = np.array([1 / math.factorial(k) for k in range(14)])  # of the series of exp
ODD_TERMS = np.array([1 / (2 * k + 1) for k in range(11)])  # of that of log, but for its 2
_LOG2_E, _SQRT_HALF = 1.4426950408889634, 0.7071067811865476
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_ROUNDING = 1.5 * 2.0**52  # to which a number is added to round it
CONSTANTS = (_LOG2_E, _SQRT_HALF, _LN2_HIGH, _LN2_LOW, _ROUNDING)


def exponential(x: Floats) -> Floats:
    """exp of numbers from -700 to 0, by products and sums that round alike on every processor."""
    k = (x * _LOG2_E + _ROUNDING) - _ROUNDING
    rest = (x - k * _LN2_HIGH) - k * _LN2_LOW
    return np.ldexp(_polynomial(rest, TERMS), k.astype(np.int64))


def logarithm(x: Floats) -> Floats:
    """log of numbers above 2^-1000 that are not above 1, as `exponential`."""
    m, k = np.frexp(x)
    low = m < _SQRT_HALF
    m, k = np.where(low, m + m, m), k - low
    s = (m - 1.0) / (m + 1.0)
    return k * _LN2_HIGH + ((s + s) * _polynomial(s * s, ODD_TERMS) + k * _LN2_LOW)


def _polynomial(x: Floats, terms: Floats) -> Floats:
    total = np.full_like(x, terms[-1])
    for term in terms[-2::-1]:
        total = total * x + term
    return total
