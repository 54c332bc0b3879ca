"""A regression's scores on private records: three sums, then how far single records scatter.

Intervals need the variance of single records' errors. No bound on it that follows from the means
is near the truth: the largest error times the mean error is, at usual scales of a target, a hundred
times too much. So a tenth of the price is kept for two histograms of it, on a logarithmic scale,
around what the sums have said.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpoptim.accounting.guarantee import Guarantee
from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.public_numbers import relation_of
from dpoptim.arguments import real_number
from dpoptim.data.input_arrays import number_array, one_axis
from dpoptim.evaluation.evaluate import Delta, price_and_records
from dpoptim.evaluation.intervals import Interval, mean_square, of_a_mean, of_r2
from dpoptim.evaluation.scored_records import LABEL, Records, kind_of_records, with_notes
from dpoptim.gate import FilteredGate
from dpoptim.statistics import (
    BOUND_ROUNDING,
    Floats,
    bounded_sum,
    guarantee_of,
    histogram_bound,
    noisy_sum,
    paid_gate,
)
from dpoptim.target_range import TargetBound, TargetRange

HIDDEN = (
    "hidden by the noise: more records, a larger epsilon or bounds nearer to the targets show R2"
)
SPREAD = 0.1  # of the price (mu^2), for the histograms
LEFT = 1 - 1e-9  # of each price: their squares add up to the whole's, with rounding
# Of the squared norm of a record's addition, for squared residual, target, and squared target: R2
# is the more sensitive to the first, by four times the inverse of the targets' variance.
SHARES = (0.7, 0.2, 0.1)
WEIGHTS = 2 * math.sqrt(SHARES[0]), math.sqrt(SHARES[1]), 2 * math.sqrt(SHARES[2])
COUNTED = 0.15  # of that square, for the number of records, where it is not public
BINS = 24  # of half an octave: down to 1 / 4,096 of the largest


@dataclass(frozen=True)
class RegressorScores:
    """Released scores of a regression.

    Attributes:
        squared_error: mean, in squared units of the target, of targets and predictions cut to the
            bound.
        r2: 1 - squared error / variance of the targets, with its interval.
        guarantee: of both.
    """

    squared_error: Interval
    r2: Interval
    guarantee: Guarantee

    def __str__(self) -> str:
        hidden = f"\n{HIDDEN}" if self.r2.high - self.r2.low > 1 else ""
        return (
            f"R2             {self.r2}\nsquared error  {self.squared_error}{hidden}\n"
            f"{self.guarantee}"
        )


def evaluate_regressor(
    predictions: object,
    y: object,
    *,
    target_bound: TargetBound,
    epsilon: float,
    delta: Delta = "auto",
    confidence: float = 0.95,
    neighboring: str | None = None,
    n: int | None = None,
    ledger: Ledger | None = None,
    label: str = LABEL,
    records: Records | None = None,
    noise_seed: int | None = None,
) -> RegressorScores:
    """R2 and squared error on private records; arguments as for `evaluate_classifier`.

    Args:
        predictions, y: shape (n,).
        target_bound: public bound on |y|, or ``(lowest, highest)`` of y, to which targets and
            predictions are cut. R2's noise grows with the square of the range over the targets'
            variance.
        epsilon, delta, confidence, neighboring, n: as for `evaluate_classifier`.
        ledger, label, records, noise_seed: as for `evaluate_classifier`.

    Returns:
        noisy scores, and the guarantee.

    Raises:
        ValueError: unequal shapes, a setting out of range, or a ledger that holds other charges
            and no ``records``; before anything is spent.

    **Guarantee.** ``guarantee``. With t and r the target and half the residual in units of the
    bound, a record adds ``(r^2 - 1/2, t, t^2 - 1/2)``, and 1 where their number is not public,
    weighted to a length of at most 1, to which it is scaled down; then one half to the square in
    each of two histograms, whose bins depend on what was released. Both are Gaussian releases of
    one filter, and mu^2 is divided between them.

    Examples:
        >>> import numpy as np
        >>> from dpoptim.evaluation import evaluate_regressor
        >>> y = np.linspace(-1, 1, 2_000)
        >>> scores = evaluate_regressor(y, y, target_bound=1.0, epsilon=1.0)  # always right
        >>> scores.squared_error.value < 0.1
        True
    """
    allowed = TargetRange.of(target_bound)
    bound = allowed.half
    level = real_number("confidence", confidence)
    with np.errstate(over="ignore"):  # a warning would tell of a record
        found = number_array("predictions", one_axis("predictions", predictions)) - allowed.middle
        true = number_array("y", one_axis("y", y)) - allowed.middle
    if found.shape != true.shape:
        raise ValueError("predictions and y must have one number for each record, of shape (n,).")
    if not 0 < level < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence!r}.")
    relation = relation_of(neighboring, ledger)
    kind = kind_of_records(records, ledger, label)
    size, mu, number, said = price_and_records(epsilon, delta, n, len(true), relation)
    counted = relation == "add-or-remove-one"
    with paid_gate(mu, relation, label=label, ledger=ledger, noise_seed=noise_seed) as gate:
        sums, noise = released_sum(
            gate,
            regressor_rows(found, true, bound, counted=counted),
            BOUND_ROUNDING,
            mu * math.sqrt(1 - SPREAD),
        )
        weights = np.array(WEIGHTS) * math.sqrt(1 - COUNTED if counted else 1.0)
        in_count = noise / math.sqrt(COUNTED) if counted else 0.0
        count = max(float(sums[3]) / math.sqrt(COUNTED), 1.0) if counted else float(size)
        residual, first, second = sums[:3] / count / weights
        by_residual, by_first, by_second = noise / count / weights
        by_count = in_count / count  # relative
        error, mean = float(np.clip(residual + 0.5, 0, 1)), float(np.clip(first, -1, 1))
        of_sums = float(np.hypot(by_second, 2 * mean * by_first))
        from_count = float(second) - 2 * mean**2
        of_variance = math.hypot(of_sums, from_count * by_count)
        variance = max(float(second) + 0.5 - mean**2, of_variance)
        ratio = 4 * error / variance
        farthest = max(4.0, ratio * (1 + abs(mean)) ** 2)
        counts, noise = released_sum(
            gate,
            spread_rows(found, true, bound, error, mean, ratio, farthest),
            histogram_bound(relation) * BOUND_ROUNDING,
            mu * math.sqrt(SPREAD),
        )
    scattered = [
        mean_square(half, largest, math.sqrt(2) * noise) / count
        for half, largest in zip(
            math.sqrt(2) * counts.reshape(2, BINS), (1.0, farthest), strict=True
        )
    ]
    squared_error = of_a_mean(
        error * count,
        count,
        math.hypot(by_residual, residual * by_count) * count,
        confidence=level,
        variance=scattered[0],
    )
    unit = 4 * bound * bound  # infinite where its square is
    scaled = Interval(
        unit * squared_error.value, unit * squared_error.low, unit * squared_error.high, level
    )
    # a square in a range has at most the range times its mean
    most = (max(4 * error, 4 / (count + 2)) + ratio * variance) * farthest
    r2 = of_r2(
        ratio,
        variance,
        sampled=min(scattered[1], most),
        noise=math.hypot(
            4 * by_residual, ratio * of_sums, (4 * residual - ratio * from_count) * by_count
        ),
        n=count,
        confidence=level,
    )
    guarantee = guarantee_of(gate, number, noise_seed=noise_seed)
    return RegressorScores(scaled, r2, with_notes(guarantee, said, kind, ledger))


def released_sum(
    gate: FilteredGate, rows: Floats, norm_bound: float, mu: float
) -> tuple[Floats, float]:
    """The noisy sum of ``rows``, each at most 1 long, and its noise's standard deviation."""
    paid = mu * LEFT
    noisy = noisy_sum(gate, bounded_sum(rows, 1.0), norm_bound=norm_bound, mu=paid)
    return noisy, gate.deviation(norm_bound, paid)


def in_units(
    predictions: Floats, y: Floats, bound: float
) -> tuple[NDArray[np.bool_], Floats, Floats]:
    """Find finite records, their targets and half their residuals, in units of the bound."""
    finite = np.asarray(np.isfinite(predictions) & np.isfinite(y))
    target = np.clip(np.where(finite, y, 0.0), -bound, bound) / bound
    found = np.clip(np.where(finite, predictions, 0.0), -bound, bound) / bound
    return finite, target, (target - found) / 2


def regressor_rows(
    predictions: Floats, y: Floats, bound: float, *, counted: bool = False
) -> Floats:
    """Each record's addition, shape (n, 4); the last counts it, or is 0. Private."""
    finite, target, residual = in_units(predictions, y, bound)
    rows = np.zeros((len(target), 4))
    rows[:, :3] = np.stack([residual**2 - 0.5, target, target**2 - 0.5], axis=1) * WEIGHTS
    if counted:
        rows[:, :3] *= math.sqrt(1 - COUNTED)
        rows[:, 3] = math.sqrt(COUNTED)
    rows[~finite] = 0.0
    return rows


def spread_rows(
    predictions: Floats,
    y: Floats,
    bound: float,
    error: float,
    mean: float,
    ratio: float,
    farthest: float,
) -> Floats:
    """Each record's addition to both histograms, shape (n, 2 BINS). Private.

    Args:
        error, mean, ratio: released: mean of (half the residual)^2, mean target, 1 - R2.
        farthest: the largest that the second may be.

    The first is of squared residuals around their mean; the second of what a record adds to
    ``squared error - ratio * variance``, which is 0 on average, and over the variance is what it
    moves R2 by.
    """
    finite, target, residual = in_units(predictions, y, bound)
    off = np.abs(residual**2 - error), np.abs(4 * residual**2 - ratio * (target - mean) ** 2)
    rows = np.zeros((len(target), 2, BINS))
    for half, (value, largest) in enumerate(zip(off, (1.0, farthest), strict=True)):
        octaves = -np.log2(np.clip(value / largest, 2.0**-BINS, 1.0))
        place = np.minimum((2 * octaves).astype(int), BINS - 1)
        rows[np.arange(len(target)), half, place] = math.sqrt(0.5)
    rows[~finite] = 0.0
    return rows.reshape(len(target), 2 * BINS)
