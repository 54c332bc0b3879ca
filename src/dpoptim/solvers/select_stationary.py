"""A stationary point (Menart et al. 2024, Theorem 5): descent, then a private choice."""

from torch import Tensor

from dpoptim.accounting.ledger import Ledger
from dpoptim.arguments import proportion
from dpoptim.solvers.adaptive_gd import MOST_STEPS, descend_adaptively
from dpoptim.solvers.budget import Budget
from dpoptim.solvers.objective import Objective
from dpoptim.solvers.releases import Releases, Result, starting_point
from dpoptim.theory.kl_schedules import Constants


def select_stationary(
    objective: Objective,
    w0: Tensor | None,
    budget: Budget,
    *,
    lipschitz: float,
    smoothness: float,
    select_share: float = 0.1,
    beta: float = 0.05,
    constants: Constants = "practical",
    max_steps: int = MOST_STEPS,
    ledger: Ledger | None = None,
    label: str = "stationary point",
    noise_seed: int | None = None,
) -> Result:
    """A point with a small gradient, for smooth losses of any shape.

    The norm is O~((d^(1/4) / sqrt(n sqrt(rho)))) at worst, and O~(sqrt(d) / (n sqrt(rho))) plus
    the noise of the norms if most gradients on the way are large (Theorem 5).

    Args:
        select_share: share of the budget (in rho) kept for the choice, in (0, 1); what the descent
            leaves is added.
        objective, w0, budget, lipschitz, smoothness, beta, constants, max_steps, ledger, label,
            noise_seed: as for `adaptive_gd`.

    Returns:
        the weights, the guarantee and a trace of all that was released.

    Raises:
        ValueError: a setting out of range.

    **Guarantee.** ``Result.guarantee``: descent and choice are paid from one filter. The choice is
    the exponential mechanism with score -|grad F| (odds exp(score n epsilon / (2 m L0))), at its
    exact price in mu.

    Examples:
        >>> import torch
        >>> from dpoptim.solvers import Budget, select_stationary
        >>> from dpoptim.solvers import LinearModel, LinearProblem, Objective
        >>> x = torch.rand(1_000, 3, dtype=torch.float64) / 2
        >>> y = x @ torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
        >>> problem = LinearProblem(LinearModel("squared", features=3), capacity=1_000)
        >>> objective = Objective(problem, (x, y))
        >>> result = select_stationary(
        ...     objective, None, Budget(delta=1e-6, epsilon=2.0), lipschitz=2.0, smoothness=2.0
        ... )
        >>> result.trace[-1].kind
        'selection'
    """
    proportion("select_share", select_share)
    releases = Releases(objective, budget, ledger=ledger, label=label, noise_seed=noise_seed)
    _, iterates = descend_adaptively(
        releases,
        starting_point(w0, objective),
        rho=(1 - select_share) * releases.rho,
        lipschitz=lipschitz,
        smoothness=smoothness,
        beta=beta,
        constants=constants,
        max_steps=max_steps,
        keep_iterates=True,
    )
    chosen = releases.least_gradient(iterates, lipschitz=lipschitz, rho=releases.rho_left)
    return releases.result(iterates[chosen], iterates)
