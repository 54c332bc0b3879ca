"""Coins of any chance, to 128 bits of it."""

from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import binom

from dpoptim.noise import KeyStream, exact_bernoulli
from dpoptim.noise.exact_bernoulli import rare_heads, toss_coins

FAILURE = 1e-9  # of a frequency's check under a right implementation; seeds are fixed


class Given:
    """A stream whose words are given."""

    def __init__(self, *words: int) -> None:
        self.given = [*words]

    def words(self, out: NDArray[np.uint64]) -> None:
        for place in range(len(out)):
            out[place] = self.given.pop(0)


@given(st.floats(0, 1, exclude_max=True), st.integers(-2, 2))
def test_a_coin_shows_heads_just_below_its_chance(chance: float, beside: int) -> None:
    """Of the 2^128 numbers, floor(chance 2^128) are heads: those below it."""
    threshold = int(Fraction(chance) * 2**128)
    number = min(max(threshold + beside, 0), 2**128 - 1)
    stream: Any = Given(number >> 64, number & (2**64 - 1))
    assert bool(toss_coins(stream, np.array([chance]))[0]) == (number < threshold)


def test_the_ends_need_no_luck() -> None:
    stream = KeyStream.from_seed(1, "test")
    assert toss_coins(stream, np.ones(1000)).all()
    assert not toss_coins(stream, np.zeros(1000)).any()
    assert len(rare_heads(stream, 10_000, 0.0)) == len(rare_heads(stream, 0, 0.1)) == 0
    assert len(rare_heads(stream, 100, 1.0)) == 100


@pytest.mark.one_in(2)
@pytest.mark.parametrize("chance", [0.9, 0.5, 0.3, 2.0**-5, 3e-3, 2.0**-10, 1e-5])
def test_frequencies(chance: float) -> None:
    coins = 3_000_001  # no multiple of a block
    stream = KeyStream.from_seed(2, f"test {chance}")
    heads = rare_heads(stream, coins, chance)
    assert (np.diff(heads) > 0).all()
    assert heads[0] >= 0
    assert heads[-1] < coins
    for found in (len(heads), int(toss_coins(stream, np.full(coins, chance)).sum())):
        assert FAILURE < binom.cdf(found, coins, chance) < 1 - FAILURE
    halves = (heads < coins // 2).sum()
    assert FAILURE < binom.cdf(halves, len(heads), 0.5) < 1 - FAILURE


def test_rare_heads_are_drawn_at_the_cost_of_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    honest = exact_bernoulli.random_words

    def words(stream: KeyStream, count: int) -> NDArray[np.uint64]:
        drawn.append(count)
        return honest(stream, count)

    monkeypatch.setattr(exact_bernoulli, "random_words", words)
    heads = rare_heads(KeyStream.from_seed(3, "test"), 10_000_000, 1e-5)
    assert 50 < len(heads) < 170
    assert sum(drawn) < 10_000_000 / 16_384 + 10 * len(heads)


def test_thresholds_are_met_to_2_to_the_minus_40() -> None:
    """What `gate.row_selection` says of the normal distribution function: on its lower half."""
    with mpmath.workdps(60):
        for x in np.linspace(-36, 0, 241).tolist():
            exact = mpmath.ncdf(mpmath.mpf(x))
            assert abs(mpmath.mpf(float(ndtr(x))) / exact - 1) < 2.0**-40, x
