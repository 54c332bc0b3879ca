"""KL-Spider (Menart et al. 2024, Algorithm 1): variance reduction in rounds of adaptive length."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpoptim.accounting.ledger import Ledger
from dpoptim.arguments import one_of, positive_number, proportion
from dpoptim.solvers.budget import Budget
from dpoptim.solvers.objective import Objective
from dpoptim.solvers.releases import Releases, Result, starting_point
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
    """Minimise a smooth risk: ``F(w) - min F <= (kl_gamma |grad F(w)|)^kl_exponent``, in [1, 2].

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
            Practical ones also make use of rounds that would end at the start, since its
            gradient is shorter than the smallest threshold: by a step of 1 / ``smoothness`` where
            that exceeds its noise, else by drawing the next anchor at the same point.
        rounds: K, instead of what the constants say. Where ``kl_gamma^2 smoothness`` is large the
            formula asks for more rounds than the noise allows; 20 to 100 serve better there, and
            the theorem no longer speaks. The schedule's steps, shorter the larger ``kl_gamma`` is,
            would then end near the start. So with practical constants and fewer rounds than the
            formula's, a round is one step, and no difference follows that would ask for a short
            one: steps have the size 1 / ``smoothness`` wherever the gradient's estimate exceeds
            its noise; also those of rounds that would end where they begin. ``kl_gamma`` and
            ``kl_exponent`` then matter little.
        anchor_share: share of a round's budget for its full gradient; by default 1/2 with the
            theorem's constants, else the share that makes the noise at the round's end smallest. A
            round of one step needs no difference at all.
        ledger, label, noise_seed: see `Releases`.

    Returns:
        the weights, the guarantee and a trace of all that was released.

    Raises:
        ValueError: a setting out of range; or, with the theorem's constants, a budget for which
            it promises nothing. Nothing is spent then.

    **Guarantee.** ``Result.guarantee``, for the objective's relation and any loss, however wrong
    the constants: at the largest numbers of steps the prices add up to exactly the budget, and no
    path costs more. (The paper's Theorem 1 says rho, its Lemma 8 proves 2 rho, and its loop makes
    one more step a round than either.)

    Examples:
        >>> import torch
        >>> from dpoptim.solvers import Budget, LinearModel, LinearProblem, Objective, kl_spider
        >>> x = torch.rand(1_000, 3, dtype=torch.float64) / 2
        >>> y = x @ torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
        >>> problem = LinearProblem(LinearModel("squared", features=3), capacity=1_000)
        >>> objective = Objective(problem, (x, y))
        >>> result = kl_spider(
        ...     objective,
        ...     None,
        ...     Budget(delta=1e-6, epsilon=4.0),
        ...     lipschitz=2.0,
        ...     smoothness=2.0,
        ...     kl_gamma=4.0,
        ...     kl_exponent=2.0,
        ... )
        >>> result.weights.shape
        torch.Size([4])
    """
    lipschitz = positive_number("lipschitz", lipschitz)
    smoothness = positive_number("smoothness", smoothness)
    kl_gamma = positive_number("kl_gamma", kl_gamma)
    if not 1 <= kl_exponent <= 2:
        raise ValueError(
            f"kl_exponent must be in [1, 2], got {kl_exponent!r}; proximal_point takes exponents "
            "above 2."
        )
    proportion("beta", beta)
    if anchor_share is not None:
        proportion("anchor_share", anchor_share)
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
            largest if risk_bound is None else positive_number("risk_bound", risk_bound), largest
        ),
        beta=beta,
        constants=constants,
        rounds=rounds,
    )
    if constants == "theorem" and schedule.floor >= schedule.risk_bound:
        raise ValueError(
            f"kl_gamma={kl_gamma:g}: with this budget the theorem promises no excess risk below "
            f"{schedule.floor:.3g}, which risk_bound says of the start already. Fix: "
            "constants='practical', more records or a larger budget."
        )
    fixed_share = anchor_share or (0.5 if constants == "theorem" else None)
    target = schedule.risk_bound
    anchor: Anchor | None = None
    stuck = constants == "practical"  # until a threshold is crossed
    for number in range(schedule.rounds):
        rho = releases.rho_left / (schedule.rounds - number)
        before = w
        w, target, anchor = run_round(
            *(releases, w, schedule, target, rho, lipschitz, smoothness, fixed_share),
            known=anchor,
        )
        stuck = (stuck or schedule.plain_steps) and w is before
        if stuck:
            w = plain_step(releases, w, anchor, smoothness)
        if not stuck or w is not before:
            anchor = None
    return releases.result(w)


@dataclass(frozen=True)
class Anchor:
    """Knowledge of the gradient at a point: the mean of the noisy ones that were drawn there.

    Attributes:
        estimate: of the gradient; float64, shape (d,).
        noise: expected squared length of its noise; public.
    """

    estimate: Tensor
    noise: float

    def and_another(self, other: "Anchor") -> "Anchor":
        """The mean of both, by their accuracy."""
        share = self.noise / (self.noise + other.noise)
        return Anchor(self.estimate + share * (other.estimate - self.estimate), share * other.noise)


def run_round(
    releases: Releases,
    w: Tensor,
    schedule: Schedule,
    reached: float,
    rho: float,
    lipschitz: float,
    smoothness: float,
    anchor_share: float | None,
    *,
    known: Anchor | None,
) -> tuple[Tensor, float, Anchor]:
    """Lines 8 to 17: an anchor, then differences, until the estimate is short or steps end.

    Where the anchor is short already, the paper's round ends and the next one draws another at the
    same point. Its error is small enough for every target down to the floor (Lemma 2), so the
    target is lowered at once instead.

    Args:
        known: of the gradient at the same point, from earlier rounds.

    Returns:
        The last point, the target that it has reached, and what is known of the first one's
        gradient.
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
    anchor = Anchor(estimate, len(w) * releases.trace[-1].noise ** 2)
    if known is not None:
        anchor = known.and_another(anchor)
        estimate = anchor.estimate
    norm = float(torch.linalg.vector_norm(estimate))
    while norm < round_.stop_below and round_.target > schedule.floor:
        round_ = schedule.next(round_.target)
    differences = round_.steps - 1 if share < 1 else 0
    length = round_.difference_bound / smoothness
    for t in range(differences + 1):
        if norm < round_.stop_below:
            break  # at the point whose gradient is short, not the one before it
        step = length / norm
        if schedule.plain_steps and outweighs_noise(estimate, anchor.noise):
            step = 1 / smoothness  # longer: the schedule's is at most 2 / (3 smoothness)
        new = w - step * estimate
        releases.moved(step)
        if t < differences:
            price = (1 - share) * rho / differences
            estimate = estimate + releases.difference(
                new, w, bound=round_.difference_bound, rho=price
            )
            norm = float(torch.linalg.vector_norm(estimate))
        w = new
    return w, round_.target, anchor


def plain_step(releases: Releases, w: Tensor, anchor: Anchor, smoothness: float) -> Tensor:
    """A gradient step of size 1 / smoothness, if it lowers the risk in spite of its noise.

    Else the next anchor is drawn at the same point, and both together say more.
    """
    if not outweighs_noise(anchor.estimate, anchor.noise):
        return w
    releases.moved(1 / smoothness)
    return w - anchor.estimate / smoothness


def outweighs_noise(estimate: Tensor, noise: float) -> bool:
    """Whether a gradient step of size 1 / smoothness lowers the risk in spite of its noise.

    ``F(w - g / L) <= F(w) - (|grad F|^2 - |noise|^2) / (2 L)`` for ``g = grad F + noise`` with
    noise that is orthogonal to the gradient, as it nearly is in many dimensions.
    """
    return float(estimate @ estimate) > 2 * noise
