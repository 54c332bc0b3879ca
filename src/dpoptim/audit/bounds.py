"""From the errors of an attack to a lower bound on what a mechanism leaks.

An attacker guesses which of two neighbouring data sets ("absent" or "present" record) was used, in
many independent trials. Clopper-Pearson turns the counts of wrong guesses into upper bounds on
both error rates; what no private mechanism would allow is then refuted. Three conversions, from
the weakest assumption to the strongest:

* ``epsilon_lower_bound``: any (epsilon, delta)-DP mechanism;
* ``gdp_lower_bound``: mu-GDP, hence any composition of full-batch Gaussians;
* `SampledGaussians.lower_bound`: Poisson-subsampled Gaussians of unknown noise.

**Failure probability.** Each bound is above the truth with probability at most ``1 - confidence``,
if the trials are independent and neither they nor their number were chosen by looking at them
(`choose_threshold` sees other trials).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, ndtri

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Errors:
    """Wrong guesses: of "present" in ``absent_trials``, of "absent" in ``present_trials``."""

    false_positives: int
    absent_trials: int
    false_negatives: int
    present_trials: int

    def __post_init__(self) -> None:
        for wrong, trials in (
            (self.false_positives, self.absent_trials),
            (self.false_negatives, self.present_trials),
        ):
            if not (trials >= 1 and 0 <= wrong <= trials):
                raise ValueError(
                    f"counts must satisfy 0 <= wrong <= trials and trials >= 1, got {wrong} of "
                    f"{trials}."
                )

    def upper_bounds(self, confidence: float) -> tuple[float, float]:
        """Upper bounds on both error rates, right together with probability ``confidence``."""
        failure = failure_of(confidence) / 2
        false_positive = clopper_pearson_upper(self.false_positives, self.absent_trials, failure)
        false_negative = clopper_pearson_upper(self.false_negatives, self.present_trials, failure)
        return float(false_positive), float(false_negative)


def clopper_pearson_upper(count: ArrayLike, trials: ArrayLike, failure: float) -> Floats:
    """Exact upper limit of a rate seen ``count`` times in ``trials``; confidence 1 - ``failure``.

    Clopper and Pearson 1934. Broadcasts; in [0, 1].

    Args:
        count: times seen, 0 to ``trials``.
        trials: > 0.
        failure: in (0, 1).

    Returns:
        of the broadcast shape, in [0, 1].

    Examples:
        >>> from dpoptim.audit import clopper_pearson_upper
        >>> float(clopper_pearson_upper(0, 100, 0.05).round(3))
        0.03
    """
    count, trials = np.asarray(count, dtype=float), np.asarray(trials, dtype=float)
    with np.errstate(invalid="ignore"):
        limit = betaincinv(count + 1, np.maximum(trials - count, 1e-300), 1 - failure)
    return np.where(count >= trials, 1.0, limit)


def clopper_pearson_lower(count: ArrayLike, trials: ArrayLike, failure: float) -> Floats:
    """Exact lower limit of a rate; see `clopper_pearson_upper`.

    Args:
        count, trials, failure: as for `clopper_pearson_upper`.

    Returns:
        of the broadcast shape, in [0, 1].

    Examples:
        >>> from dpoptim.audit import clopper_pearson_lower
        >>> float(clopper_pearson_lower(100, 100, 0.05).round(3))
        0.97
    """
    return 1 - clopper_pearson_upper(
        np.asarray(trials, dtype=float) - np.asarray(count, dtype=float), trials, failure
    )


def epsilon_lower_bound(errors: Errors, delta: float, confidence: float) -> float:
    """The largest epsilon that the errors refute at ``delta``, in both directions; 0 if none.

    (epsilon, delta)-DP forces ``FPR + e^epsilon FNR >= 1 - delta`` and the same with the two
    exchanged (Kairouz, Oh and Viswanath 2015, Theorem 2.1).

    Args:
        errors: of the attack, counted.
        delta: of the claim, in [0, 1).
        confidence: in (0, 1).

    Returns:
        epsilon >= 0.

    Examples:
        >>> from dpoptim.audit import Errors, epsilon_lower_bound
        >>> errors = Errors(
        ...     false_positives=10, absent_trials=1_000, false_negatives=10, present_trials=1_000
        ... )
        >>> 3.0 < epsilon_lower_bound(errors, 1e-5, 0.95) < 4.6  # log 99 with endless trials
        True
    """
    false_positive, false_negative = errors.upper_bounds(confidence)
    ratios = (
        (1 - delta - false_positive) / false_negative,
        (1 - delta - false_negative) / false_positive,
    )
    return max(0.0, math.log(max(*ratios, 1.0)))


def gdp_lower_bound(errors: Errors, confidence: float) -> float:
    """The largest mu for which mu-GDP is refuted: ``Phi^-1(1 - FPR) - Phi^-1(FNR)``, at least 0.

    The trade-off curve of mu-GDP is ``Phi(Phi^-1(1 - FPR) - mu)`` (Dong, Roth and Su 2022,
    Definition 3). It bounds epsilon only of mechanisms that are known to be Gaussian.

    Args:
        errors: of the attack, counted.
        confidence: in (0, 1).

    Returns:
        mu >= 0.

    Examples:
        >>> from dpoptim.audit import Errors, gdp_lower_bound
        >>> errors = Errors(
        ...     false_positives=10, absent_trials=1_000, false_negatives=10, present_trials=1_000
        ... )
        >>> 4.0 < gdp_lower_bound(errors, 0.95) < 4.66
        True
    """
    false_positive, false_negative = errors.upper_bounds(confidence)
    return float(separation(false_positive, false_negative))


def separation(false_positive: ArrayLike, false_negative: ArrayLike) -> Floats:
    return np.maximum(0.0, -ndtri(np.asarray(false_positive)) - ndtri(np.asarray(false_negative)))


def failure_of(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(
            f"confidence must be in (0, 1), got {confidence!r}; 0.95 is usual, 1 - 1e-6 for a test "
            "suite."
        )
    return 1 - confidence
