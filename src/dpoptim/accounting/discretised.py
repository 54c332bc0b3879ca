"""One step's privacy loss on a grid, each probability accurate relative to its own size.

"Connect the dots" (Doroshenko et al. 2022): the mass of every cell between two grid points goes to
both, so that its probability under either data set is kept; the profile is then exact at the grid
points and larger between. Tilting multiplies probabilities by e^(t l), so absolute errors of 2^-53
will not do; here they are integrals of positive functions.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri_exp

Floats = NDArray[np.float64]
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(6)
_NARROW = 0.1  # cells this wide, in standard deviations, are integrated to 1e-15 by six nodes
_CHUNK = 1 << 17


@dataclass(frozen=True)
class StepLosses:
    """Losses (first + i) interval with log probabilities; `infinite`: that of an infinite one."""

    first: int
    log_probabilities: Floats
    infinite: float

    def losses(self, interval: float) -> Floats:
        return np.asarray(
            (self.first + np.arange(len(self.log_probabilities))) * interval, dtype=np.float64
        )


def discretised_losses(
    rate: float, noise: float, interval: float, log_mass: float, *, removed: bool
) -> StepLosses:
    """The loss of one Poisson-sampled Gaussian, rounded up onto a grid.

    Args:
      rate: of sampling, in (0, 1].
      noise: standard deviation over the bound C; the outcome is N(C b, noise^2) in units of C, b
          the record's coin.
      interval: of the grid.
      log_mass: logarithm of the probability that may be moved to an infinite loss.
      removed: whether the record is in the data set that the losses are drawn from ("remove"), or
          in the other one.
    """
    reach = -float(ndtri_exp(log_mass)) * noise
    sign = 1.0 if removed else -1.0
    least, most = sorted(sign * _loss(np.array([-reach, 1 + reach]), rate, noise))
    if rate < 1:  # the loss is bounded on one side
        least, most = (math.log1p(-rate), most) if removed else (least, -math.log1p(-rate))
    first, last = math.floor(least / interval), math.ceil(most / interval)
    edges = np.arange(first, last + 1) * interval
    outcomes = _outcome(sign * edges, rate, noise)  # rising if removed, else falling
    probabilities = np.zeros(len(edges))
    for start in range(0, len(edges) - 1, _CHUNK):
        stop = min(start + _CHUNK, len(edges) - 1)
        upper, lower = _dots(
            edges[start:stop], outcomes[start : stop + 1], rate, noise, interval, removed
        )
        probabilities[start + 1 : stop + 1] += upper
        probabilities[start:stop] += lower
    # What lies outside of the grid: losses below it are rounded up to its end, those above it to
    # infinity.
    ends = np.array([-math.inf, outcomes[0], outcomes[-1], math.inf])
    if removed:
        below = _mass(ends[:1], ends[1:2], rate, noise)
        above = _mass(ends[2:3], ends[3:], rate, noise)
    else:
        below = _mass(ends[1:2], ends[3:], 0.0, noise)
        above = _mass(ends[:1], ends[2:3], 0.0, noise)
    probabilities[0] += below[0]
    with np.errstate(divide="ignore"):
        return StepLosses(first, np.log(probabilities), float(above[0]))


def _dots(
    lows: Floats, outcomes: Floats, rate: float, noise: float, interval: float, removed: bool
) -> tuple[Floats, Floats]:
    """Shares that each cell (lower ends in `lows`) gives to its upper and to its lower end."""
    left, right = (outcomes[:-1], outcomes[1:]) if removed else (outcomes[1:], outcomes[:-1])
    # sampling rates of the data set drawn from, and the other
    ours, theirs = (rate, 0.0) if removed else (0.0, rate)
    upper, lower = np.empty(len(lows)), np.empty(len(lows))
    width = right - left
    narrow = np.isfinite(width) & (width < _NARROW * noise)
    wide = ~narrow
    mass = _mass(left[wide], right[wide], ours, noise)
    other = _mass(left[wide], right[wide], theirs, noise)
    # Solves: up + down = mass, and up e^-(low + interval) + down e^-low = other.
    up = np.clip((mass - other * np.exp(lows[wide])) / -math.expm1(-interval), 0.0, mass)
    upper[wide], lower[wide] = up, mass - up
    middle, half = (left[narrow] + right[narrow]) / 2, width[narrow] / 2
    up, down = np.zeros(len(half)), np.zeros(len(half))
    for node, weight in zip(_NODES, _WEIGHTS, strict=True):
        x = middle + half * node
        loss = _loss(x, rate, noise) * (1.0 if removed else -1.0)
        share = np.clip(-np.expm1(lows[narrow] - loss) / -math.expm1(-interval), 0.0, 1.0)
        density = weight * half * _density(x, ours, noise)
        up += share * density
        down += (1 - share) * density
    upper[narrow], lower[narrow] = up, down
    return upper, lower


def _loss(x: Floats, rate: float, noise: float) -> Floats:
    """log of the density with the record over that without it."""
    exponent = (2 * x - 1) / (2 * noise**2)
    if rate == 1:
        return exponent
    large = np.maximum(exponent, 0.0)
    return np.where(
        exponent > 30,
        large + math.log(rate) + np.log1p((1 - rate) / rate * np.exp(-large)),
        np.log1p(rate * np.expm1(np.minimum(exponent, 30.0))),
    )


def _outcome(loss: Floats, rate: float, noise: float) -> Floats:
    """The inverse of `_loss`; -inf where the loss is less than it can be."""
    if rate == 1:
        return noise**2 * loss + 0.5
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        small = np.log(np.maximum(np.expm1(np.minimum(loss, 30.0)) + rate, 0.0))
        large = loss + np.log1p(-(1 - rate) * np.exp(-np.maximum(loss, 30.0)))
    return noise**2 * (np.where(loss > 30, large, small) - math.log(rate)) + 0.5


def _mass(left: Floats, right: Floats, rate: float, noise: float) -> Floats:
    """Probability of the outcomes between, the record in the sum with probability `rate`."""

    def between(shift: float) -> Floats:
        a, b = (left - shift) / noise, (right - shift) / noise
        flip = a > 0  # differences of small tails, not of numbers near 1
        return np.where(flip, ndtr(-a) - ndtr(-b), ndtr(b) - ndtr(a))

    return (1 - rate) * between(0.0) + (rate * between(1.0) if rate > 0 else 0.0)


def _density(x: Floats, rate: float, noise: float) -> Floats:
    def at(shift: float) -> Floats:
        return np.exp(-(((x - shift) / noise) ** 2) / 2) / (noise * math.sqrt(2 * math.pi))

    return (1 - rate) * at(0.0) + (rate * at(1.0) if rate > 0 else 0.0)
