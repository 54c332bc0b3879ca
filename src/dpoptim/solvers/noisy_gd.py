"""Noisy gradient descent (Menart et al. 2024, Algorithm 4), and with a constant step."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dpoptim.accounting.ledger import Ledger
from dpoptim.arguments import positive_number, whole_number
from dpoptim.solvers.budget import Budget
from dpoptim.solvers.objective import Objective
from dpoptim.solvers.releases import Releases, Result, starting_point


def noisy_gd(
    objective: Objective,
    w0: Tensor | None,
    budget: Budget,
    *,
    lipschitz: float,
    steps: int,
    step_size: float | None = None,
    weak_convexity: float | None = None,
    smoothness: float | None = None,
    average: bool | None = None,
    ledger: Ledger | None = None,
    label: str = "noisy gradient descent",
    noise_seed: int | None = None,
) -> Result:
    """Full-batch gradient descent with Gaussian noise, each step at the same share of the budget.

    With ``weak_convexity`` it is Algorithm 4: it minimises ``F(w) + L |w - w0|^2`` (strongly
    convex if F is L-weakly convex) with steps 1/(L t), projected onto the ball of radius
    ``lipschitz / (2 L)`` around w0, and returns the average with weights proportional to t. Excess
    risk O~(L0^2 d / (L n^2 rho)) at ``steps`` of order n^2 rho / d (Theorem 9).

    Args:
        objective: what to minimise.
        w0: the starting point, public, shape (d,); the problem's own by default.
        budget: spent in equal parts.
        lipschitz: L0: every record's gradient is clipped to this norm; > 0.
        steps: noisy gradients, at least 1; public.
        step_size: a constant step size instead of Algorithm 4's.
        weak_convexity: L of Algorithm 4, > 0.
        smoothness: caps Algorithm 4's steps at 1/smoothness, without which the first ones jump on
            smooth losses.
        average: return the weighted average of the iterates instead of the last one; by default
            Algorithm 4 does.
        ledger, label, noise_seed: see `Releases`.

    Returns:
        the weights, the guarantee and a trace of all that was released.

    Raises:
        ValueError: a setting out of range, or both or neither of step_size and weak_convexity.

    **Guarantee.** ``Result.guarantee``, for the objective's relation and any loss: noise sigma on
    the mean with ``sigma^2 = (m L0 / n)^2 steps / (2 rho)``, m = 1 (zero-out) or 2 (replace-one).

    Examples:
        >>> import torch
        >>> from dpoptim.solvers import Budget, LinearModel, LinearProblem, Objective, noisy_gd
        >>> x = torch.rand(1_000, 3, dtype=torch.float64) / 2
        >>> y = x @ torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
        >>> problem = LinearProblem(LinearModel("squared", features=3), capacity=1_000)
        >>> objective = Objective(problem, (x, y))
        >>> result = noisy_gd(
        ...     objective,
        ...     None,
        ...     Budget(delta=1e-6, epsilon=2.0),
        ...     lipschitz=2.0,
        ...     steps=10,
        ...     step_size=0.3,
        ... )
        >>> result.guarantee.epsilon <= 2.0
        True
    """
    lipschitz = positive_number("lipschitz", lipschitz)
    steps = whole_number("steps", steps, least=1)
    if (step_size is None) == (weak_convexity is None):
        raise ValueError(
            "give either step_size (plain descent) or weak_convexity (Algorithm 4), and not both."
        )
    start = starting_point(w0, objective)
    releases = Releases(objective, budget, ledger=ledger, label=label, noise_seed=noise_seed)
    if step_size is not None:
        constant = positive_number("step_size", step_size)
        weights = descend(
            releases,
            start,
            rho=releases.rho,
            lipschitz=lipschitz,
            steps=steps,
            step_size=lambda _: constant,
            average=bool(average),
        )
    else:
        weights = strongly_convex_descent(
            releases,
            start,
            rho=releases.rho,
            lipschitz=lipschitz,
            steps=steps,
            weak_convexity=positive_number("weak_convexity", weak_convexity),
            smoothness=smoothness,
            average=average is not False,
        )
    return releases.result(weights)


def strongly_convex_descent(
    releases: Releases,
    centre: Tensor,
    *,
    rho: float,
    lipschitz: float,
    steps: int,
    weak_convexity: float,
    smoothness: float | None = None,
    average: bool = True,
) -> Tensor:
    """Algorithm 4 on ``F + weak_convexity |w - centre|^2``, for ``rho`` of the budget."""
    largest = math.inf if smoothness is None else 1 / positive_number("smoothness", smoothness)
    return descend(
        releases,
        centre,
        rho=rho,
        lipschitz=lipschitz,
        steps=steps,
        step_size=lambda t: min(1 / (weak_convexity * t), largest),
        pull=weak_convexity,
        radius=lipschitz / (2 * weak_convexity),
        average=average,
    )


def descend(
    releases: Releases,
    centre: Tensor,
    *,
    rho: float,
    lipschitz: float,
    steps: int,
    step_size: Callable[[int], float],
    pull: float = 0.0,
    radius: float = math.inf,
    average: bool = True,
) -> Tensor:
    """Take noisy gradient steps from ``centre`` on ``F + pull |w - centre|^2``, in a ball."""
    w = centre.clone()
    weighted, total = w.clone(), 1  # iterate t has weight t
    for t in range(1, steps + 1):
        gradient = releases.gradient(w, lipschitz=lipschitz, rho=rho / steps) + 2 * pull * (
            w - centre
        )
        releases.moved(step_size(t))
        w = project(w - step_size(t) * gradient, centre, radius)
        weighted += (t + 1) * w
        total += t + 1
    return weighted / total if average else w


def project(w: Tensor, centre: Tensor, radius: float) -> Tensor:
    """The point of the ball around ``centre`` that is nearest to ``w``."""
    away = w - centre
    distance = float(torch.linalg.vector_norm(away))
    return w if distance <= radius else centre + away * (radius / distance)
