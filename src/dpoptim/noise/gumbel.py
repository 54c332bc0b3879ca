"""Standard Gumbel noise from a cryptographic stream: the exponential mechanism as "add noise, report the largest"."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpoptim.noise.stream import KeyStream

__all__ = ["standard_gumbel"]


def standard_gumbel(stream: KeyStream, n: int) -> NDArray[np.float64]:
    """`n` independent standard Gumbel draws, float64, shape (n,).

    Inversion of ``exp(-exp(-x))`` at the middle of 2^53 equal cells: a choice among n candidates has the probabilities
    of the exponential mechanism to about n 2^-53.
    """
    words = np.empty(n, np.uint64)
    stream.words(words)
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    # Near 1, log(uniform) would lose the tail to rounding; log1p of the exact distance from 1 keeps it.
    from_above = ((np.uint64((1 << 53) - 1) - (words >> np.uint64(11))).astype(np.float64) + 0.5) * 2.0**-53
    log_uniform = np.where(uniform < 0.5, np.log(uniform), np.log1p(-np.minimum(from_above, 0.5)))
    return -np.log(-log_uniform)
