"""Losses composed on an exponentially tilted scale: deltas below an FFT's rounding, long runs.

A Fourier transform composes T steps with an error of about T 2^-53 in every probability, which is
a floor under delta. Tilting (Esscher 1932; in accounting Gopi, Lee and Wutschitz 2021 use its
cumulants) moves the floor: with p the probabilities of one step's losses l, and K(t) = T log sum p
e^(t l),

    P(L = l) = e^(K(t) - t l) P_t(L = l),    P_t: the T-fold convolution of  p e^(t l) / sum p e^(t
    l).

P_t has its mass around K'(t), so with K'(t) near epsilon its rounding errors enter delta
multiplied by e^(K(t) - t epsilon), the Chernoff bound on delta: they are small *relative to
delta*, however small it is.
"""

import math
import sys
from dataclasses import dataclass

import dp_accounting as dp
import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, next_fast_len, rfft
from scipy.optimize import brentq
from scipy.special import logsumexp

from dpoptim.accounting.canonical import Leaves, NotCoveredError
from dpoptim.accounting.discretised import StepLosses, discretised_losses
from dpoptim.accounting.guarantee import neighboring_name
from dpoptim.accounting.profiles import (
    FINE,
    RenyiProfile,
    interval_of,
    least_epsilon,
    rate_and_inner_event,
)

_OUTSIDE = math.log(1e-15)  # of the tilted probability that may lie outside the window
_MOST_POINTS = 2**22
_RELATIONS = (dp.NeighboringRelation.ADD_OR_REMOVE_ONE, dp.NeighboringRelation.REPLACE_SPECIAL)
Floats = NDArray[np.float64]


class TiltedDistribution:
    """An upper bound on the profile of Poisson-sampled Gaussians, sharp at `deltas`, however small.

    At other deltas it is an upper bound too, but may be a loose one.

    Raises ValueError for other events, and for "replace-one".
    """

    name = "tilted PLD"

    def __init__(
        self, leaves: Leaves, relation: dp.NeighboringRelation, deltas: tuple[float, ...]
    ) -> None:
        if relation not in _RELATIONS:
            raise NotCoveredError(
                f"event: tilted PLD cannot evaluate it under {neighboring_name(relation)}"
            )
        steps = [(*rate_and_inner_event(leaf), count) for leaf, count in leaves]
        if not steps or not all(isinstance(inner, dp.GaussianDpEvent) for _, inner, _ in steps):
            raise NotCoveredError("event: tilted PLD evaluates Poisson-sampled Gaussians only")
        total = sum(count for _, _, count in steps)
        log_mass = math.log(1e-4 * min(deltas) / total)
        renyi = RenyiProfile(leaves, relation)
        interval = interval_of(
            leaves, relation, [renyi.epsilon(d) for d in deltas], deltas, FINE, log_mass
        )
        directions = [
            Composition(
                [
                    (
                        discretised_losses(
                            q, inner.noise_multiplier, interval, log_mass, removed=way
                        ),
                        n,
                    )
                    for q, inner, n in steps
                ],
                interval,
            )
            for way in (True, False)
        ]
        self._tilts = [tuple(one.tilted(0.0) for one in directions)]
        self._tilts += [
            tuple(one.tilted(one.sharp_tilt(delta)) for one in directions) for delta in deltas
        ]

    def delta(self, epsilon: float) -> float:
        return min(1.0, *(max(one.delta(epsilon) for one in pair) for pair in self._tilts))

    def epsilon(self, delta: float) -> float:
        return min(max(one.epsilon(delta) for one in pair) for pair in self._tilts)


class Composition:
    """Discretised losses of several kinds of steps, each with its count, in one direction."""

    def __init__(self, steps: list[tuple[StepLosses, int]], interval: float) -> None:
        self.steps, self.interval = steps, interval
        self.infinite = -math.expm1(
            math.fsum(count * math.log1p(-step.infinite) for step, count in steps)
        )

    def log_moment(self, tilt: float) -> float:
        """K(tilt)."""
        return math.fsum(
            count * float(logsumexp(step.log_probabilities + tilt * step.losses(self.interval)))
            for step, count in self.steps
        )

    def mean(self, tilt: float) -> float:
        """K'(tilt): the mean of the composed loss under the tilt."""
        total = 0.0
        for step, count in self.steps:
            losses = step.losses(self.interval)
            exponents = step.log_probabilities + tilt * losses
            weights = np.exp(exponents - exponents.max())
            total += count * float(weights @ losses / weights.sum())
        return total

    def sharp_tilt(self, delta: float) -> float:
        """The tilt whose Chernoff bound at its own mean is `delta`."""

        def excess(tilt: float) -> float:
            return self.log_moment(tilt) - tilt * self.mean(tilt) - math.log(delta)

        high = 1.0
        while excess(high) > 0:
            high *= 2
            if high > 1e8:
                return 0.0
        return float(brentq(excess, 0.0, high, rtol=1e-2))

    def reach(self, tilt: float, sign: int) -> float:
        """A loss above (sign 1) or below (-1) which lies at most e^_OUTSIDE of the tilted law."""
        here, best = self.log_moment(tilt), math.inf
        for further in np.geomspace(1e-3, 1e4, 36):
            bound = (self.log_moment(tilt + sign * further) - here - _OUTSIDE) / further
            best = min(best, bound)
        return sign * best

    def tilted(self, tilt: float) -> "Tilt":
        """The composed distribution on a window that holds nearly all of the tilted law."""
        low = math.floor(self.reach(tilt, -1) / self.interval)
        high = math.ceil(self.reach(tilt, 1) / self.interval)
        size = next_fast_len(high - low + 1, real=True)
        if size > 4 * _MOST_POINTS:
            raise ValueError("event: its losses are too wide for PLD")
        spectrum = np.zeros(size // 2 + 1, dtype=np.complex128)
        for step, count in self.steps:
            exponents = step.log_probabilities + tilt * step.losses(self.interval)
            one = np.exp(exponents - logsumexp(exponents))
            folded = np.bincount(
                (step.first + np.arange(len(one))) % size, weights=one, minlength=size
            )
            transformed = rfft(folded)
            spectrum += count * np.log(np.where(transformed == 0, 1e-300, transformed))
        values = irfft(np.exp(spectrum), size)
        window = np.roll(values, -(low % size)).clip(min=0.0)
        total = sum(count for _, count in self.steps)
        # As for the untilted transform (profiles.py): measured below 1e-16 T + 3e-15, here with a
        # factor of 16.
        error = 16 * sys.float_info.epsilon * total + 5e-14 + 2 * math.exp(_OUTSIDE)
        return Tilt(tilt, self.log_moment(tilt), low, self.interval, window, error, self.infinite)


@dataclass(frozen=True)
class Tilt:
    """P_t on a grid: probabilities of the losses (low + i) interval.

    Attributes:
      error: bound on the sum of all errors of the probabilities.
      infinite: probability of an infinite loss.
    """

    tilt: float
    log_moment: float
    low: int
    interval: float
    probabilities: Floats
    error: float
    infinite: float

    def delta(self, epsilon: float) -> float:
        """infinite + sum over l > epsilon of (1 - e^(epsilon - l)) P(l), and possible errors."""
        start = max(0, math.floor(epsilon / self.interval) + 1 - self.low)
        losses = (self.low + np.arange(start, len(self.probabilities))) * self.interval
        above = losses - epsilon
        terms = -np.expm1(-above) * np.exp(-self.tilt * above) * self.probabilities[start:]
        exponent = self.log_moment - self.tilt * epsilon + 1e-14 * abs(self.log_moment) + 1e-9
        # The largest factor that meets an error is at most 1, since losses below epsilon do not
        # count.
        return min(
            1.0, self.infinite + math.exp(min(exponent, 700.0)) * (float(terms.sum()) + self.error)
        )

    def epsilon(self, delta: float) -> float:
        """The least epsilon >= 0 of at most `delta`, to 1e-6 of it; inf if the grid has none."""
        high = max(self.low + len(self.probabilities), 1) * self.interval
        if self.delta(0.0) <= delta:
            return 0.0
        if self.delta(high) > delta:
            return math.inf
        return least_epsilon(self.delta, delta, high)
