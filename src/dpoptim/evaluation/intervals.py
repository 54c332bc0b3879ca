"""Figures with confidence intervals of sampling and noise together; all post-processing."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import expit, ndtri

from dpoptim.statistics import Floats

MOST_BINS = 200  # of scores: more take seconds for a hundred thousand records


def bin_edges(bins: int) -> Floats:
    """Edges of bins of scores, (bins + 1,): closer in log-odds towards 1/2.

    Log-odds 2 sinh(3 t), t even in [-1, 1]: the scores of a rare class, which may all be below one
    in a thousand, have some, too. Edges of ``bins`` are among those of any multiple.
    """
    inner = expit(2 * np.sinh(3 * (2 * np.arange(1, bins) / bins - 1)))
    return np.concatenate([[0.0], inner, [1.0]])


def parts_of_a_bin(n: int, noise: float, bins: int) -> int:
    """How many parts each bin of scores is counted in, for the AUC; from public numbers alone.

    Args:
        n: public number of records.
        noise: about the standard deviation of each count.

    As many as make the interval of the area short: of B bins a class spreads over a third or so,
    and ties hide about 3 / (2 B); noise of B counts moves it by about 2 sqrt(B / 12) noise / (n/4).
    """
    wanted = (1.3 * n / noise) ** (2 / 3)
    return max(1, min(round(wanted / bins), MOST_BINS // bins))


@dataclass(frozen=True)
class Interval:
    """A measured figure, and where the population's lies with the given confidence.

    Attributes:
        value: the point estimate.
        low, high: ends of the interval, cut to the figure's range.
        confidence: such as 0.95; approximate, by normal limits. Too high for some hundred records
            of which few decide the figure, with or without privacy; the noise's own variance makes
            up for more than it takes there (docs/guides/tables.md).
    """

    value: float
    low: float
    high: float
    confidence: float

    @property
    def hidden(self) -> bool:
        """Whether a share or an area may be anything from 0 to 1: then `value` says nothing."""
        return self.low <= 0.0 and self.high >= 1.0

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f}, {100 * self.confidence:g} %)"


def of_a_mean(
    total: float,
    n: float,
    noise: float,
    *,
    confidence: float,
    high: float = 1.0,
    variance: float = math.inf,
) -> Interval:
    """The mean of n values in [0, high] from their noisy sum.

    Args:
        noise: standard deviation of the noise in the sum.
        variance: of the values, where something is known of it.

    A value in a range has at most the variance (high - mean) mean (Bhatia and Davis 2000),
    for counts exactly that.
    """
    mean = min(max(total / n, 0.0), high)
    # Near the ends the estimate of the variance is too good to be true: one value of n is taken to
    # be otherwise.
    inner = min(max(mean, high / (n + 2)), high - high / (n + 2))
    most = min(variance, (high - inner) * inner)
    deviation = math.sqrt(most / n + (noise / n) ** 2)
    reach = float(ndtri((1 + confidence) / 2)) * deviation
    return Interval(mean, max(0.0, mean - reach), min(high, mean + reach), confidence)


def of_r2(
    ratio: float,
    variance: float,
    *,
    sampled: float,
    noise: float,
    n: float,
    confidence: float,
) -> Interval:
    """1 - ratio, by the linearisation of error / variance; both in units of the bound.

    Args:
        ratio: released squared error over released variance.
        variance: of the targets, released.
        sampled: mean square of what single records add to ``error - ratio * variance``.
        noise: standard deviation of the noise in that.
    """
    deviation = math.hypot(math.sqrt(sampled / n), noise) / variance
    reach = float(ndtri((1 + confidence) / 2)) * deviation
    return Interval(1 - ratio, 1 - ratio - reach, min(1.0, 1 - ratio + reach), confidence)


def mean_square(counts: Floats, largest: float, noise: float) -> float:
    """The sum of squares of values from a noisy histogram of theirs; rather too much.

    Args:
        counts: of bins of half an octave, from ``largest`` down, the last down to 0.
        noise: standard deviation of each count.

    Large values weigh most, where there are the fewest: a bin that is not there would count with
    its noise. So bins begin where the number of all larger values first stands out of the noise by
    one standard deviation; above it, what was counted and two standard deviations more are taken to
    be in the next bin. Fewer and larger ones, which the noise hides, are not in the result.
    """
    squares = 0.75 * (largest * 2.0 ** (-np.arange(len(counts)) / 2)) ** 2  # of even squares
    larger = np.cumsum(counts)
    seen = np.nonzero(larger > noise * np.sqrt(np.arange(1, len(counts) + 1)))[0]
    first = int(seen[0]) if len(seen) else len(counts) - 1
    likely = np.maximum(counts, 0.0)
    likely[:first] = 0.0
    if first > 0:
        likely[first - 1] = max(float(larger[first - 1]), 0.0) + 2 * noise
    return float(likely @ squares)


def variance_of_loss(
    histogram: Floats, n: float, noise: float, mean: float, *, largest: float, binary: bool
) -> float:
    """The variance of the log-loss from a noisy histogram of scores; rather too much.

    Args:
        histogram: as in `ClassifierScores`.
        noise: standard deviation of each count.
        mean: of the losses.
        largest: where losses are clipped.
        binary: whether scores are of the second of two classes; else of the predicted one.

    A record's bin says between which ends its loss is: -log of a score, or of what a score leaves
    to the others (as all of it, or, with several classes, at most as much as the score). As losses
    l have mean m, for any number t their variance is the mean of (l - m)^2 - t (l - m), which is
    convex in l, so in each bin no more than at one of its ends; the t that gives least is taken
    (the dual of moving losses within their bins; with one bin, Bhatia and Davis's bound). A
    standard deviation of the sum's noise comes on top: where more than that is hidden, the noise of
    the mean loss is many times what its records scatter.
    """
    edges = bin_edges(histogram.shape[1])
    with np.errstate(divide="ignore"):
        of_score = np.minimum(-np.log(edges), largest)
        of_rest = of_score[::-1]
    lows, highs = np.stack([[of_rest[:-1], of_score[1:]], [of_rest[1:], of_score[:-1]]])
    if not binary:
        lows[0], highs[0] = np.maximum(of_rest[:-1], of_score[1:]), largest
    low, high = (lows - mean).ravel(), (highs - mean).ravel()
    t = np.append(low + high, 0.0)[:, None]  # where the worse end of a bin changes
    most = np.maximum(low**2 - t * low, high**2 - t * high)
    sums = most @ histogram.ravel() + noise * np.sqrt((most**2).sum(1))
    return max(0.0, float(sums.min()) / n)


def area_under_curve(counts: Floats) -> Any:
    """AUC from a histogram of scores, shape (..., 2, bins), by class; ties in a bin count half.

    Noisy counts go in as they are: those of the two classes have independent noise, so the number
    of ordered pairs is unbiased, which it would not be if negative counts were cut to 0.
    """
    negative, positive = np.moveaxis(counts, -2, 0)
    below = np.cumsum(negative, -1) - negative / 2
    pairs = np.maximum(negative.sum(-1), 1.0) * np.maximum(positive.sum(-1), 1.0)
    return np.clip((positive * below).sum(-1) / pairs, 0.0, 1.0)


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


def of_the_area(counts: Floats, noise: float, *, confidence: float) -> Interval:
    """AUC from a noisy histogram (2, bins), by class; every area that the counts do not refute.

    How pairs in one bin are ordered is not known: at the low end all of them are taken to be
    wrong, at the high end right; the point estimate counts them half.
    """
    ordered = np.tri(counts.shape[1], k=-1)  # of a pair, by the positive's bin first
    low, _ = _areas_left(counts, ordered, noise, confidence)
    _, high = _areas_left(counts, ordered + np.eye(len(ordered)), noise, confidence)
    if (low, high) == (0.0, 1.0):
        return Interval(0.5, low, high, confidence)
    value = min(max(float(area_under_curve(counts)), low), high)
    return Interval(value, low, high, confidence)


def _areas_left(
    counts: Floats, in_order: Floats, noise: float, confidence: float
) -> tuple[float, float]:
    """Ends of the areas that the counts do not refute, where pairs of bins are ``in_order``.

    An area A is right where pairs in order, less A for every pair, are 0 on average (Fieller 1954:
    the number of pairs is noisy too, and a ratio to it no normal number where few records have a
    class). Of records, that scatters as in DeLong et al. (1988); of noise, by its share in either
    count of a pair. Both are squares in A, so the areas between two roots stay; all, where
    the noise hides how many pairs there are, and the value is then that of guessing.
    """
    likely = np.maximum(counts, 0.0) + 1 / counts.shape[1]
    reach = float(ndtri((1 + confidence) / 2))

    def refuted(area: float) -> float:
        """Above 0 where the counts are too far from this area."""
        excess = in_order - area
        of_positives, of_negatives = excess @ counts[0], counts[1] @ excess
        sampled = likely[1] @ (excess @ likely[0]) ** 2 + likely[0] @ (likely[1] @ excess) ** 2
        of_noise = noise**2 * (np.sum(of_positives**2) + np.sum(of_negatives**2))
        return float((counts[1] @ of_positives) ** 2 - reach**2 * (sampled + of_noise))

    at_0, at_half, at_1 = refuted(0.0), refuted(0.5), refuted(1.0)
    square = 2 * (at_0 + at_1 - 2 * at_half)
    slope = at_1 - at_0 - square
    inside = slope**2 - 4 * square * at_0
    if square > 0 and inside >= 0:
        middle, half = -slope / (2 * square), math.sqrt(inside) / (2 * square)
        if middle - half <= 1 and middle + half >= 0:
            return max(0.0, middle - half), min(1.0, middle + half)
    return 0.0, 1.0
