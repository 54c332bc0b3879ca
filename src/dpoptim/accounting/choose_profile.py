"""Choice of an event's accountant: exact, PLD (plain, tilted), Renyi, sampled, of a selection."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Literal

import dp_accounting as dp

from dpoptim.accounting.balls_in_bins import AllocationProfile, BallsInBinsDpEvent
from dpoptim.accounting.canonical import Leaves, NotCoveredError, canonical
from dpoptim.accounting.guarantee import neighboring_name, neighbours_differ_by
from dpoptim.accounting.min_separation import (
    MinSeparationDpEvent,
    SeparationProfile,
    estimated_epsilon,
)
from dpoptim.accounting.monte_carlo import (
    ROUGH_SAMPLES,
    MonteCarloDpEvent,
    MonteCarloProfile,
    with_told_events,
)
from dpoptim.accounting.profiles import (
    FINE,
    GaussianProfile,
    LossDistribution,
    Profile,
    RenyiProfile,
    rate_and_inner_event,
    require_supported,
)
from dpoptim.accounting.selection import SelectionProfile, trials_of
from dpoptim.accounting.tilted import TiltedDistribution

Accountant = Literal["auto", "PLD", "RDP", "order statistics"]


MANY_STEPS = 1_000_000
RELATIONS = (
    dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
    dp.NeighboringRelation.REPLACE_SPECIAL,
    dp.NeighboringRelation.REPLACE_ONE,
)


def profile_of(
    leaves: Leaves,
    relation: dp.NeighboringRelation,
    deltas: tuple[float, ...],
    accountant: Accountant,
    *,
    accuracy: float = FINE,
    guess: float | None = None,
) -> Profile:
    """The tightest profile that `accountant` allows, accurate at `deltas`.

    Args:
        guess: of epsilon, where a few per cent are enough; a fixed guess fixes the grid, so that
            the bound varies smoothly with the event.
    """
    if leaves and isinstance(leaves[0][0], MonteCarloDpEvent):
        if accountant == "auto" and relation is not dp.NeighboringRelation.REPLACE_ONE:
            return monte_carlo_profile(leaves[0][0], min(deltas))
        leaves = canonical(with_told_events(leaves))
    if accountant == "RDP":
        return RenyiProfile(leaves, relation)
    if accountant == "order statistics":
        return selection_profile(leaves, relation)
    if accountant == "auto" and (mu := gaussian_mu(leaves, relation)) is not None:
        return GaussianProfile(mu)
    attempts: list[Callable[[], Profile]] = [
        lambda: LossDistribution(leaves, relation, deltas, accuracy=accuracy),
        lambda: TiltedDistribution(leaves, relation, deltas),
        lambda: RenyiProfile(leaves, relation),
    ]
    if accountant == "PLD":
        attempts.pop()
    if number_of_steps(leaves) > MANY_STEPS:  # the plain transform takes a minute there
        attempts[:2] = reversed(attempts[:2])
    elif guess is not None:
        attempts.insert(
            0, lambda: LossDistribution(leaves, relation, deltas, accuracy=30 * FINE, guess=guess)
        )
    return first_answer(attempts, leaves, relation, unsampled=accountant == "auto")


def first_answer(
    attempts: Sequence[Callable[[], Profile]],
    leaves: Leaves,
    relation: dp.NeighboringRelation,
    *,
    unsampled: bool,
) -> Profile:
    """The first profile that can be computed; where float64 ends, that without sampling.

    Args:
        unsampled: whether the profile may be of Gaussians on all records.

    Raises:
        ValueError: none can, and why.
    """
    reasons: list[ValueError] = []
    for attempt in attempts:
        try:
            return attempt()
        except ValueError as error:
            reasons.append(error)
        except ArithmeticError:  # an exponential of losses of thousands
            mu = unsampled_mu(leaves, relation) if unsampled else None
            if mu is not None:
                return GaussianProfile(mu)
            reasons.append(ValueError("event: its losses are too wide for an accountant"))
    raise ValueError(why_not(leaves, relation, reasons, all_tried=unsampled))


def why_not(
    leaves: Leaves,
    relation: dp.NeighboringRelation,
    reasons: Sequence[ValueError],
    *,
    all_tried: bool,
) -> str:
    """The reasons for which there is no profile; one where no accountant covers the event."""
    if not all_tried or not all(isinstance(each, NotCoveredError) for each in reasons):
        return "; ".join(dict.fromkeys(map(str, reasons)))
    # a search for the noise evaluates events that nobody gave
    kinds = (dict.fromkeys(map(type, (leaf, rate_and_inner_event(leaf)[1]))) for leaf, _ in leaves)
    names = dict.fromkeys(" of ".join(kind.__name__ for kind in each) for each in kinds)
    others = [neighboring_name(each) for each in RELATIONS if is_covered(leaves, each)]
    said = f"event: no accountant evaluates {', '.join(names)} under {neighboring_name(relation)}"
    if not others:
        return f"{said}. Fix: Gaussian or Laplace noise, on all records or Poisson samples."
    fixes = " or ".join(f"neighboring={name!r}" for name in others)
    return f"{said}; one does under {' and '.join(others)}. Fix: {fixes}."


def is_covered(leaves: Leaves, relation: dp.NeighboringRelation) -> bool:
    for refuse in (require_supported, RenyiProfile):
        with suppress(NotCoveredError):
            refuse(leaves, relation)
            return True
    return False


@lru_cache(maxsize=32)
def monte_carlo_profile(event: MonteCarloDpEvent, delta: float) -> MonteCarloProfile:
    match event:
        case BallsInBinsDpEvent():
            return AllocationProfile(event, delta)
        case MinSeparationDpEvent():
            return SeparationProfile(event, delta)
    raise ValueError(f"event: {type(event).__name__} has no profile.")


def rough_monte_carlo_epsilon(event: MonteCarloDpEvent, delta: float) -> float:
    """Epsilon within a few per cent, by fewer samples or none: for searching only."""
    if isinstance(event, MinSeparationDpEvent):
        return estimated_epsilon(event, delta)
    return monte_carlo_profile(replace(event, samples=ROUGH_SAMPLES), delta).epsilon(delta)


def selection_profile(leaves: Leaves, relation: dp.NeighboringRelation) -> SelectionProfile:
    """The profile of one selection among Gaussian trials.

    Raises:
        ValueError: of anything else.
    """
    trials = trials_of(leaves[0][0], relation) if number_of_steps(leaves) == 1 else None
    if trials is None:
        raise ValueError(
            'accountant="order statistics" is for one selection of the best of a random number '
            "of Gaussian trials (RepeatAndSelectDpEvent)."
        )
    return SelectionProfile(*trials, RenyiProfile(leaves, relation))


def unsampled_mu(leaves: Leaves, relation: dp.NeighboringRelation) -> float | None:
    """mu of Gaussians as if every batch had every record; None of anything else.

    A bound on Poisson samples under each relation: neighbours' outputs are then mixtures, by the
    same coin, of pairs that are at least as alike.
    """
    found = list[float]()
    for leaf, count in leaves:
        inner = leaf.event if isinstance(leaf, dp.PoissonSampledDpEvent) else leaf
        if not isinstance(inner, dp.GaussianDpEvent):
            return None
        found.append(math.sqrt(count) / inner.noise_multiplier)
    return neighbours_differ_by(relation) * math.hypot(*found)


def pure_epsilon(leaves: Leaves, relation: dp.NeighboringRelation) -> float:
    """An epsilon at which delta is 0, by basic composition; inf where there is none.

    A Laplace event is 1/noise_multiplier-DP under the relation in use. Poisson sampling at rate q
    makes e = log(1 + q (e^E - 1)) of an inner E: with P and Q what comes of a batch with and
    without the record, (1 - q) Q + q P is at most e^e Q, and at least Q / e^e, as (1 - q + q e^-E)
    (1 - q + q e^E) >= 1. That is so where the other data set lacks the record; where it has another
    one in its place, both are mixtures by the same coin, and E itself is what holds (nothing is
    known there of a batch without either).
    """
    each = [count * _pure_of(leaf, relation) for leaf, count in leaves]
    return math.fsum(each) * (1.0 if leaves and len(each) == leaves[0][1] == 1 else 1 + 1e-15)


def _pure_of(leaf: dp.DpEvent, relation: dp.NeighboringRelation) -> float:
    match leaf:
        case dp.LaplaceDpEvent(noise_multiplier=noise):
            return 1 / float(noise)
        case dp.PoissonSampledDpEvent(sampling_probability=rate, event=inner):
            whole = pure_epsilon(canonical(inner), relation)
            if relation is dp.NeighboringRelation.REPLACE_ONE or math.isinf(whole):
                return whole
            if whole > 700:  # there e^E leaves float64
                return min(whole, whole + math.log(rate) + (1 - rate) / rate * math.exp(-whole))
            return min(whole, math.log1p(rate * math.expm1(whole)) * (1 + 1e-14))
    return math.inf


def chance_of_any(leaves: Leaves) -> float:
    """Bound the chance that a record is in any batch, which bounds delta at epsilon 0.

    Of Poisson samples under each relation: with the same coins, runs on neighbours are the same
    unless one of them shows the record.
    """
    rates = [
        count * leaf.sampling_probability if isinstance(leaf, dp.PoissonSampledDpEvent) else 1.0
        for leaf, count in leaves
    ]
    return min(1.0, math.fsum(rates) * (1 + 1e-15))


def number_of_steps(leaves: Leaves) -> int:
    return sum(count for _, count in leaves)


def gaussian_mu(leaves: Leaves, relation: dp.NeighboringRelation) -> float | None:
    """mu, if the composition is one Gaussian: C (2C under replace-one) over the noise; or None."""
    match leaves:
        case ():
            return 0.0
        case ((dp.GaussianDpEvent(noise_multiplier=noise), 1),):
            return neighbours_differ_by(relation) / noise
    return None
