"""Gumbel noise: the right law, tails included; a choice by it is the exponential mechanism."""

import numpy as np
from scipy.stats import gumbel_r, kstest

from dpoptim.noise.gumbel import standard_gumbel
from dpoptim.noise.stream import KeyStream


def test_draws_are_standard_gumbel() -> None:
    """Kolmogorov-Smirnov at 1e-6 (and the seed is fixed)."""
    draws = standard_gumbel(KeyStream.from_seed(0, "test"), 200_000)
    assert kstest(draws, gumbel_r.cdf).pvalue > 1e-6
    assert draws.max() > 10


class Words:
    """A stream that yields given words."""

    def __init__(self, *words: int) -> None:
        self._words = np.array(words, np.uint64)

    def words(self, out: np.ndarray) -> None:
        out[:] = self._words


def test_the_tails_are_finite_and_keep_their_order() -> None:
    step = 1 << 11
    words = [0, step, 1 << 62, (1 << 63) - step, 1 << 63, (1 << 64) - 2 * step, (1 << 64) - step]
    draws = standard_gumbel(Words(*words), len(words))
    assert np.isfinite(draws).all()
    assert (np.diff(draws) > 0).all()
    assert draws[0] < -3.6
    assert draws[-1] > 37  # -log(-log(1 - 2^-54))
