"""Choice of an event's accountant: exact, PLD (plain, tilted), Renyi, sampled, of a selection."""

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
    reasons: list[ValueError] = []
    for attempt in attempts:
        try:
            return attempt()
        except ValueError as error:
            reasons.append(error)
    raise ValueError(why_not(leaves, relation, reasons, all_tried=accountant == "auto"))


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
