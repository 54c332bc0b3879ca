"""Cost of the best of a random number of Gaussian trials, from the order of their scores.

K >= 1 trials, K of generating function phi, draw (output, score) each; the best score's output is
released. With scores made distinct by a coin of each trial, let F be a trial's distribution
function *in the order of scores*: then the best has density phi'(F) times a trial's.

**Theorem.** Let a trial's laws on two neighbours be no easier to tell apart than f, a symmetric
trade-off function (Dong, Roth and Su 2022), and g(v) = f(1 - v): what has chance v on one side has
at least g(v) on the other. Let b(u) = phi'(g(u)), and r(u) the largest of phi'(w) / b(w) over w <=
u. For every epsilon the best of K has

    delta(epsilon) <= the integral over v in (0, 1) of b(1 - v) [r(1 - v) - e^epsilon g'(v)]_+.

**Proof.** Q and Q' are the trial's laws, F and F' their distribution functions in the order of
scores, A and A' the laws of the best, l = dQ'/dQ. (1) F' >= g(F), and phi' rises, so dA' =
phi'(F') dQ' >= b(F) dQ', while dA = phi'(F) dQ <= r(F) b(F) dQ. So the integral of (dA - e^epsilon
dA')_+ is at most the mean under Q of h(F, l) = b(F) [r(F) - e^epsilon l]_+. (2) F is uniform under
Q. b and r rise, so h(u, l) falls in l the faster the larger u is: of all joint laws with the same
marginals the mean is largest where the largest u meet the smallest l (Tchen 1980). It is at most
the integral of h(1 - v, l(v)) over v in (0, 1), l(v) the quantiles of l under Q, which rise. (3)
That integrand is positive on an interval (0, w) and nowhere else, since r(1 - v) falls. The
integral of l up to v, m(v), is the least that Q' gives to what has chance v under Q: m >= g.
By parts, that of b(1 - v) dm over (0, w) is b(1 - w) m(w) plus that of m against the rise of b,
and only falls where g takes the place of m. []

This charges for the order of scores that is worst and for the output that is worst, which need not
go together; an attack computed exactly shows over nine tenths of it (``audit/searches.py``).

Searches are charged by the published bound (Papernot and Steinke 2022, Theorem 2, which
dp_accounting evaluates), never below it; this one, a fifth smaller, says how much of that is slack.

**Gaussian trials** have f of mu: v = Phi(z), g(v) = Phi(z - mu), g'(v) = exp(mu z - mu^2 / 2). The
integral is a sum over cells of z, each with the largest value that its factors have there, for b, r
and [.]_+ fall in z. So it is an upper bound whatever the grid.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import dp_accounting as dp
import numpy as np
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr

from dpoptim.accounting.guarantee import neighbours_differ_by

if TYPE_CHECKING:
    from dpoptim.accounting.profiles import RenyiProfile

Floats = NDArray[np.float64]

ROUNDING = 1 + 1e-6  # of sums, of gamma, of distribution functions
_CELLS, _JOINED = 1 << 18, 16  # for ratios; so many cells are one for sums
_FARTHEST = 9.0  # Phi(-9) = 1e-19


class SelectionProfile:
    """The profile of the best of a random number of mu-GDP trials, by the theorem above.

    Args:
        mu: of one trial, >= 0.
        mean, shape: of the truncated negative binomial number of trials; mean > 1, shape >= 0.
        renyi: the profile of the same event by its divergences, taken where it is smaller.
    """

    name = "order statistics"

    def __init__(self, mu: float, mean: float, shape: float, renyi: RenyiProfile) -> None:
        self._renyi = renyi
        edges, self._density, self._ratio = _falling(mu, mean, shape)
        self._chances = np.diff(ndtr(edges))
        self._losses = np.concatenate([[-np.inf], mu * edges[1:-1] - mu**2 / 2])  # log g'

    def delta(self, epsilon: float) -> float:
        return min(self._delta(epsilon), self._renyi.delta(epsilon))

    def epsilon(self, delta: float) -> float:
        most = self._renyi.epsilon(delta)
        if self._delta(0.0) <= delta:
            return 0.0
        if not self._delta(most) < delta:
            return most
        found = float(brentq(lambda e: self._delta(e) - delta, 0.0, most, xtol=1e-12, rtol=1e-10))
        while self._delta(found) > delta:
            found *= 1 + 1e-9
        return min(found, most)

    def _delta(self, epsilon: float) -> float:
        with np.errstate(over="ignore"):
            left = np.maximum(self._ratio - np.exp(epsilon + self._losses), 0.0)
        return min(1.0, ROUNDING * float((self._density * left) @ self._chances))


def trials_of(
    event: dp.DpEvent, relation: dp.NeighboringRelation
) -> tuple[float, float, float] | None:
    """mu of a selection's trials, and the mean and shape of their number; None: not Gaussian.

    Args:
        event: as `canonical` leaves it, whose noise is over the bound C.
    """
    match event:
        case RepeatAndSelectDpEvent(
            event=dp.GaussianDpEvent(noise_multiplier=noise), mean=mean, shape=shape
        ):
            return neighbours_differ_by(relation) / float(noise), float(mean), float(shape)
    return None


def best_density(above: Floats, mean: float, shape: float) -> Floats:
    """phi' where a chance of `above`, in [0, 1], is better: falls from E[K] to P(K = 1)."""
    gamma = stopping_parameter(mean, shape)
    rest = gamma + (1 - gamma) * above
    if shape == 0:
        return (1 - gamma) / (rest * -math.log(gamma))
    return shape * (1 - gamma) * rest ** (-shape - 1) / math.expm1(-shape * math.log(gamma))


@lru_cache(maxsize=64)
def stopping_parameter(mean: float, shape: float) -> float:
    """gamma of the truncated negative binomial of this mean (Papernot and Steinke 2022)."""

    def expected(log_gamma: float) -> float:
        gamma = math.exp(log_gamma)
        if shape == 0:
            return (1 - gamma) / (gamma * -log_gamma)
        return shape * (1 - gamma) / (gamma * -math.expm1(shape * log_gamma))

    return math.exp(brentq(lambda log: expected(log) - mean, -100.0, -1e-12, xtol=1e-14))


@lru_cache(maxsize=16)
def _falling(mu: float, mean: float, shape: float) -> tuple[Floats, Floats, Floats]:
    """Edges of cells of z, from -inf to inf, and the largest b and r in each.

    At u = 1 - v, a chance of v = Phi(z) is better, on the other side 1 - g(u) = Phi(z + mu).
    """
    inner = np.linspace(-_FARTHEST, _FARTHEST, _CELLS - 1)
    edges = np.concatenate([[-np.inf], inner, [np.inf]])
    trial = best_density(ndtr(edges), mean, shape)
    other = best_density(ndtr(edges + mu), mean, shape)
    # phi' of both at a cell's ends, largest over smallest; then the largest of all cells beyond.
    ratio = np.maximum.accumulate((trial[:-1] / other[1:])[::-1])[::-1]
    return edges[::_JOINED], other[:-1:_JOINED], ratio[::_JOINED]
