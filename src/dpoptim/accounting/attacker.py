"""Guarantees said as what an attacker can reach, and the noise that they need.

An attacker looks at what was released and decides between two neighbouring data sets. Every such
attack lies on or above the trade-off curve of its errors (Dong, Roth and Su 2022), so a target is
met if the curve's own point meets it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import dp_accounting as dp
from scipy.special import ndtri

from dpoptim.accounting.accountant import advantage, tradeoff_curve

LEAST_NOISE = 0.3  # below, loss distributions are slow to compose, and no attacker is held off
LOOSEST = 0.99  # of the mu that a target stands for: what the noise found reaches, at least
ATTEMPTS = 12


class AttackerTarget(Protocol):
    """A bound on what an attacker may reach."""

    @property
    def mu(self) -> float:
        """The mu of a Gaussian that allows the attacker exactly this much."""
        ...

    def reached(self, event: dp.DpEvent, neighboring: str | dp.NeighboringRelation) -> float:
        """The mu of the Gaussian under which the best attacker does as well; rounded up."""
        ...


@dataclass(frozen=True)
class RightAtMost:
    """The largest share of right guesses between two neighbours on even prior odds.

    Args:
        share: in (0.5, 1); 0.5 is a coin toss.
    """

    share: float

    def __post_init__(self) -> None:
        if not 0.5 < self.share < 1:
            raise ValueError(
                f"attacker_right must be above 0.5, a coin toss, and below 1, got {self.share!r}."
            )

    def __str__(self) -> str:
        return f"an attacker's best guess is right at most {self.share:.4g} of the time"

    @property
    def mu(self) -> float:
        return 2 * float(ndtri(self.share))

    def reached(self, event: dp.DpEvent, neighboring: str | dp.NeighboringRelation) -> float:
        return 2 * float(ndtri(right_at_most(event, neighboring)))


@dataclass(frozen=True)
class FoundAtMost:
    """With this rate of false alarms, an attack finds at most this share of the records.

    Args:
        share: true-positive rate; false_alarms: false-positive rate; 0 < false_alarms < share < 1.
    """

    share: float
    false_alarms: float

    def __post_init__(self) -> None:
        if not 0 < self.false_alarms < self.share < 1:
            raise ValueError(
                "attacker_tpr must be above attacker_fpr, which blind guessing reaches, and both "
                f"within (0, 1); got {self.share!r} at {self.false_alarms!r}."
            )

    def __str__(self) -> str:
        return (
            f"an attack with {self.false_alarms:.4g} false alarms finds at most {self.share:.4g} "
            "of the records"
        )

    @property
    def mu(self) -> float:
        return float(ndtri(self.share) - ndtri(self.false_alarms))

    def reached(self, event: dp.DpEvent, neighboring: str | dp.NeighboringRelation) -> float:
        missed = float(tradeoff_curve(event, neighboring, [self.false_alarms])[0])
        return float(ndtri(1 - missed) - ndtri(self.false_alarms))


def right_at_most(
    event: dp.DpEvent,
    neighboring: str | dp.NeighboringRelation,
    points: Sequence[tuple[float, float]] = (),
) -> float:
    """How often the best attacker is right who decides between two neighbours on even prior odds.

    Args:
        points: other (epsilon, delta) that the event is known to satisfy.

    **Guarantee.** An upper bound, the least that `advantage` and the points allow: (epsilon,
    delta) allows (e^epsilon + delta) / (1 + e^epsilon) (Kairouz, Oh and Viswanath 2015).
    """
    allowed = ((1 + delta * math.exp(-e)) / (1 + math.exp(-e)) for e, delta in points)
    return min(1.0, (1 + advantage(event, neighboring)) / 2, *allowed)


def calibrate_to_attacker(
    event_of: Callable[[float], dp.DpEvent],
    target: AttackerTarget,
    *,
    neighboring: str | dp.NeighboringRelation,
    start: float,
) -> float:
    """A noise multiplier z, at least 0.3, with which `event_of(z)` keeps to the target.

    Args:
        event_of: the event as a function of z; an attacker reaches less as z grows.
        start: where to begin searching, such as the noise by which a Gaussian would keep to it.

    **Guarantee.** ``target.reached(event_of(z)) <= target.mu`` was evaluated for the z returned.
    Unless z is the least, mu is at least 99 % of the target's.

    Raises:
        ValueError: no noise was found that keeps to it.
    """
    lowest = math.log(LEAST_NOISE)
    log_noise = max(math.log(start), lowest)
    below, enough = -math.inf, math.inf
    for _ in range(ATTEMPTS):
        reached = target.reached(event_of(math.exp(log_noise)), neighboring)
        excess = math.log(reached / target.mu) if reached > 0 else -math.inf
        if math.log(LOOSEST) <= excess <= 0 or (excess < 0 and log_noise <= lowest):
            return math.exp(log_noise)
        if excess > 0:
            below = log_noise
        else:
            enough = log_noise
        step = min(max(excess + (1 - LOOSEST) / 2, -1.0), 1.0)  # mu falls about like 1 / z
        log_noise = max(log_noise + step, lowest)
        if not below < log_noise < enough:
            log_noise = (below + enough) / 2
    if math.isfinite(enough):
        return math.exp(enough)
    raise ValueError(f"no noise was found with which {target}; use fewer steps.")
