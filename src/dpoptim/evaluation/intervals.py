"""Figures with confidence intervals of sampling and noise together; all post-processing."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from dpoptim.statistics import Floats

DRAWS = 400  # of the parametric bootstrap


@dataclass(frozen=True)
class Interval:
    """A measured figure, and where the population's lies with the given confidence.

    Attributes:
        value: the point estimate.
        low, high: ends of the interval, cut to the figure's range.
        confidence: such as 0.95; approximate, by normal limits.
    """

    value: float
    low: float
    high: float
    confidence: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f}, {100 * self.confidence:g} %)"


def of_a_mean(
    total: float, n: float, noise: float, *, confidence: float, low: float = 0.0, high: float = 1.0
) -> Interval:
    """The mean of n values in [low, high] from their noisy sum.

    Args:
        noise: standard deviation of the noise in the sum.

    A value in a range has at most the variance (high - mean)(mean - low) (Bhatia and Davis 2000),
    for counts exactly that.
    """
    mean = min(max(total / n, low), high)
    # Near the ends the estimate of the variance is too good to be true: one value of n is taken to
    # be otherwise.
    inner = min(max(mean, low + (high - low) / (n + 2)), high - (high - low) / (n + 2))
    deviation = math.sqrt((high - inner) * (inner - low) / n + (noise / n) ** 2)
    reach = float(ndtri((1 + confidence) / 2)) * deviation
    return Interval(mean, max(low, mean - reach), min(high, mean + reach), confidence)


def of_r2(
    error: float, mean: float, variance: float, *, n: float, noise: float, confidence: float
) -> Interval:
    """1 - 4 error / variance, from three noisy means of n records each.

    Args:
        error: mean of (half the residual)^2, in [0, 1].
        mean, variance: of targets in [-1, 1].
        noise: standard deviation of the noise in each of the means of (half the residual)^2, of
            the targets, and of their squares.

    To first order in what the three are off by. How sampling moves error and variance together is
    not released, so their deviations are added, as if always for the worse; the noise of the three
    is independent. A square in a range has at most the variance of `of_a_mean`.
    """
    by_error, by_variance = 4 / variance, 4 * error / variance**2
    farthest = (1 + abs(mean)) ** 2  # of a target from the mean, squared
    one = 1 / (n + 2)  # as in `of_a_mean`: of n values one is taken to be otherwise
    likely = min(max(error, one), 1 - one)
    spread = min(max(variance, one), farthest)
    sampled = by_error * math.sqrt(likely * (1 - likely) / n)
    sampled += by_variance * math.sqrt(spread * max(farthest - spread, one) / n)
    noisy = noise * math.hypot(by_error, by_variance, 2 * mean * by_variance)
    reach = float(ndtri((1 + confidence) / 2)) * math.hypot(sampled, noisy)
    value = 1 - by_error * error
    return Interval(value, value - reach, min(1.0, value + reach), confidence)


def area_under_curve(counts: Floats) -> float:
    """AUC from a histogram of scores, shape (2, bins), by class; ties in a bin count half.

    Noisy counts go in as they are: those of the two classes have independent noise, so the number
    of ordered pairs is unbiased, which it would not be if negative counts were cut to 0.
    """
    negative, positive = counts
    below = np.cumsum(negative) - negative / 2
    pairs = max(negative.sum(), 1.0) * max(positive.sum(), 1.0)
    return float(np.clip(positive @ below / pairs, 0.0, 1.0))


def receiver_curve(counts: Floats) -> tuple[Floats, Floats]:
    """False and true positive rates at each edge between bins, from (0, 0) to (1, 1).

    Args:
        counts: shape (2, bins), noisy; rates are kept within [0, 1] and monotone, which looks at
            nothing but them.
    """
    above = np.cumsum(counts[:, ::-1], axis=1) / np.maximum(counts.sum(1, keepdims=True), 1.0)
    rates = np.maximum.accumulate(np.clip(above, 0.0, 1.0), axis=1)
    rates[:, -1] = 1.0
    false, true = np.hstack([np.zeros((2, 1)), rates])
    return false, true


def of_the_area(
    counts: Floats, n: float, noise: float, *, confidence: float, seed: int = 0
) -> Interval:
    """AUC from a noisy histogram (2, bins), its interval by bootstrap of sample and noise."""
    value = area_under_curve(counts)
    shares = np.maximum(counts, 0.0) + 1.0
    shares = shares / shares.sum()
    draws = np.random.default_rng(seed)  # of released numbers: nothing private is drawn with it
    again = [
        area_under_curve(
            draws.multinomial(int(n), shares.ravel()).reshape(counts.shape)
            + noise * draws.standard_normal(counts.shape)
        )
        for _ in range(DRAWS)
    ]
    reach = float(ndtri((1 + confidence) / 2)) * float(np.std(again))
    return Interval(value, max(0.0, value - reach), min(1.0, value + reach), confidence)
