"""Rounds and steps of the KL methods, by public numbers (Menart et al. 2024, Algorithms 1, 2)."""

import math
from dataclasses import dataclass
from typing import Literal

from dpoptim.arguments import whole_number

Constants = Literal["theorem", "practical"]
MOST_ROUNDS = 1_000_000


@dataclass(frozen=True)
class SpiderConstants:
    """The numbers that Algorithm 1's analysis fixes: of what is achieved, not the guarantee.

    Attributes:
        descent: a step lowers the risk by at least Phi^(2/kappa) / (descent gamma^2 L1).
        floor: the last threshold is ``(floor gamma L0 sqrt(K d log(1/beta')) / (n
            sqrt(rho)))^kappa``.
        step: a step has the length ``Phi^(1/kappa) / (step gamma L1)``.
        stop: a round ends when the gradient's estimate is shorter than ``stop Phi^(1/kappa) /
            gamma``.
        union: whether the floor covers all steps at once by log(1/beta'), or one typical step.
    """

    descent: float
    floor: float
    step: float
    stop: float
    union: bool


CONSTANTS = {
    "theorem": SpiderConstants(descent=64, floor=32, step=4, stop=7 / 8, union=True),
    # The same argument for a typical error, which is orthogonal to the gradient and 1/4 of the
    # threshold.
    "practical": SpiderConstants(descent=6, floor=4, step=2, stop=3 / 4, union=False),
}


@dataclass(frozen=True)
class Round:
    """One round: its target for the excess risk, its most steps, and the length of each."""

    target: float
    steps: int
    difference_bound: float  # L1 times the length of a step
    stop_below: float


@dataclass(frozen=True)
class Schedule:
    """Lines 2 to 7 of Algorithm 1, from public numbers.

    Attributes:
        rounds: K, the most full gradients.
        factor: c, by which a round lowers the target.
        floor: the least target.
        plain_steps: whether rounds have one step each, which may be a gradient step: there are
            fewer rounds than the analysis asks for, which therefore has no say.
    """

    rounds: int
    factor: float
    floor: float
    risk_bound: float
    kl_gamma: float
    kl_exponent: float
    constants: SpiderConstants
    plain_steps: bool = False

    def next(self, target: float) -> Round:
        """The round after one that reached ``target``. T_k is rounded up."""
        target = max(target / self.factor, self.floor)
        kappa = self.kl_exponent
        steps = math.ceil((self.risk_bound / target) ** ((2 - kappa) / kappa) * (1 - 1e-12))
        steps = 1 if self.plain_steps else steps
        scale = target ** (1 / kappa) / self.kl_gamma
        return Round(target, steps, scale / self.constants.step, self.constants.stop * scale)

    def longest(self) -> tuple[Round, ...]:
        """The rounds of a run whose gradients are never short."""
        rounds: list[Round] = []
        for _ in range(self.rounds):
            rounds.append(self.next(rounds[-1].target if rounds else self.risk_bound))
        return tuple(rounds)


def spider_schedule(
    *,
    n: int,
    dimension: int,
    rho: float,
    lipschitz: float,
    smoothness: float,
    kl_gamma: float,
    kl_exponent: float,
    risk_bound: float,
    beta: float,
    constants: Constants,
    rounds: int | None = None,
) -> Schedule:
    """The schedule for these settings; see `kl_spider` for what they are.

    Raises:
        ValueError: settings that ask for more than a million rounds.
    """
    c, kappa, gamma = CONSTANTS[constants], kl_exponent, kl_gamma
    noise = gamma * lipschitz * math.sqrt(dimension) / (n * math.sqrt(rho))
    inverse_progress = c.descent * gamma**2 * smoothness * risk_bound ** (-(2 - kappa) / kappa)
    wanted = (1 + inverse_progress) * (math.log(risk_bound) - kappa * math.log(noise))
    if rounds is None and wanted > MOST_ROUNDS:
        raise ValueError(
            f"the settings ask for {wanted:.3g} rounds: kl_gamma^2 * smoothness = "
            f"{gamma**2 * smoothness:.3g} is large against risk_bound^((2-kappa)/kappa). Fix: a "
            "smaller smoothness, or adaptive_gd, which needs no kl_gamma."
        )
    plain_steps = not c.union and rounds is not None and rounds < wanted
    rounds = (
        max(1, math.ceil(wanted)) if rounds is None else whole_number("rounds", rounds, least=1)
    )
    spread = noise * math.sqrt(rounds)
    union = 1.0
    if c.union:
        # beta' of line 3; a union over the steps, so it is never above beta / K.
        share = beta / rounds * min(1.0, (spread / risk_bound ** (1 / kappa)) ** (2 - kappa))
        union = math.sqrt(math.log(1 / share))
    floor = min((c.floor * spread * union) ** kappa, risk_bound)
    factor = 1 + 1 / inverse_progress
    return Schedule(rounds, factor, floor, risk_bound, gamma, kappa, c, plain_steps)


# a call lowers the risk by at least F / (1 + DESCENT gamma^2 L ...)
DESCENT = {"theorem": 32.0, "practical": 2.0}


def proximal_rounds(
    *,
    n: int,
    dimension: int,
    rho: float,
    lipschitz: float,
    weak_convexity: float,
    kl_gamma: float,
    kl_exponent: float,
    risk_bound: float,
    constants: Constants,
) -> int:
    """T of Algorithm 2, line 1, rounded up, at least 1."""
    noise = kl_gamma * lipschitz * math.sqrt(dimension) / (n * math.sqrt(rho))
    growth = risk_bound ** ((kl_exponent - 2) / kl_exponent)
    per_halving = 1 + DESCENT[constants] * growth * kl_gamma**2 * weak_convexity
    return max(1, math.ceil(per_halving * (math.log(risk_bound) - kl_exponent * math.log(noise))))
