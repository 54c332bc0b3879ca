"""The proximal point method (Menart et al. 2024, Algorithm 2), with Algorithm 4 inside."""

import math

from torch import Tensor

from dpoptim.accounting.ledger import Ledger
from dpoptim.arguments import one_of, positive_number, proportion, whole_number
from dpoptim.solvers.budget import Budget
from dpoptim.solvers.noisy_gd import strongly_convex_descent
from dpoptim.solvers.objective import Objective
from dpoptim.solvers.releases import Releases, Result, starting_point
from dpoptim.theory.kl_schedules import CONSTANTS, Constants, proximal_rounds

PRACTICAL_INNER_STEPS = 30  # 100 were no better on three tables, and took three times as long


def proximal_point(
    objective: Objective,
    w0: Tensor | None,
    budget: Budget,
    *,
    lipschitz: float,
    weak_convexity: float,
    kl_gamma: float,
    kl_exponent: float,
    risk_bound: float | None = None,
    smoothness: float | None = None,
    beta: float = 0.05,
    constants: Constants = "practical",
    inner_steps: int | None = None,
    ledger: Ledger | None = None,
    label: str = "proximal point",
    noise_seed: int | None = None,
) -> Result:
    """Minimise a weakly convex risk, smooth or not, under KL with kl_exponent >= 2.

    T times, noisy gradient descent on ``F(w) + L |w - w_{t-1}|^2`` for an equal part of the
    budget. Excess risk O~((kl_gamma L0 sqrt(d (1 + F0^((kappa-2)/kappa) kl_gamma^2 L)) / (n
    sqrt(rho)))^kappa) (Theorem 2).

    Args:
        objective: what to minimise.
        w0: the starting point, public, shape (d,); the problem's own by default.
        budget: spent in equal parts.
        lipschitz: L0: every record's gradient is clipped to this norm; > 0.
        weak_convexity: L: F + L/2 |w|^2 is convex; > 0 (any positive number for a convex F).
        kl_gamma, kl_exponent: gamma > 0 and kappa >= 2 of the condition.
        risk_bound: F0, a public bound on F(w0) - min F; (kl_gamma * lipschitz)^kappa by default,
            and at most that.
        smoothness: caps the inner steps, see `noisy_gd`.
        beta: failure probability of the theorem's constants, in (0, 1).
        constants: ``"theorem"`` or ``"practical"`` (fewer rounds; at most 30 inner steps).
        inner_steps: noisy gradients in each round, instead of what the constants say.
        ledger, label, noise_seed: see `Releases`.

    Returns:
        the weights, the guarantee and a trace of all that was released.

    Raises:
        ValueError: a setting out of range.

    **Guarantee.** ``Result.guarantee``, for the objective's relation and any loss. The quadratic
    is public, so the sensitivity is that of F alone.

    Examples:
        >>> import torch
        >>> from dpoptim.solvers import Budget, proximal_point
        >>> from dpoptim.solvers import LinearModel, LinearProblem, Objective
        >>> x = torch.rand(1_000, 3, dtype=torch.float64) / 2
        >>> y = x @ torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
        >>> problem = LinearProblem(LinearModel("squared", features=3), capacity=1_000)
        >>> objective = Objective(problem, (x, y))
        >>> result = proximal_point(
        ...     objective,
        ...     None,
        ...     Budget(delta=1e-6, epsilon=4.0),
        ...     lipschitz=2.0,
        ...     weak_convexity=1.0,
        ...     kl_gamma=2.0,
        ...     kl_exponent=2.0,
        ...     inner_steps=2,
        ... )
        >>> result.weights.shape
        torch.Size([4])
    """
    lipschitz = positive_number("lipschitz", lipschitz)
    kl_gamma = positive_number("kl_gamma", kl_gamma)
    weak_convexity = positive_number("weak_convexity", weak_convexity)
    if not 2 <= kl_exponent < math.inf:
        raise ValueError(
            f"kl_exponent must be at least 2, got {kl_exponent!r}; kl_spider takes exponents up to "
            "2."
        )
    proportion("beta", beta)
    one_of("constants", constants, CONSTANTS)
    largest = (kl_gamma * lipschitz) ** kl_exponent
    w = starting_point(w0, objective)
    releases = Releases(objective, budget, ledger=ledger, label=label, noise_seed=noise_seed)
    rounds = proximal_rounds(
        n=objective.n,
        dimension=objective.dimension,
        rho=releases.rho,
        lipschitz=lipschitz,
        weak_convexity=weak_convexity,
        kl_gamma=kl_gamma,
        kl_exponent=kl_exponent,
        risk_bound=min(
            largest if risk_bound is None else positive_number("risk_bound", risk_bound), largest
        ),
        constants=constants,
    )
    rho = releases.rho / rounds
    if inner_steps is None:
        log = math.log(2 * rounds / beta) if constants == "theorem" else 1.0
        steps = max(1, math.ceil(objective.n**2 * rho * log**2 / objective.dimension))  # Theorem 9
        inner_steps = steps if constants == "theorem" else min(steps, PRACTICAL_INNER_STEPS)
    else:
        inner_steps = whole_number("inner_steps", inner_steps, least=1)
    for _ in range(rounds):
        w = strongly_convex_descent(
            releases,
            w,
            rho=rho,
            lipschitz=lipschitz,
            steps=inner_steps,
            weak_convexity=weak_convexity,
            smoothness=smoothness,
        )
    return releases.result(w)
