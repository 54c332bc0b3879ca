"""Three ways to bound the (epsilon, delta) profile of a composition from above.

`dp_accounting` supplies the privacy loss distributions (PLD) and Renyi divergences (RDP). This
module chooses the discretisation, brings events into the scale of each accountant, and keeps a
reserve for rounding errors.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import dp_accounting as dp
import numpy as np
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from dpoptim.accounting.canonical import Leaves, NotCoveredError, relative_to_sensitivity
from dpoptim.accounting.gaussian import gdp_delta, gdp_epsilon, gdp_mu
from dpoptim.accounting.guarantee import neighboring_name, neighbours_differ_by
from dpoptim.accounting.unlogged import of_series_unlogged

FINE = 1e-3
"""Relative error of epsilon that the PLD's discretisation aims at."""

_MOST_POINTS = 2**21  # of one step's discretised loss; with more, minutes and gigabytes
_ORDERS = (
    *(1 + step / 20 for step in range(1, 20)),
    *(2 + step / 4 for step in range(32)),
    *range(10, 64, 2),
    *range(64, 128, 8),
    *(2**power for power in range(7, 15)),
)


class Profile(Protocol):
    """An upper bound on the privacy profile of an event."""

    name: str

    def epsilon(self, delta: float) -> float:
        """An epsilon >= 0 (possibly inf) such that (epsilon, delta)-DP holds."""

    def delta(self, epsilon: float) -> float:
        """A delta in [0, 1] such that (epsilon, delta)-DP holds, for epsilon >= 0."""


class GaussianProfile:
    """The exact profile of mu-GDP."""

    name = "exact Gaussian"

    def __init__(self, mu: float) -> None:
        self.mu = mu

    def epsilon(self, delta: float) -> float:
        return gdp_epsilon(self.mu, delta)

    def delta(self, epsilon: float) -> float:
        return min(1.0, gdp_delta(self.mu, epsilon) * (1 + 1e-12))


class RenyiProfile:
    """The profile that follows from Renyi divergences at a fixed set of orders.

    Raises ValueError for an event or relation without Renyi divergences in `dp_accounting`.
    """

    name = "RDP"

    def __init__(self, leaves: Leaves, relation: dp.NeighboringRelation) -> None:
        self._rdp = renyi_divergences(leaves, relation, _ORDERS)

    def epsilon(self, delta: float) -> float:
        return float(dp.rdp.compute_epsilon(_ORDERS, self._rdp, delta)[0])

    def delta(self, epsilon: float) -> float:
        return float(compute_delta(_ORDERS, self._rdp, epsilon)[0])


def renyi_divergences(
    leaves: Leaves, relation: dp.NeighboringRelation, orders: Sequence[float]
) -> NDArray[np.float64]:
    """Renyi divergence of a composition at each order (> 1), rounded up; inf: no bound.

    Raises ValueError if RDP does not cover an event under `relation`.
    """
    if (
        any(isinstance(leaf, RepeatAndSelectDpEvent) for leaf, _ in leaves)
        and tuple(orders) != _ORDERS
    ):
        # A search's divergence at one order is bounded by its trials' at all others: the more of
        # these, the tighter.
        every = sorted({*_ORDERS, *orders})
        return renyi_at(every, leaves, relation)[np.searchsorted(every, orders)]
    return renyi_at(orders, leaves, relation)


def renyi_at(
    orders: Sequence[float], leaves: Leaves, relation: dp.NeighboringRelation
) -> NDArray[np.float64]:
    """The divergences at these orders, each of which may make the others tighter.

    Where a series does not converge, as at orders below 2 of what is often sampled, it is that at
    the next whole order: they never fall with the order (van Erven and Harremoes 2014, theorem 3).
    """
    with of_series_unlogged():
        found = _renyi_at(orders, leaves, relation)
    unknown = np.isinf(found) & (np.mod(orders, 1) > 0)
    if unknown.any():
        above = np.ceil(np.asarray(orders)[unknown])
        whole = np.unique(above)
        known = _renyi_at([float(each) for each in whole], leaves, relation)
        found[unknown] = known[np.searchsorted(whole, above)]
    return found


def _renyi_at(
    orders: Sequence[float], leaves: Leaves, relation: dp.NeighboringRelation
) -> NDArray[np.float64]:
    accountant = dp.rdp.RdpAccountant(orders, relation)
    reserve = np.zeros(len(orders))
    for leaf, count in leaves:
        try:
            accountant.compose(relative_to_sensitivity(leaf, relation), count)
        except dp.UnsupportedEventError as error:
            raise NotCoveredError(f"event: RDP cannot evaluate it: {error}") from None
        # A sampled Gaussian's divergence is the logarithm of a number near 1: it may round to 0,
        # and is then read as perfect privacy.
        reserve += count * 4 * sys.float_info.epsilon / (np.asarray(orders) - 1)
    return np.maximum(np.nan_to_num(accountant._rdp, nan=math.inf, posinf=math.inf), 0) + reserve


class LossDistribution:
    """The profile by numerical composition of losses discretised upwards ("connect the dots").

    Made for the values of `deltas`: the discretisation is chosen for a relative error of about
    `accuracy` in epsilon there. `guess` is an epsilon near the first of them, if one is known;
    then nothing is refined.

    Raises ValueError if PLD does not cover an event under `relation`, or if the smallest delta
    drowns in rounding errors.
    """

    name = "PLD"

    def __init__(
        self,
        leaves: Leaves,
        relation: dp.NeighboringRelation,
        deltas: ArrayLike,
        *,
        accuracy: float = FINE,
        guess: float | None = None,
    ) -> None:
        require_supported(leaves, relation)
        self._leaves, self._relation = leaves, relation
        self._deltas = np.atleast_1d(np.asarray(deltas, dtype=float))
        self.steps = sum(count for _, count in leaves)
        # Raising a Fourier transform to the T-th power multiplies its rounding errors by T.
        # Against the exact Gaussian profile the error in delta stayed below 1e-16 T + 3e-15 (T
        # from 1e2 to 1e6).
        self.reserve = 2 * sys.float_info.epsilon * self.steps + 5e-15
        smallest = float(self._deltas.min())
        if smallest < 2 * self.reserve:
            raise ValueError(
                f"delta: {smallest:g} is too close to the rounding errors of PLD over {self.steps} "
                f"steps ({self.reserve:.1g}); use a delta above {2 * self.reserve:.1g}"
            )
        # Each step may move this much probability to an infinite loss: 1e-4 of delta in all.
        self._log_mass = max(-50.0, math.log(1e-4 * smallest / max(self.steps, 1)))
        if guess is not None:
            self._composed = self._compose(self._interval([guess], accuracy))
        else:
            self._refine(accuracy)

    def epsilon(self, delta: float) -> float:
        if delta <= self.reserve:
            return math.inf
        # Near an epsilon of 700 its search may divide by a subnormal e^-epsilon, and answer inf.
        with np.errstate(over="ignore"):
            found = float(self._composed.get_epsilon_for_delta(delta - self.reserve))
        if math.isfinite(found):
            return found
        high = 1.0
        while self.delta(high) > delta:
            high *= 2
            if high > 1e9:
                return math.inf
        return least_epsilon(self.delta, delta, high)

    def delta(self, epsilon: float) -> float:
        return min(1.0, float(self._composed.get_delta_for_epsilon(epsilon)) + self.reserve)

    def _refine(self, accuracy: float) -> None:
        """Compose coarsely, then as finely as the epsilons found require; they fall with it."""
        guess = [gdp_epsilon(self._central_limit_mu(), delta) for delta in self._deltas]
        interval = self._interval(guess, 30 * accuracy)
        for _ in range(8):
            self._composed = self._compose(interval)
            wanted = self._interval([self.epsilon(delta) for delta in self._deltas], accuracy)
            if interval <= 1.2 * wanted:
                return
            interval = wanted

    def _interval(self, epsilons: Sequence[float], accuracy: float) -> float:
        return interval_of(
            self._leaves, self._relation, epsilons, tuple(self._deltas), accuracy, self._log_mass
        )

    def _compose(self, interval: float) -> pld.PrivacyLossDistribution:
        composed: pld.PrivacyLossDistribution | None = None
        for leaf, count in self._leaves:
            losses = _losses(leaf, self._relation, interval, self._log_mass)
            if count > 1:
                losses = losses.self_compose(count)
            composed = losses if composed is None else composed.compose(losses)
        return composed if composed is not None else pld.identity(interval)

    def _central_limit_mu(self) -> float:
        variance = math.fsum(count * _loss_variance(leaf) for leaf, count in self._leaves)
        return neighbours_differ_by(self._relation) * math.sqrt(variance)


def least_epsilon(delta_at: Callable[[float], float], delta: float, high: float) -> float:
    """The least epsilon of at most `delta`, from above to 1e-6 of it; `high` is enough."""
    low = 0.0
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return high


def interval_of(
    leaves: Leaves,
    relation: dp.NeighboringRelation,
    epsilons: Sequence[float],
    deltas: Sequence[float],
    accuracy: float,
    log_mass: float,
) -> float:
    """The discretisation at which every epsilon, at its delta, errs by about `accuracy` of it.

    Rounding adds about h^2/4 to the variance of each step's loss and h^2/8 to its mean; the sum
    moves epsilon by `T h^2 (1/2 + z / (2 mu)) / 4` for z the normal quantile of delta.
    """
    steps = sum(count for _, count in leaves)
    # A Laplace event's losses have atoms, which move by up to the interval itself.
    atoms = any(isinstance(rate_and_inner_event(leaf)[1], dp.LaplaceDpEvent) for leaf, _ in leaves)
    share = accuracy if atoms else math.sqrt(accuracy)
    intervals: list[float] = []
    for epsilon, delta in zip(epsilons, deltas, strict=True):
        if 0 < epsilon < math.inf:
            slope = 0.5 + max(0.0, -float(ndtri(delta))) / (2 * gdp_mu(epsilon, delta))
            intervals.append(math.sqrt(4 * accuracy * epsilon / (steps * slope)))
            # A few steps' losses are not normal; a fixed share of epsilon keeps them accurate too.
            intervals.append(epsilon * share)
            # of losses of thousands, 1e-4 is precise enough, and a finer grid would take minutes
            intervals.append(min(max(0.1, 1e-4 * epsilon), 10.0))
    widest = max((_loss_range(leaf, relation, log_mass) for leaf, _ in leaves), default=1.0)
    if not intervals:  # every epsilon is 0 or infinite, and takes no precision
        return widest / 1000
    rarest = max((rate_and_inner_event(leaf)[0] for leaf, _ in leaves), default=1.0)
    # of such rare samples epsilon is so small that a millionth of it is worth no minute
    points = _MOST_POINTS if rarest > 1e-6 else _MOST_POINTS // 8
    interval = max(min(intervals), widest / points)
    math.expm1(interval)  # OverflowError here, not after a loop over all of the grid
    return interval


def rate_and_inner_event(leaf: dp.DpEvent) -> tuple[float, dp.DpEvent]:
    """Sampling rate and inner event of a simple event."""
    match leaf:
        case dp.PoissonSampledDpEvent(sampling_probability=rate, event=inner):
            return rate, inner
        case dp.TruncatedSubsampledGaussianDpEvent(
            sampling_probability=rate, noise_multiplier=noise
        ):
            return rate, dp.GaussianDpEvent(noise)
    return 1.0, leaf


def require_supported(leaves: Leaves, relation: dp.NeighboringRelation) -> None:
    """Refuse what `LossDistribution` does not cover. Raises: NotCoveredError."""
    for leaf, _ in leaves:
        rate, inner = rate_and_inner_event(leaf)
        sampled_replacement = rate < 1 and relation is dp.NeighboringRelation.REPLACE_ONE
        if not isinstance(inner, dp.GaussianDpEvent) and (
            sampled_replacement or not isinstance(inner, dp.LaplaceDpEvent)
        ):
            raise NotCoveredError(
                f"event: PLD cannot evaluate {leaf!r} under {neighboring_name(relation)}"
            )


def _loss_variance(leaf: dp.DpEvent) -> float:
    """Roughly the variance of one step's loss; it only chooses where refinement begins."""
    rate, inner = rate_and_inner_event(leaf)
    noise = inner.noise_multiplier
    return min(noise**-2, rate**2 * math.expm1(min(noise**-2, 50.0)))


def _loss_range(leaf: dp.DpEvent, relation: dp.NeighboringRelation, log_mass: float) -> float:
    """Roughly the width of one step's losses."""
    rate, inner = rate_and_inner_event(leaf)
    scale = neighbours_differ_by(relation) / inner.noise_multiplier
    if isinstance(inner, dp.LaplaceDpEvent):
        return 2 * scale
    largest = scale * (-float(ndtri(0.5 * math.exp(log_mass))) + scale / 2)
    return 2 * (largest + math.log(rate + (1 - rate) * math.exp(-largest)))


def _losses(
    leaf: dp.DpEvent, relation: dp.NeighboringRelation, interval: float, log_mass: float
) -> pld.PrivacyLossDistribution:
    """Discretised losses of one step; a Gaussian's noise is over C, as `dp_accounting` has it."""
    if isinstance(leaf, dp.TruncatedSubsampledGaussianDpEvent):
        return pld.from_truncated_subsampled_gaussian_mechanism(
            leaf.dataset_size,
            leaf.sampling_probability,
            leaf.truncated_batch_size,
            leaf.noise_multiplier,
            value_discretization_interval=interval,
            log_mass_truncation_bound=log_mass,
            neighboring_relation=relation,
        )
    rate, inner = rate_and_inner_event(leaf)
    # unsampled, it is stated for the relation in use, whichever
    if isinstance(inner, dp.LaplaceDpEvent):
        return pld.from_laplace_mechanism(
            inner.noise_multiplier, sampling_prob=rate, value_discretization_interval=interval
        )
    return pld.from_gaussian_mechanism(
        inner.noise_multiplier,
        sampling_prob=rate,
        value_discretization_interval=interval,
        log_mass_truncation_bound=log_mass,
        neighboring_relation=relation,
    )
