"""KL-Spider (Menart et al. 2024, Algorithm 1): variance reduction with rounds that end when the
gradient is small.
"""

import torch
from torch import Tensor

from dpoptim.accounting.ledger import Ledger
from dpoptim.arguments import one_of
from dpoptim.solvers.budget import Budget
from dpoptim.solvers.objective import Objective
from dpoptim.solvers.releases import Releases, Result, positive, starting_point
from dpoptim.theory.kl_schedules import CONSTANTS, Constants, Schedule, spider_schedule


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
    """Minimise a smooth risk with ``F(w) - min F <= (kl_gamma |grad F(w)|)^kl_exponent``,
    kl_exponent in [1, 2].

    Excess risk O~((kl_gamma L0 sqrt(d) / (n sqrt(rho)))^kl_exponent), which is optimal up to
    logarithms (Theorem 1). Each round draws one noisy gradient and then follows noisy gradient
    *differences*, whose sensitivity is smaller.

    Args:
        objective: what to minimise.
        w0: the starting point, public, shape (d,); the problem's own by default.
        budget: K rounds get equal parts of what is left, so what a round that ends early leaves
            goes to the later ones.
        lipschitz: L0: every record's gradient is clipped to this norm; > 0.
        smoothness: L1: every record's gradient difference is clipped to L1 times the length of the
            step; > 0.
        kl_gamma, kl_exponent: gamma > 0 and kappa in [1, 2] of the condition.
        risk_bound: F0, a public bound on F(w0) - min F; (kl_gamma * lipschitz)^kappa by default,
            and at most that.
        beta: failure probability of the theorem's constants, in (0, 1).
        constants: ``"theorem"`` (astronomically safe) or ``"practical"``; see `SpiderConstants`.
        rounds: K, instead of what the constants say. Where ``kl_gamma^2 smoothness`` is large the
            formula asks for more rounds than the noise allows; 20 to 100 serve better there, and
            the theorem no longer speaks.
        anchor_share: share of a round's budget for its full gradient; by default 1/2 with the
            theorem's constants, else the share that makes the noise at the round's end smallest. A
            round of one step needs no difference at all.
        ledger, label, noise_seed: see `Releases`.

    Raises:
        ValueError: a setting out of range.

    **Guarantee.** ``Result.guarantee``, for the objective's relation and any loss, however wrong
    the constants: at the largest numbers of steps the prices add up to exactly the budget, and no
    path costs more. (The paper's Theorem 1 says rho, its Lemma 8 proves 2 rho, and its loop makes
    one more step a round than either.)
    """
    lipschitz, smoothness = positive("lipschitz", lipschitz), positive("smoothness", smoothness)
    kl_gamma = positive("kl_gamma", kl_gamma)
    if not 1 <= kl_exponent <= 2:
        raise ValueError(
            f"kl_exponent must be in [1, 2], got {kl_exponent!r}; proximal_point "
            "takes exponents above 2."
        )
    if not 0 < beta < 1:
        raise ValueError(f"beta must be in (0, 1), got {beta!r}.")
    if anchor_share is not None and not 0 < anchor_share < 1:
        raise ValueError(f"anchor_share must be in (0, 1), got {anchor_share!r}.")
    one_of("constants", constants, CONSTANTS)
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
        risk_bound=min(
            largest if risk_bound is None else positive("risk_bound", risk_bound), largest
        ),
        beta=beta,
        constants=constants,
        rounds=rounds,
    )
    fixed_share = anchor_share or (0.5 if constants == "theorem" else None)
    target = schedule.risk_bound
    for number in range(schedule.rounds):
        rho = releases.rho_left / (schedule.rounds - number)
        w, target = run_round(
            releases, w, schedule, target, rho, lipschitz, smoothness, fixed_share
        )
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
    """Lines 8 to 17: an anchor, then differences, until the estimate is short or the steps are
    used up.

    Where the anchor is short already, the paper's round ends and the next one draws another at the
    same point. Its error is small enough for every target down to the floor (Lemma 2), so the
    target is lowered at once instead.

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
            estimate = estimate + releases.difference(
                new, w, bound=round_.difference_bound, rho=price
            )
            norm = float(torch.linalg.vector_norm(estimate))
        w = new
    return w, round_.target
