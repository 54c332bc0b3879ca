"""Targets that a plan must keep to, and how much noise that takes.

An estimate in microseconds for comparing many settings, and the exact amount for the one that is
chosen.
"""

import math
from dataclasses import dataclass

import dp_accounting
from scipy.optimize import brentq

from dpoptim.accounting.accountant import check_delta, check_epsilon, compute_epsilon
from dpoptim.accounting.attacker import LEAST_NOISE, AttackerTarget, calibrate_to_attacker
from dpoptim.accounting.canonical import canonical
from dpoptim.accounting.gaussian import gdp_mu
from dpoptim.accounting.guarantee import neighbours_differ_by
from dpoptim.accounting.profiles import rate_and_inner_event
from dpoptim.mechanisms.mechanism import Mechanism, RunShape

MOST_NOISE = 1e9
LARGEST_EXPONENT = 700.0


@dataclass(frozen=True)
class EpsilonAtMost:
    """(epsilon, delta)-differential privacy: epsilon > 0, 1e-14 < delta < 1."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        check_delta(self.delta)

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:g} at delta {self.delta:g}"

    @property
    def mu(self) -> float:
        """The mu of the Gaussian that costs exactly this."""
        return gdp_mu(self.epsilon, self.delta)


Target = EpsilonAtMost | AttackerTarget


class NotEstimatedError(ValueError):
    """A method whose noise has no estimate to plan with."""


def estimated_noise(mechanism: Mechanism, run: RunShape, mu: float) -> float:
    """About the noise multiplier, at least 0.3, at which a run is as private as a mu-GDP Gaussian.

    The central limit theorem for Poisson-sampled Gaussians (Bu, Dong, Long and Su 2020, Corollary
    4), which is exact without sampling: ``mu^2 = sum of q^2 (e^(z^-2) - 1)`` over the steps. Up to
    12 % below the exact noise where steps are few (measured from epsilon 0.3 to 8); no guarantee
    may be stated from it.

    Raises:
        NotEstimatedError: the event is not made of Gaussians.
    """
    apart = neighbours_differ_by(run.neighboring)
    steps = []
    for leaf, count in canonical(mechanism.event(run, 1.0)):
        rate, inner = rate_and_inner_event(leaf)
        if not isinstance(inner, dp_accounting.GaussianDpEvent):
            raise NotEstimatedError(
                "the noise of this method is not Gaussian, and is not estimated."
            )
        steps.append((rate, apart / inner.noise_multiplier, count))

    def excess(log_noise: float) -> float:
        total = 0.0
        for rate, shift, count in steps:
            square = (shift * math.exp(-log_noise)) ** 2
            capped = min(square, LARGEST_EXPONENT)
            total += count * (square if rate == 1 else rate**2 * math.expm1(capped))
        return total - mu**2

    low, high = math.log(LEAST_NOISE), math.log(MOST_NOISE)
    if excess(low) <= 0:
        return LEAST_NOISE
    return math.exp(brentq(excess, low, high, xtol=1e-4))


def exact_noise(target: Target, mechanism: Mechanism, run: RunShape) -> float:
    """The noise multiplier with which the run keeps to the target.

    **Guarantee.** That of `Mechanism.calibrate`, or of `calibrate_to_attacker`.
    """
    start = estimated_noise(mechanism, run, target.mu)
    if isinstance(target, EpsilonAtMost):
        if start <= LEAST_NOISE and least_noise_is_enough(target, mechanism, run):
            return LEAST_NOISE
        return mechanism.calibrate(run, epsilon=target.epsilon, delta=target.delta)
    return calibrate_to_attacker(
        lambda noise: mechanism.event(run, noise), target, neighboring=run.neighboring, start=start
    )


def least_noise_is_enough(target: EpsilonAtMost, mechanism: Mechanism, run: RunShape) -> bool:
    """By a bound that is quick to evaluate where loss distributions are not."""
    event = mechanism.event(run, LEAST_NOISE)
    bound = compute_epsilon(event, target.delta, run.neighboring, accountant="RDP")
    return bound.epsilon <= target.epsilon
