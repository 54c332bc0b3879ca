"""The exponential mechanism's draw: exact odds, however close or far apart the exponents are."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from mpmath import mp, mpf

from dpoptim.noise.exponential_mechanism import exponential_choice, weights
from dpoptim.noise.stream import KeyStream


class Words:
    """A stream that yields given words, then those of a seed."""

    def __init__(self, *words: int) -> None:
        self.given, self.rest = list(words), KeyStream.from_seed(0, "rest")

    def words(self, out: np.ndarray) -> None:
        self.rest.words(out)
        for i in range(len(out)):
            if self.given:
                out[i] = self.given.pop(0)


def test_frequencies() -> None:
    exponents = [Fraction(x) for x in (0.0, -1.0, 1.0, -5.0)]
    stream = KeyStream.from_seed(0, "test")
    counts = np.bincount(
        [exponential_choice(stream, exponents) for _ in range(20_000)], minlength=4
    )
    expected = np.exp([0.0, -1.0, 1.0, -5.0])
    expected *= 20_000 / expected.sum()
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


def boundary(exponents: Sequence[Fraction], index: int, bits: int) -> int:
    """The first ``bits`` bits of the uniform number at which the choice goes from index to index +
    1.
    """
    shares = [mp.exp(mpf(x.numerator) / mpf(x.denominator)) for x in exponents]
    return int(mp.floor(sum(shares[: index + 1]) / sum(shares) * mpf(2) ** bits))


def test_the_odds_are_exact_to_the_last_of_many_bits() -> None:
    """At 256 bits on either side of a boundary, computed independently, the choice is on that
    side.
    """
    with mp.workdps(200):
        exponents = [Fraction(x) for x in (0.3, -2.0, 0.1, -700.0, 1e-300)]
        for index in (0, 1, 2):
            edge = boundary(exponents, index, 256)
            for offset, expected in ((-1, index), (1, index + 1 + (index == 2))):
                words = [(edge + offset) >> shift & (2**64 - 1) for shift in (192, 128, 64, 0)]
                assert exponential_choice(Words(*words), exponents) == expected


def test_far_apart_and_alone() -> None:
    stream = KeyStream.from_seed(1, "test")
    assert exponential_choice(stream, [Fraction(-(10**30)), Fraction(0), Fraction(-(10**9))]) == 1
    assert exponential_choice(stream, [Fraction(7, 3)]) == 0


def test_weights_are_enclosed() -> None:
    with mp.workdps(120):
        for x in (Fraction(0), Fraction(-1, 3), Fraction(-50), Fraction(-119), Fraction(-(10**6))):
            for digits in (40, 80):
                (low,), (high,) = weights([x], digits)
                true = mp.exp(mpf(x.numerator) / mpf(x.denominator)) * mpf(10) ** digits
                assert low <= true <= high
                assert high - low <= 6
