"""Attacks on Poisson-subsampled Gaussians: claims' curves, thresholds, what errors certify."""

import math
from dataclasses import dataclass

import dp_accounting
import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr, ndtri

from dpoptim.accounting import calibrate_event, compute_epsilon, gdp_epsilon, tradeoff_curve
from dpoptim.audit.bounds import Errors, Floats, clopper_pearson_upper, failure_of, separation
from dpoptim.sampling.sampler import composed_gaussians

_NOISE_ACCURACY = 3e-3  # relative, of the inverted noise multiplier; rounded to the safe side
_LEAST_NOISE = 0.2  # below it a subsampled Gaussian's losses have no usable discretisation
_THRESHOLDS = 400  # candidates between the extreme scores


@dataclass(frozen=True)
class Tradeoff:
    """A claim's trade-off curve: least false negative rates at false positive rates, (k,)."""

    false_positive_rates: Floats
    false_negative_rates: Floats

    def approached(self, false_positive: ArrayLike, false_negative: ArrayLike) -> Floats:
        """How near an attack's errors come to the curve: its separation over the curve's own there.

        Sampled Gaussians are easier to attack at one end of the curve than at the other, which the
        plain separation of `gdp_lower_bound` does not know.
        """
        at = np.clip(false_positive, self.false_positive_rates[0], self.false_positive_rates[-1])
        least = np.interp(at, self.false_positive_rates, self.false_negative_rates)
        return separation(false_positive, false_negative) / np.maximum(separation(at, least), 1e-6)


@dataclass(frozen=True)
class SampledGaussians:
    """A family of mechanisms: ``steps`` Gaussians on Poisson batches, at any noise multiplier.

    Written down here and not taken from a plan, so that a fault in a plan's own event cannot hide
    itself.

    Args:
        sample_rate: q in (0, 1]; 1 for full batches.
        steps: noisy sums, at least 1.
        neighboring: the relation, by name.
        scales: the noise of each step over the family's noise multiplier; empty: all 1.
        rates: of each step, where they differ; then ``sample_rate`` is the largest.
    """

    sample_rate: float
    steps: int
    neighboring: str = "add-or-remove-one"
    scales: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """The member with this noise."""
        if self.scales or self.rates:
            scales = np.array(self.scales or (1.0,) * self.steps)
            rates = np.array(self.rates) if self.rates else self.sample_rate
            return composed_gaussians(noise_multiplier * scales, rates)
        step: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(noise_multiplier)
        if self.sample_rate < 1:
            step = dp_accounting.PoissonSampledDpEvent(self.sample_rate, step)
        return dp_accounting.SelfComposedDpEvent(step, self.steps)

    def tradeoff(self, noise_multiplier: float) -> Tradeoff:
        """The member's curve: exact for full batches, else the lower bound `tradeoff_curve`."""
        rates = ndtr(np.linspace(-4.3, 4.3, 300))
        if self.sample_rate == 1 and not self.rates:
            scale = 2.0 if self.neighboring == "replace-one" else 1.0
            together = (
                float(np.square(1 / np.array(self.scales)).sum()) if self.scales else self.steps
            )
            mu = scale * math.sqrt(together) / noise_multiplier
            return Tradeoff(rates, ndtr(-ndtri(rates) - mu))
        return Tradeoff(
            rates, tradeoff_curve(self.event(noise_multiplier), self.neighboring, rates)
        )

    def least_misses(self, noise_multiplier: float, false_positive: float) -> float:
        """The least false negative rate of any attack on the member with this noise."""
        event = self.event(noise_multiplier)
        return float(tradeoff_curve(event, self.neighboring, [false_positive])[0])

    def trials_that_show_half(
        self, noise_multiplier: float, claimed: float, delta: float, confidence: float
    ) -> int:
        """Trials a world that the best attack needs to refute half of ``claimed`` at this noise."""
        scale = calibrate_event(
            self.event, epsilon=claimed / 2, delta=delta, neighboring=self.neighboring
        )
        return trials_that_show(self.tradeoff(noise_multiplier), self.tradeoff(scale), confidence)

    def lower_bound(self, errors: Errors, delta: float, confidence: float) -> float:
        """Epsilon at ``delta`` of the noisiest member that the errors do not refute, or 0.

        The trade-off curves are ordered by the noise, so every noise above the smallest refuted
        one is refuted too. The bound holds for members of the family, with probability
        ``confidence``; that the code is one of them is what the other audits are for.
        """
        false_positive, false_negative = errors.upper_bounds(confidence)
        mu = float(separation(false_positive, false_negative))
        if mu == 0:
            return 0.0
        if self.sample_rate == 1 and not self.rates:
            return gdp_epsilon(mu, delta)
        # The central limit's noise for this mu is near.
        guess = max(
            _LEAST_NOISE, math.log1p((mu / (self.sample_rate * math.sqrt(self.steps))) ** 2) ** -0.5
        )
        noise = self._smallest_refuted(false_positive, false_negative, guess)
        return (
            0.0
            if math.isinf(noise)
            else compute_epsilon(self.event(noise), delta, self.neighboring).epsilon
        )

    def _smallest_refuted(
        self, false_positive: float, false_negative: float, guess: float
    ) -> float:
        """The least noise multiplier whose curve lies above the point; infinite above 1e4."""

        def refuted(noise: float) -> bool:
            return self.least_misses(noise, false_positive) > false_negative

        low = high = guess
        while not refuted(high):
            low, high = high, 1.15 * high
            if high > 1e4:
                return math.inf
        while low == high or refuted(low):
            if low <= _LEAST_NOISE:
                return low
            high, low = low, max(_LEAST_NOISE, low / 1.15)
        while high > low * (1 + _NOISE_ACCURACY):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if refuted(middle) else (middle, high)
        return high


def choose_threshold(
    absent: ArrayLike, present: ArrayLike, confidence: float, claim: Tradeoff
) -> float:
    """The threshold that would certify most, on trials that must not be used again.

    Args:
        absent, present: scores of the trials without and with the record, shapes (k,) and (l,).
        claim: what the attack is to come near to. Any claim gives a valid threshold.
    """
    absent = np.sort(np.asarray(absent, dtype=float))
    present = np.sort(np.asarray(present, dtype=float))
    both = np.sort(np.concatenate([absent, present]))
    candidates = both[np.linspace(0, len(both) - 1, min(_THRESHOLDS, len(both))).astype(int)]
    false_positives = len(absent) - np.searchsorted(absent, candidates, side="right")
    false_negatives = np.searchsorted(present, candidates, side="right")
    # Shared among the candidates: at the ends of the scores, the best of many is often best by
    # luck.
    failure = failure_of(confidence) / 2 / len(candidates)
    value = claim.approached(
        clopper_pearson_upper(false_positives, len(absent), failure),
        clopper_pearson_upper(false_negatives, len(present), failure),
    )
    return float(candidates[int(np.argmax(value))])


def attainable_errors(claim: Tradeoff, trials: int, confidence: float) -> Errors:
    """The errors of the best attack on a mechanism with this trade-off curve, on average.

    What they certify is the upper limit of what ``trials`` trials a world can be expected to show.
    """
    false_positives = np.round(trials * claim.false_positive_rates).astype(int)
    false_negatives = np.round(trials * claim.false_negative_rates).astype(int)
    failure = failure_of(confidence) / 2
    value = claim.approached(
        clopper_pearson_upper(false_positives, trials, failure),
        clopper_pearson_upper(false_negatives, trials, failure),
    )
    best = int(np.argmax(value))
    return Errors(int(false_positives[best]), trials, int(false_negatives[best]), trials)


def trials_that_show(claim: Tradeoff, weaker: Tradeoff, confidence: float) -> int:
    """Trials a world from which the best attack on ``claim`` can be expected to refute ``weaker``.

    To within a factor of 2, rounded up; both curves at the same false positive rates.
    """
    trials = 16
    while trials < 1 << 50:
        errors = attainable_errors(claim, trials, confidence)
        false_positive, false_negative = errors.upper_bounds(confidence)
        least = np.interp(
            false_positive, weaker.false_positive_rates, weaker.false_negative_rates, right=0.0
        )
        if false_negative < least:
            break
        trials *= 2
    return trials
