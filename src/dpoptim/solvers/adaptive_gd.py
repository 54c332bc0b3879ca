"""Adaptive noisy gradient descent (Menart et al. 2024, Algorithm 3): noise by gradient length.

And a stationary point (Theorem 5): such a descent, then a private choice among its points.
"""

import math

from torch import Tensor

from dpoptim.accounting.ledger import Ledger
from dpoptim.arguments import one_of, positive_number, proportion, whole_number
from dpoptim.solvers.budget import Budget
from dpoptim.solvers.objective import Objective
from dpoptim.solvers.releases import Releases, Result, starting_point
from dpoptim.theory.kl_schedules import CONSTANTS, Constants

MOST_STEPS = 10_000
LAST_STEPS = 100
LARGEST_RAISE = 4.0  # the last step may be this many times cheaper than wanted (twice the noise)


def adaptive_gd(
    objective: Objective,
    w0: Tensor | None,
    budget: Budget,
    *,
    lipschitz: float,
    smoothness: float,
    beta: float = 0.05,
    constants: Constants = "practical",
    max_steps: int = MOST_STEPS,
    last_steps: int = LAST_STEPS,
    keep_iterates: bool = False,
    ledger: Ledger | None = None,
    label: str = "adaptive gradient descent",
    noise_seed: int | None = None,
) -> Result:
    """Minimise a smooth risk without knowing its KL parameters.

    Each step first releases the gradient's norm, then the gradient with noise in proportion to it;
    large gradients are cheap, so the budget is spent where it is needed. Under the (gamma,
    kappa)-KL condition with kappa in [1, 2] the excess risk is O~((sqrt(d) / (n sqrt(rho)))^(2
    kappa / (4 - kappa)) + (1 / (n sqrt(rho)))^(kappa / 2)) (Theorem 4).

    Args:
        objective: what to minimise.
        w0: the starting point, public, shape (d,); the problem's own by default.
        budget: spent until the next step does not fit.
        lipschitz: L0: every record's gradient is clipped to this norm; > 0.
        smoothness: L1 of F; steps have size 1 / (2 L1); > 0.
        beta: failure probability of the theorem's constants, in (0, 1).
        constants: ``"theorem"`` (noise of length N_t / sqrt(log(n sqrt(rho) / beta))) or
            ``"practical"`` (N_t / 2).
        max_steps: public cap on the number of steps, at least 1.
        last_steps: once a step would cost more than this part of what is left, or its norm is lost
            in the noise, what is left goes into so many plain noisy steps; ours. 0: the paper's
            algorithm, which ends there, and moves nowhere if that is the first norm.
        keep_iterates: return all points visited, which costs memory only.
        ledger, label, noise_seed: see `Releases`.

    Returns:
        the weights, the guarantee and a trace of all that was released.

    Raises:
        ValueError: a setting out of range.

    **Guarantee.** ``Result.guarantee``, for the objective's relation and any loss: the filter is
    asked before each norm and again before each gradient, those of the last steps included, and
    charged what is really drawn. (The paper charges by a formula in N_t^2, which asks too little
    when N_t is negative, and under replace-one.)

    Examples:
        >>> import torch
        >>> from dpoptim.solvers import Budget, LinearModel, LinearProblem, Objective, adaptive_gd
        >>> x = torch.rand(1_000, 3, dtype=torch.float64) / 2
        >>> y = x @ torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
        >>> problem = LinearProblem(LinearModel("squared", features=3), capacity=1_000)
        >>> objective = Objective(problem, (x, y))
        >>> result = adaptive_gd(
        ...     objective, None, Budget(delta=1e-6, epsilon=2.0), lipschitz=2.0, smoothness=2.0
        ... )
        >>> result.weights.shape
        torch.Size([4])
    """
    w = starting_point(w0, objective)
    releases = Releases(objective, budget, ledger=ledger, label=label, noise_seed=noise_seed)
    w, iterates = descend_adaptively(
        releases,
        w,
        rho=releases.rho,
        lipschitz=lipschitz,
        smoothness=smoothness,
        beta=beta,
        constants=constants,
        max_steps=max_steps,
        last_steps=last_steps,
        keep_iterates=keep_iterates,
    )
    return releases.result(w, iterates)


def descend_adaptively(
    releases: Releases,
    w: Tensor,
    *,
    rho: float,
    lipschitz: float,
    smoothness: float,
    beta: float,
    constants: Constants,
    max_steps: int,
    last_steps: int,
    keep_iterates: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Algorithm 3 for ``rho`` of the budget: the last point, and all of them if they are kept."""
    lipschitz = positive_number("lipschitz", lipschitz)
    smoothness = positive_number("smoothness", smoothness)
    max_steps = whole_number("max_steps", max_steps, least=1)
    last_steps = whole_number("last_steps", last_steps, least=0)
    proportion("beta", beta)
    one_of("constants", constants, CONSTANTS)
    n, size = releases.n, 1 / (2 * smoothness)
    log = max(1.0, math.log(n * math.sqrt(rho) / beta)) if constants == "theorem" else 4.0
    # what the paper's noise on N_t costs under zero-out
    of_norm = min(math.sqrt(rho) / (2 * n), rho / 2)
    kept = releases.rho_left - rho  # not ours to spend
    iterates = [w] if keep_iterates else []

    def step(price: float) -> None:
        nonlocal w
        w = w - size * releases.gradient(w, lipschitz=lipschitz, rho=price)
        releases.moved(size)
        if keep_iterates:
            iterates.append(w)

    for taken in range(max_steps):
        if releases.rho_left - kept <= of_norm:
            break
        norm = releases.gradient_norm(w, lipschitz=lipschitz, rho=of_norm)
        left = releases.rho_left - kept
        wanted = math.inf  # the gradient is lost in the norm's noise
        if norm > 0:
            wanted = releases.price(lipschitz, norm / math.sqrt(releases.dimension * log))
        if last_steps and wanted > left / last_steps:
            count = min(last_steps, max_steps - taken)
            for _ in range(count):
                step(left / count)
            break
        if wanted > LARGEST_RAISE * left:
            break  # what is left would buy a direction that is mostly noise
        step(min(wanted, left))
        if wanted >= left:
            break
    return w, iterates


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
    last_steps: int = 0,
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
        objective, w0, budget, lipschitz, smoothness, beta: as for `adaptive_gd`.
        constants, max_steps, ledger, label, noise_seed: as for `adaptive_gd`.
        last_steps: as there; by default none, since the choice gets what is left.

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
        last_steps=last_steps,
        keep_iterates=True,
    )
    chosen = releases.least_gradient(iterates, lipschitz=lipschitz, rho=releases.rho_left)
    return releases.result(iterates[chosen], iterates)
