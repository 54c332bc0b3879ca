"""KL-Spider (Menart et al. 2024, Algorithm 1): variance reduction with rounds that end when the gradient is small."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dpoptim.accounting.ledger import Ledger
from dpoptim.arguments import whole_number
from dpoptim.solvers.budget import Budget
from dpoptim.solvers.objective import Objective
from dpoptim.solvers.releases import Releases, Result, positive, starting_point

Constants = Literal["theorem", "practical"]
MOST_ROUNDS = 1_000_000


@dataclass(frozen=True)
class SpiderConstants:
    """The numbers that the analysis of Algorithm 1 fixes; they change what is achieved, never the guarantee.

    Attributes:
        descent: a step lowers the risk by at least Phi^(2/kappa) / (descent gamma^2 L1).
        floor: the last threshold is ``(floor gamma L0 sqrt(K d log(1/beta')) / (n sqrt(rho)))^kappa``.
        step: a step has the length ``Phi^(1/kappa) / (step gamma L1)``.
        stop: a round ends when the gradient's estimate is shorter than ``stop Phi^(1/kappa) / gamma``.
        union: whether the floor covers all steps at once by log(1/beta'), or one typical step.
    """

    descent: float
    floor: float
    step: float
    stop: float
    union: bool


CONSTANTS = {
    "theorem": SpiderConstants(descent=64, floor=32, step=4, stop=7 / 8, union=True),
    # The same argument for a typical error, which is orthogonal to the gradient and 1/4 of the threshold.
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
    """

    rounds: int
    factor: float
    floor: float
    risk_bound: float
    kl_gamma: float
    kl_exponent: float
    constants: SpiderConstants

    def next(self, target: float) -> Round:
        """The round after one that reached ``target``. T_k is rounded up."""
        target = max(target / self.factor, self.floor)
        kappa = self.kl_exponent
        steps = math.ceil((self.risk_bound / target) ** ((2 - kappa) / kappa) * (1 - 1e-12))
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
            f"the settings ask for {wanted:.3g} rounds: kl_gamma^2 * smoothness = {gamma**2 * smoothness:.3g} is large "
            "against risk_bound^((2-kappa)/kappa). Fix: a smaller smoothness, or adaptive_gd, which needs no kl_gamma."
        )
    rounds = max(1, math.ceil(wanted)) if rounds is None else whole_number("rounds", rounds, least=1)
    spread = noise * math.sqrt(rounds)
    union = 1.0
    if c.union:
        # beta' of line 3; a union over the steps, so it is never above beta / K.
        share = beta / rounds * min(1.0, (spread / risk_bound ** (1 / kappa)) ** (2 - kappa))
        union = math.sqrt(math.log(1 / share))
    floor = min((c.floor * spread * union) ** kappa, risk_bound)
    return Schedule(rounds, 1 + 1 / inverse_progress, floor, risk_bound, gamma, kappa, c)


def kl_spider(
    objective: Objective,
    w0: Tensor | None,
    budget: Budget,
    *,
    lipschitz: float,
    smoothness: float,
    kl_gamma: float,
    kl_exponent: float,
    risk_bound: float | None = None,
    beta: float = 0.05,
    constants: Constants = "practical",
    rounds: int | None = None,
    anchor_share: float | None = None,
    ledger: Ledger | None = None,
    label: str = "KL-Spider",
    noise_seed: int | None = None,
) -> Result:
    """Minimise a smooth risk with ``F(w) - min F <= (kl_gamma |grad F(w)|)^kl_exponent``, kl_exponent in [1, 2].

    Excess risk O~((kl_gamma L0 sqrt(d) / (n sqrt(rho)))^kl_exponent), which is optimal up to logarithms (Theorem 1).
    Each round draws one noisy gradient and then follows noisy gradient *differences*, whose sensitivity is smaller.

    Args:
        objective: what to minimise.
        w0: the starting point, public, shape (d,); the problem's own by default.
        budget: K rounds get equal parts of what is left, so what a round that ends early leaves goes to the later ones.
        lipschitz: L0: every record's gradient is clipped to this norm; > 0.
        smoothness: L1: every record's gradient difference is clipped to L1 times the length of the step; > 0.
        kl_gamma, kl_exponent: gamma > 0 and kappa in [1, 2] of the condition.
        risk_bound: F0, a public bound on F(w0) - min F; (kl_gamma * lipschitz)^kappa by default, and at most that.
        beta: failure probability of the theorem's constants, in (0, 1).
        constants: ``"theorem"`` (astronomically safe) or ``"practical"``; see `SpiderConstants`.
        rounds: K, instead of what the constants say. Where ``kl_gamma^2 smoothness`` is large the formula asks for more
            rounds than the noise allows; 20 to 100 serve better there, and the theorem no longer speaks.
        anchor_share: share of a round's budget for its full gradient; by default 1/2 with the theorem's constants, else
            the share that makes the noise at the round's end smallest. A round of one step needs no difference at all.
        ledger, label, noise_seed: see `Releases`.

    Raises:
        ValueError: a setting out of range.

    **Guarantee.** ``Result.guarantee``, for the objective's relation and any loss, however wrong the constants: at the
    largest numbers of steps the prices add up to exactly the budget, and no path costs more. (The paper's Theorem 1 says
    rho, its Lemma 8 proves 2 rho, and its loop makes one more step a round than either.)
    """
    lipschitz, smoothness = positive("lipschitz", lipschitz), positive("smoothness", smoothness)
    kl_gamma = positive("kl_gamma", kl_gamma)
    if not 1 <= kl_exponent <= 2:
        raise ValueError(f"kl_exponent must be in [1, 2], got {kl_exponent!r}; proximal_point takes exponents above 2.")
    if not 0 < beta < 1:
        raise ValueError(f"beta must be in (0, 1), got {beta!r}.")
    if anchor_share is not None and not 0 < anchor_share < 1:
        raise ValueError(f"anchor_share must be in (0, 1), got {anchor_share!r}.")
    if constants not in CONSTANTS:
        raise ValueError(f"constants must be 'theorem' or 'practical', got {constants!r}.")
    largest = (kl_gamma * lipschitz) ** kl_exponent
    w = starting_point(w0, objective)
    releases = Releases(objective, budget, ledger=ledger, label=label, noise_seed=noise_seed)
    schedule = spider_schedule(
        n=objective.n,
        dimension=objective.dimension,
        rho=releases.rho,
        lipschitz=lipschitz,
        smoothness=smoothness,
        kl_gamma=kl_gamma,
        kl_exponent=kl_exponent,
        risk_bound=min(largest if risk_bound is None else positive("risk_bound", risk_bound), largest),
        beta=beta,
        constants=constants,
        rounds=rounds,
    )
    fixed_share = anchor_share or (0.5 if constants == "theorem" else None)
    target = schedule.risk_bound
    for number in range(schedule.rounds):
        rho = releases.rho_left / (schedule.rounds - number)
        w, target = run_round(releases, w, schedule, target, rho, lipschitz, smoothness, fixed_share)
    return releases.result(w)


def run_round(
    releases: Releases,
    w: Tensor,
    schedule: Schedule,
    reached: float,
    rho: float,
    lipschitz: float,
    smoothness: float,
    anchor_share: float | None,
) -> tuple[Tensor, float]:
    """Lines 8 to 17: an anchor, then differences, until the estimate is short or the steps are used up.

    Where the anchor is short already, the paper's round ends and the next one draws another at the same point. Its
    error is small enough for every target down to the floor (Lemma 2), so the target is lowered at once instead.

    Returns:
        The last point, and the target that it has reached.
    """
    round_ = schedule.next(reached)
    differences = round_.steps - 1  # the one after the last step would tell nobody anything
    if differences == 0:
        share = 1.0
    elif anchor_share is not None:
        share = anchor_share
    else:  # minimises L0^2 / share + differences^2 bound^2 / (1 - share)
        share = lipschitz / (lipschitz + differences * round_.difference_bound)
    estimate = releases.gradient(w, lipschitz=lipschitz, rho=share * rho)
    norm = float(torch.linalg.vector_norm(estimate))
    while norm < round_.stop_below and round_.target > schedule.floor:
        round_ = schedule.next(round_.target)
    differences = round_.steps - 1 if share < 1 else 0
    length = round_.difference_bound / smoothness
    for t in range(differences + 1):
        if norm < round_.stop_below:
            break  # at the point whose gradient is short, not the one before it
        new = w - (length / norm) * estimate
        releases.moved(length / norm)
        if t < differences:
            price = (1 - share) * rho / differences
            estimate = estimate + releases.difference(new, w, bound=round_.difference_bound, rho=price)
            norm = float(torch.linalg.vector_norm(estimate))
        w = new
    return w, round_.target
