"""What finding the range of targets costs, and what it can find, by public numbers alone."""

import math
from typing import NamedTuple, Self

from dpoptim.accounting.guarantee import neighbours_differ_by
from dpoptim.estimators.target_quantiles import Choices, affordable_choices

SHARE = 0.1  # of a budget's mu^2, at most, for rounds
CHOICES_SHARE = 0.75  # the same, where records are so few that choices need it
# Half a range that rounds leave, in those before, by public numbers alone: above the first, choices
# come before them; above the second, they would gain little after choices.
NARROW, LEAST_GAIN = 0.1, 0.5
STRONG = 20.0  # see `shrinkage`
ROUNDS = 3
# Half a range in standard deviations of targets, those that noise could add to them included.
DEVIATIONS = 3.0
# of (z, z^2 - 1/2) for |z| <= 1: its longest are at the ends
LONGEST = math.sqrt(1.25)


def price_of_round(mu: float) -> float:
    """The mu of a round, where all rounds are `SHARE` of a budget's mu^2."""
    return mu * math.sqrt(SHARE / ROUNDS)


class Prices(NamedTuple):
    """What finding the range of targets costs, by public numbers alone.

    Attributes:
        choices: what a median and a distance cost, where records are too few for moments; None:
            moments are enough, or noise hides all.
        of_round: mu of each of at most `ROUNDS` rounds of moments; 0: they would find nothing.
    """

    choices: Choices | None
    of_round: float

    @classmethod
    def of(cls, mu: float, n: int, neighboring: str) -> Self:
        """Prices within a budget of ``mu`` for n records."""
        of_round = price_of_round(mu)
        left = DEVIATIONS * math.sqrt(noise_of_mean(of_round, max(n, 1), neighboring))
        choices = affordable_choices(mu, n, CHOICES_SHARE) if left > NARROW else None
        return cls(choices, of_round if left < (1.0 if choices is None else LEAST_GAIN) else 0.0)

    @classmethod
    def of_rounds(cls, mu: float, n: int, neighboring: str) -> Self:
        """Prices of rounds alone."""
        of_round = price_of_round(mu)
        hidden = DEVIATIONS**2 * noise_of_mean(of_round, max(n, 1), neighboring) >= 1
        return cls(None, 0.0 if hidden else of_round)

    @property
    def mu(self) -> float:
        """Of everything together, rounding covered."""
        each = [self.of_round] * ROUNDS + list(self.choices[:2] if self.choices else ())
        return math.hypot(*each) * (1 + 1e-9)


def noise_hides(prices: Prices) -> bool:
    """Whether nothing is spent on the range of targets: noise would hide it."""
    return prices.mu == 0


def noise_of_mean(mu: float, n: int, neighboring: str) -> float:
    """Standard deviation of noise at this price on a mean over n records."""
    return neighbours_differ_by(neighboring) * LONGEST / (mu * n)


def shrinkage(strength: float) -> float:
    """The factor of weights that noise would make worse than a constant, from public numbers.

    Args:
        strength: see `signal`.
    """
    return min(1.0, strength / STRONG)


def signal(n: int, parameters: int, mu: float) -> float:
    """How far all records together can pull, over the length of the noise. Public."""
    return mu * n / math.sqrt(parameters)
