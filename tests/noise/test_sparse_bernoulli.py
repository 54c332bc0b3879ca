"""Rare coins: their numbers follow the binomial law exactly, and every place is as likely."""

import math
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
from scipy import stats

from dpoptim.noise import sparse_bernoulli
from dpoptim.noise import stream as stream_module
from dpoptim.noise.stream import KeyStream

BLOCK = sparse_bernoulli.BLOCK


def words_of(*words: int):
    """A source of these words, and of none but these."""
    left = list(words)
    return lambda count: np.array([left.pop(0) for _ in range(count)], np.uint64)


@pytest.mark.set_aside("32")
@pytest.mark.parametrize("j", [5, 8, 20, 32])
def test_the_distribution_is_the_binomial_one(j: int) -> None:
    found = [
        Fraction(total, 2 ** (j * BLOCK)) for total in islice(sparse_bernoulli.distribution(j), 4)
    ]
    p, sofar = Fraction(1, 2**j), Fraction(0)
    for k, value in enumerate(found):
        sofar += math.comb(BLOCK, k) * p**k * (1 - p) ** (BLOCK - k)
        assert value == sofar
    floors = sparse_bernoulli.distribution_floors(j)
    assert floors[-1] == 2**64 - 1
    expected = stats.binom.cdf(np.arange(len(floors)), BLOCK, 2.0**-j)
    np.testing.assert_allclose(floors / 2.0**64, expected, atol=1e-9)


def test_the_distribution_ends_at_one() -> None:
    *_, last = sparse_bernoulli.distribution(1)
    assert last == 2**BLOCK


@pytest.mark.parametrize("j", [14, 20])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_words_beside_a_value_are_told_apart_and_more_bits_decide_in_between(
    j: int, k: int
) -> None:
    value = next(islice(sparse_bernoulli.distribution(j), k, None))
    floor, whole = value >> (j * BLOCK - 64), j * BLOCK
    next_bits = (value - (floor << (whole - 64))) >> (whole - 128)  # of the value, the next 64

    def number(*words: int) -> int:
        return int(sparse_bernoulli.numbers_of_heads(1, j, words_of(*words))[0])

    assert number(floor - 1) == k
    assert number(floor + 1) == k + 1
    assert number(floor, next_bits - 1) == k
    assert number(floor, next_bits + 1) == k + 1
    assert number(floor, next_bits, 0) == k
    assert number(floor, next_bits, 2**64 - 1) == k + 1


def test_the_last_sliver_has_more_heads_than_the_table() -> None:
    table = len(sparse_bernoulli.distribution_floors(20))
    found = sparse_bernoulli.numbers_of_heads(1, 20, words_of(*[2**64 - 1] * 3, *[0] * 8))[0]
    assert found > table


def test_a_place_drawn_twice_is_drawn_again() -> None:
    floors = sparse_bernoulli.distribution_floors(20)
    two, place = int(floors[1]) + 1, 7 << (64 - sparse_bernoulli.PLACE_BITS)
    other = 9 << (64 - sparse_bernoulli.PLACE_BITS)
    draw = words_of(two, 0, place, place, place, other)
    assert sparse_bernoulli.heads_in_blocks(2, 20, draw).tolist() == [7, 9]


def test_of_three_heads_at_one_place_two_are_drawn_again() -> None:
    floors = sparse_bernoulli.distribution_floors(20)
    three = int(floors[2]) + 1
    places = [place << (64 - sparse_bernoulli.PLACE_BITS) for place in (7, 7, 7, 7, 3, 9)]
    draw = words_of(three, *places[:3], *places[3:5], places[5])
    assert sparse_bernoulli.heads_in_blocks(1, 20, draw).tolist() == [3, 7, 9]


def test_no_head_is_beyond_the_coins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MANY", 1)
    stream = KeyStream.from_seed(9, "coins")
    for n in (1, 77, BLOCK - 1):
        drawn = np.concatenate([stream.coins(n, 0.03) for _ in range(400)])
        assert len(drawn)
        assert drawn.max() < n


@pytest.mark.parametrize(("n", "q"), [(3 * BLOCK + 77, 0.02), (40 * BLOCK, 2e-4), (BLOCK, 1e-3)])
def test_coins_by_blocks_are_independent_coins(
    n: int, q: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers: mean and variance within 5.5 sigmas; places: as likely, by chi-square on 97 classes
    that no block size divides. False alarm 1e-7 each.
    """
    monkeypatch.setattr(stream_module, "MANY", BLOCK)
    stream, trials = KeyStream.from_seed(8, "coins"), 600
    drawn = [stream.coins(n, q) for _ in range(trials)]
    assert all((np.diff(heads) > 0).all() for heads in drawn)
    sizes = np.array([len(heads) for heads in drawn])
    mean, variance, excess = stats.binom.stats(n, q, moments="mvk")
    assert abs(sizes.mean() - mean) < 5.5 * math.sqrt(variance / trials)
    assert abs(sizes.var(ddof=1) - variance) < 5.5 * variance * math.sqrt((2 + excess) / trials)
    places = np.concatenate(drawn)
    classes = np.bincount(places % 97, minlength=97)
    expected = np.bincount(np.arange(n) % 97, minlength=97) * (len(places) / n)
    assert stats.chisquare(classes, expected).pvalue > 1e-7
    halves = np.bincount(places * 2 // n, minlength=2)
    assert stats.binomtest(int(halves[0]), len(places), (n + 1) // 2 / n).pvalue > 1e-7
