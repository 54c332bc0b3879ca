"""Events whose cost is bounded by Monte Carlo, at a confidence that delta pays for.

**Confidence.** The bound is at ``1 - FAILURE_SHARE delta`` and that share is part of the delta that
is stated: with the chance that the estimate is too low, the release is treated as lost (Wang et
al. 2023). Numbers are drawn from a public seed that is made of the event, so that the same plan
has the same guarantee everywhere, and nobody can choose among seeds. Epsilons are tried from the
largest down, and the first that fails ends the search: only the largest that is not enough can be
passed by mistake, so the confidence is that of one estimate, not of as many as were tried. A
calibration, or a comparison of plans, evaluates many events and keeps one that passed: each has a
part of the failure, for `EVENTS` of them.

Means of bounded variables have an upper confidence bound (Maurer and Pontil 2009, Theorem 4).
"""

import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import dp_accounting as dp
import numpy as np
from numpy.typing import NDArray

from dpoptim.accounting.gaussian import gdp_epsilon

Floats = NDArray[np.float64]
SAMPLES = 1 << 16
ROUGH_SAMPLES = 1 << 13  # for searching
FAILURE_SHARE = 0.05  # of delta: the chance that any of the estimates is too low
EVENTS = 128  # evaluated before one is chosen; calibrations need about twenty
STEP = 0.997  # from one epsilon to the next that is tried
AT_A_TIME = 1 << 20  # numbers


class MonteCarloDpEvent(dp.DpEvent, ABC):
    """An event of one record's part in all outputs of a run, by coins that nobody sees.

    Attributes:
        noise_multiplier: the noise's standard deviation; > 0.
        samples: drawn for each direction.
    """

    noise_multiplier: float
    samples: int

    @property
    @abstractmethod
    def mu(self) -> float:
        """mu of the Gaussian that dominates it: somebody tells the coins."""

    @property
    def told(self) -> dp.GaussianDpEvent:
        """That Gaussian. (By quasi-convexity: all coins' outputs are dominated by it.)"""
        return dp.GaussianDpEvent((1 - 2.0**-40) / self.mu)


def with_told_events(leaves: tuple[tuple[dp.DpEvent, int], ...]) -> dp.DpEvent:
    """The composition with `MonteCarloDpEvent.told` in place of each such event."""
    return dp.ComposedDpEvent(
        [
            dp.SelfComposedDpEvent(
                leaf.told if isinstance(leaf, MonteCarloDpEvent) else leaf, count
            )
            for leaf, count in leaves
        ]
    )


@dataclass(frozen=True)
class Weighted:
    """Samples in ascending order of L.

    Attributes:
        ratios: log L. weights: logarithms. Both shape (samples,).
    """

    ratios: Floats
    weights: Floats


class MonteCarloProfile(ABC):
    """The profile of one event, for add-or-remove-one and zero-out.

    Args:
        event: what is evaluated.
    """

    name = "Monte Carlo"

    def __init__(self, event: MonteCarloDpEvent) -> None:
        self._event = event

    @abstractmethod
    def _bounds(self, epsilon: float, failure: float) -> tuple[float, float]:
        """Upper bounds on both directions' deltas, each at this chance to fail."""

    def _largest(self, delta: float) -> float:
        """The first epsilon that is tried; no sample decides it."""
        return gdp_epsilon(self._event.mu, delta)

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon of a fixed grid of which no larger one fails."""
        enough = gdp_epsilon(self._event.mu, delta)
        epsilon = self._largest(delta)
        while epsilon > 1e-3 and self._passes(epsilon, delta):
            enough, epsilon = min(enough, epsilon), epsilon * STEP
        return enough

    def delta(self, epsilon: float) -> float:
        """A delta of a fixed grid, from which on all larger ones pass."""
        delta, step = 1.0, 0.95
        while delta > 1e-14 and self._passes(epsilon, delta * step):
            delta *= step
        return delta

    def _passes(self, epsilon: float, delta: float) -> bool:
        failure = FAILURE_SHARE * delta / (2 * EVENTS)  # of either direction
        return max(self._bounds(epsilon, failure)) <= (1 - FAILURE_SHARE) * delta


def upper_confidence_bound(values: Floats, samples: int, most: float, failure: float) -> float:
    """An upper confidence bound on the mean of variables in [0, most], all but ``values`` zero."""
    mean = float(values.sum()) / samples
    square = float(np.square(values).sum()) / samples
    variance = max(0.0, square - mean**2) * samples / (samples - 1)
    log = math.log(2 / failure)
    return mean + math.sqrt(2 * variance * log / samples) + 7 * most * log / (3 * (samples - 1))


def public_generator(event: MonteCarloDpEvent, *what: object) -> np.random.Generator:
    """Numbers from a seed that is made of the event and what they are for."""
    seed = hashlib.sha256(repr((event, *what)).encode()).digest()
    return np.random.default_rng(np.frombuffer(seed, np.uint64))


def in_order(ratios: list[Floats], weights: list[Floats]) -> Weighted:
    ratio, weight = np.concatenate(ratios), np.concatenate(weights)
    order = np.argsort(ratio)
    return Weighted(ratio[order], weight[order])
