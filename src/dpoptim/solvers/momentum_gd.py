"""Noisy gradient descent with momentum, few full-batch steps. The estimators' default."""

import torch
from torch import Tensor

from dpoptim.accounting.ledger import Ledger
from dpoptim.arguments import positive_number, real_number, whole_number
from dpoptim.solvers.budget import Budget
from dpoptim.solvers.objective import Objective
from dpoptim.solvers.releases import Releases, Result, starting_point

TAIL = 0.25  # share of the last iterates that are averaged: their noise is a good part independent


def momentum_gd(
    objective: Objective,
    w0: Tensor | None,
    budget: Budget,
    *,
    lipschitz: float,
    steps: int,
    step_size: float,
    momentum: float = 0.9,
    ledger: Ledger | None = None,
    label: str = "noisy gradient descent with momentum",
    noise_seed: int | None = None,
) -> Result:
    """``v <- momentum v + noisy gradient, w <- w - step_size v``; the mean of the last quarter.

    Args:
        objective: what to minimise.
        w0: the starting point, public, shape (d,); the problem's own by default.
        budget: spent in equal parts.
        lipschitz: every record's gradient is clipped to this norm; > 0.
        steps: noisy gradients, at least 1; public.
        step_size: > 0.
        momentum: in [0, 1).
        ledger, label, noise_seed: see `Releases`.

    Returns:
        the weights, the guarantee and a trace of all that was released.

    Raises:
        ValueError: a setting out of range.

    **Guarantee.** ``Result.guarantee``, for the objective's relation and any loss; momentum and
    averages are post-processing.

    Examples:
        >>> import torch
        >>> from dpoptim.solvers import Budget, LinearModel, LinearProblem, Objective, momentum_gd
        >>> x = torch.rand(1_000, 3, dtype=torch.float64) / 2
        >>> y = x @ torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
        >>> problem = LinearProblem(LinearModel("squared", features=3), capacity=1_000)
        >>> objective = Objective(problem, (x, y))
        >>> result = momentum_gd(
        ...     objective,
        ...     None,
        ...     Budget(delta=1e-6, epsilon=2.0),
        ...     lipschitz=2.0,
        ...     steps=10,
        ...     step_size=0.3,
        ... )
        >>> len(result.trace)
        10
    """
    lipschitz = positive_number("lipschitz", lipschitz)
    steps = whole_number("steps", steps, least=1)
    step_size, momentum = positive_number("step_size", step_size), real_number("momentum", momentum)
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum!r}; 0.9 is a common choice.")
    w = starting_point(w0, objective)
    releases = Releases(objective, budget, ledger=ledger, label=label, noise_seed=noise_seed)
    velocity, tail = torch.zeros_like(w), []
    for step in range(steps):
        velocity = momentum * velocity + releases.gradient(
            w, lipschitz=lipschitz, rho=releases.rho / steps
        )
        releases.moved(step_size)
        w = w - step_size * velocity
        if step >= steps - max(1, round(TAIL * steps)):
            tail.append(w)
    return releases.result(torch.stack(tail).mean(0))
