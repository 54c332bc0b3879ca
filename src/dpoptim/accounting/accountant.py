"""Costs of events: the only place in the library that evaluates events.

**Convention.** A Gaussian event's noise multiplier is the noise's standard deviation on the sum,
over the bound C on one record's norm, whatever the relation; so under replace-one (sensitivity 2C)
the same event costs more. `canonical.py` states the convention for the other events.
`dp_accounting`'s own accountants disagree about this scale, so events are never given to them
directly.

**Guarantee.** Every function returns an upper bound on the privacy loss (a lower bound on an
attacker's errors) that holds if the mechanism was run as the event says: noise as large, batches
drawn as independently, and, for events composed here, parameters fixed in advance. PLD results aim
at 0.1 % above the exact epsilon, and lie within 0.2 % for sampling rates from 1e-3 up; below,
where the grid of one step's losses is as fine as memory allows and its probabilities round, up to
0.7 % was measured (q=1e-4, sigma=0.7, T=1e5, delta=1e-9). The tilted PLD keeps to 0.2 % there too.
"""

import math
from functools import lru_cache
from typing import get_args

import dp_accounting as dp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpoptim.accounting.canonical import Leaves, canonical
from dpoptim.accounting.choose_profile import (
    Accountant,
    chance_of_any,
    profile_of,
    pure_epsilon,
    rough_monte_carlo_epsilon,
)
from dpoptim.accounting.guarantee import Guarantee, parse_neighboring
from dpoptim.accounting.monte_carlo import MonteCarloDpEvent, MonteCarloProfile, with_told_events
from dpoptim.accounting.profiles import FINE, LossDistribution, renyi_divergences
from dpoptim.accounting.tilted import TiltedDistribution

SMALLEST_DELTA = 1e-14
RARE = "chance of being sampled"
PURE = "pure composition"  # of what has a delta of 0


def compute_epsilon(
    event: dp.DpEvent,
    delta: float,
    neighboring: str | dp.NeighboringRelation,
    *,
    accountant: Accountant = "auto",
) -> Guarantee:
    """The epsilon of `event` at `delta`.

    Args:
      event: what was, or will be, released; see the module for the scale of its noise.
      delta: in (1e-14, 1).
      neighboring: "add-or-remove-one", "replace-one" or "zero-out".
      accountant: "auto" takes the exact profile if the event amounts to one Gaussian, else PLD
        (where delta is below its numerical floor, or there are more than a million steps, on a
        tilted scale), else, where PLD does not cover the event, RDP. "PLD" or "RDP" insists.
        "order statistics" is for one selection of the best of Gaussian trials: tighter than what
        dp_accounting says of it, by a theorem of our own.

    Returns:
        the guarantee at this delta, and the accountant that computed it.

    Raises:
        ValueError, TypeError: an argument is out of range, by name, or the event cannot be
            evaluated.

    Examples:
        >>> import dp_accounting as dp
        >>> from dpoptim.accounting import compute_epsilon
        >>> step = dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(1.0))
        >>> run = dp.SelfComposedDpEvent(step, 1_000)
        >>> 1.5 < compute_epsilon(run, 1e-5, "add-or-remove-one").epsilon < 2.5
        True
    """
    relation = parse_neighboring(neighboring)
    epsilon, name = _epsilon(
        canonical(event), check_delta(delta), relation, _checked_accountant(accountant)
    )
    return Guarantee(epsilon, delta, relation, name)


def compute_delta(
    event: dp.DpEvent,
    epsilon: float,
    neighboring: str | dp.NeighboringRelation,
    *,
    accountant: Accountant = "auto",
) -> Guarantee:
    """The delta of `event` at `epsilon` > 0; arguments and errors as for `compute_epsilon`.

    PLD cannot resolve deltas below about 1e-14 and says its floor instead, which is still an upper
    bound.

    Args:
        event, neighboring, accountant: as for `compute_epsilon`.
        epsilon: > 0.

    Returns:
        the guarantee at this epsilon.

    Raises:
        ValueError, TypeError: as for `compute_epsilon`.

    Examples:
        >>> import dp_accounting as dp
        >>> from dpoptim.accounting import compute_delta
        >>> compute_delta(dp.GaussianDpEvent(2.0), 1.0, "zero-out").delta < 0.02
        True
    """
    relation = parse_neighboring(neighboring)
    leaves, epsilon = canonical(event), check_epsilon(epsilon)
    if _checked_accountant(accountant) == "auto" and epsilon >= pure_epsilon(leaves, relation):
        return Guarantee(epsilon, 0.0, relation, PURE)
    coarse = profile_of(leaves, relation, (1e-6,), accountant, accuracy=30 * FINE)
    delta = coarse.delta(epsilon)
    if isinstance(coarse, MonteCarloProfile):
        delta = min(delta, profile_of(leaves, relation, (delta,), accountant).delta(epsilon))
    if isinstance(coarse, LossDistribution | TiltedDistribution):
        floor = 4 * coarse.reserve if isinstance(coarse, LossDistribution) else SMALLEST_DELTA
        near = min(max(delta, floor), 0.5)
        delta = min(delta, profile_of(leaves, relation, (near,), accountant).delta(epsilon))
    return Guarantee(epsilon, delta, relation, coarse.name)


def privacy_curve(
    event: dp.DpEvent,
    neighboring: str | dp.NeighboringRelation,
    deltas: ArrayLike,
    *,
    accountant: Accountant = "auto",
) -> NDArray[np.float64]:
    """The epsilons of `event` at `deltas` (each in (1e-14, 1)), both of shape (k,), composed once.

    Each is an upper bound by itself; it can differ from `compute_epsilon` by the discretisation's
    0.2 %.

    Args:
        event, neighboring, accountant: as for `compute_epsilon`.
        deltas: shape (k,), each in (1e-14, 1).

    Returns:
        epsilons, shape (k,).

    Raises:
        ValueError, TypeError: as for `compute_epsilon`.

    Examples:
        >>> import dp_accounting as dp
        >>> from dpoptim.accounting import privacy_curve
        >>> privacy_curve(dp.GaussianDpEvent(1.0), "zero-out", [1e-6, 1e-5]).round(2)
        array([4.89, 4.38])
    """
    relation = parse_neighboring(neighboring)
    values = tuple(check_delta(float(delta)) for delta in np.asarray(deltas, dtype=float).ravel())
    if not values:
        raise ValueError("deltas: expected at least one")
    leaves = canonical(event)
    profile = profile_of(leaves, relation, values, _checked_accountant(accountant))
    most = pure_epsilon(leaves, relation) if accountant == "auto" else math.inf
    return np.array([min(profile.epsilon(delta), most) for delta in values])


def tradeoff_curve(
    event: dp.DpEvent,
    neighboring: str | dp.NeighboringRelation,
    false_positive_rates: ArrayLike,
    *,
    accountant: Accountant = "auto",
) -> NDArray[np.float64]:
    """A lower bound on any attacker's false negative rate at each false positive rate (in [0, 1]).

    Holds for every attack that tells two neighbouring data sets apart, in either direction: the
    profile is the larger of both directions', and each of its points (epsilon, delta) bounds the
    errors from two sides (Dong, Roth and Su 2022, Proposition 3). Same shape as
    `false_positive_rates`.

    Args:
        event, neighboring, accountant: as for `compute_epsilon`.
        false_positive_rates: of the attacker, any shape, in [0, 1].

    Returns:
        false negative rates, of the same shape.

    Raises:
        ValueError, TypeError: as for `compute_epsilon`.

    Examples:
        >>> import dp_accounting as dp
        >>> from dpoptim.accounting import tradeoff_curve
        >>> tradeoff_curve(dp.GaussianDpEvent(1.0), "zero-out", [0.05]).round(2)  # Phi(1.645 - 1)
        array([0.74])
    """
    relation = parse_neighboring(neighboring)
    rates = np.asarray(false_positive_rates, dtype=float)
    if not np.all((rates >= 0) & (rates <= 1)):
        raise ValueError(
            f"false_positive_rates: expected numbers in [0, 1], got {false_positive_rates!r}"
        )
    bound = np.zeros_like(rates)
    for epsilon, delta in _points(canonical(event), relation, _checked_accountant(accountant)):
        steep = 1 - delta - math.exp(epsilon) * rates
        flat = math.exp(-epsilon) * (1 - delta - rates)
        bound = np.maximum(bound, np.maximum(steep, flat))
    return bound


def advantage(event: dp.DpEvent, neighboring: str | dp.NeighboringRelation) -> float:
    """An upper bound on the total variation distance between neighbours' outputs, in [0, 1].

    An attacker who decides between two neighbours on even prior odds is right at most (1 +
    advantage) / 2 of the time. (epsilon, delta) bounds it by (e^epsilon - 1 + 2 delta) /
    (e^epsilon + 1) (Kairouz, Oh and Viswanath 2015), and points near epsilon = 0 bound it best.
    Unlike `compute_delta` it refines nothing there, where a grid as fine as epsilon would take
    seconds: within 3e-4 of that where it was compared.
    """
    relation = parse_neighboring(neighboring)
    profile = profile_of(canonical(event), relation, (1e-6,), "auto")
    points = [(epsilon, profile.delta(epsilon)) for epsilon in (1e-3, 1e-2)]
    return min(1.0, *(math.tanh(e / 2) + 2 * delta / (math.exp(e) + 1) for e, delta in points))


def renyi_divergence(
    event: dp.DpEvent, order: float, neighboring: str | dp.NeighboringRelation
) -> float:
    """An upper bound on the Renyi divergence of `order` (> 1, finite) between neighbours' outputs.

    Args:
        event: what was, or will be, released.
        order: > 1, finite.
        neighboring: the relation, or its name.

    Returns:
        the divergence, >= 0.

    Raises:
        ValueError: RDP does not cover the event under the relation (Poisson sampling under
            replace-one), or has no finite answer.

    Examples:
        >>> import dp_accounting as dp
        >>> from dpoptim.accounting import renyi_divergence
        >>> round(float(renyi_divergence(dp.GaussianDpEvent(1.0), 2.0, "zero-out")), 6)
        1.0
    """
    relation = parse_neighboring(neighboring)
    if not 1 < order < math.inf:
        raise ValueError(f"order: expected a finite number > 1, got {order!r}")
    leaves = canonical(with_told_events(canonical(event)))
    divergence = float(renyi_divergences(leaves, relation, (order,))[0])
    if not math.isfinite(divergence):
        raise ValueError(
            f"order: there is no finite Renyi divergence at {order:g}; use a smaller order"
        )
    return divergence


def rough_epsilon(
    event: dp.DpEvent, delta: float, relation: dp.NeighboringRelation, guess: float
) -> float:
    """Epsilon within a few per cent near `guess`: for searching only.

    With a fixed guess the discretisation is fixed too, so that the bound varies smoothly with the
    event.
    """
    leaves = canonical(event)
    sampled = leaves and isinstance(leaves[0][0], MonteCarloDpEvent)
    if sampled and relation is not dp.NeighboringRelation.REPLACE_ONE:
        return rough_monte_carlo_epsilon(leaves[0][0], delta)
    found = profile_of(leaves, relation, (delta,), "auto", guess=guess).epsilon(delta)
    return min(found, pure_epsilon(leaves, relation))


def check_delta(delta: float) -> float:
    """`delta`, if it is in (1e-14, 1); else ValueError."""
    if not 0 < delta < 1:
        raise ValueError(
            f"delta: expected a number in (0, 1), got {delta!r}; a usual choice is well below 1 / "
            "(number of records)"
        )
    if delta <= SMALLEST_DELTA:
        raise ValueError(
            f"delta: {delta!r} is below what can be computed reliably; use a delta above 1e-14"
        )
    return float(delta)


def check_epsilon(epsilon: float) -> float:
    """`epsilon`, if it is positive and finite; else ValueError."""
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon: expected a positive, finite number, got {epsilon!r}")
    return float(epsilon)


def _checked_accountant(accountant: Accountant) -> Accountant:
    if accountant not in get_args(Accountant):
        raise ValueError(f"accountant: expected one of {get_args(Accountant)}, got {accountant!r}")
    return accountant


@lru_cache(maxsize=256)
def _points(
    leaves: Leaves, relation: dp.NeighboringRelation, accountant: Accountant
) -> tuple[tuple[float, float], ...]:
    """Points (epsilon, delta) of the profile: any are valid, and these dense where it bends."""
    profile = profile_of(leaves, relation, (1e-6,), accountant)
    farthest = min(profile.epsilon(1e-9), 700.0)  # beyond, e^epsilon overflows and bounds nothing
    epsilons = (farthest * np.linspace(0.0, 1.0, 400)).tolist()
    return tuple((epsilon, profile.delta(epsilon)) for epsilon in epsilons)


@lru_cache(maxsize=1024)
def _epsilon(
    leaves: Leaves, delta: float, relation: dp.NeighboringRelation, accountant: Accountant
) -> tuple[float, str]:
    if accountant == "auto" and chance_of_any(leaves) <= delta:
        return 0.0, RARE
    pure = (pure_epsilon(leaves, relation) if accountant == "auto" else math.inf, PURE)
    try:
        profile = profile_of(leaves, relation, (delta,), accountant)
    except ValueError:  # of an event that none of them takes
        if pure[0] < math.inf:
            return pure
        raise
    return min((profile.epsilon(delta), profile.name), pure)
