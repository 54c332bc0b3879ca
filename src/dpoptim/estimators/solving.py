"""From an estimator's settings and public bounds to a solver's run."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from torch import Tensor

from dpoptim.accounting.guarantee import Guarantee
from dpoptim.accounting.ledger import Ledger
from dpoptim.data.sparse_rows import BLOCK, rows_at_once
from dpoptim.distributed.ranks import ALONE, Ranks
from dpoptim.estimators.weights import unit_of_weights, weighted_in_sums
from dpoptim.noise.correlated import Independent
from dpoptim.planning.ranking import CURVATURE, learning_rate, noise_to_signal
from dpoptim.solvers import linear_sums
from dpoptim.solvers.accelerated_srgd import accelerated_srgd
from dpoptim.solvers.adaptive_gd import adaptive_gd
from dpoptim.solvers.budget import Budget
from dpoptim.solvers.kl_spider import kl_spider
from dpoptim.solvers.linear_model import LinearModel
from dpoptim.solvers.momentum_gd import momentum_gd
from dpoptim.solvers.noisy_gd import noisy_gd
from dpoptim.solvers.objective import Objective, held_in_memory
from dpoptim.solvers.proximal_point import proximal_point
from dpoptim.solvers.sparse_problem import problem_of
from dpoptim.solvers.srgd_settings import SRGD, suggested_settings
from dpoptim.solvers.sufficient_statistics import sufficient_statistics

Solver = Literal[
    "auto",
    "sufficient-statistics",
    "momentum-gd",
    "noisy-gd",
    "kl-spider",
    "adaptive-gd",
    "proximal-point",
    "accelerated-srgd",
    "one-pass-sgd",
]
SOLVERS: tuple[str, ...] = get_args(Solver)
MOMENTUM = 0.9  # of momentum_gd, by default
SQUARED_STEPS = 100  # of momentum_gd for a squared loss
SQUARED_RATE = 0.05  # there, over the rate of `dpoptim plan` where weights are about 1 long
TOLERANCE = 0.2  # the part of the predicted error for which no more steps of momentum_gd are taken
NOISY_GD_STEPS = 100
SPIDER_ROUNDS = 50
SPIDER_GAMMA = 4.0  # beyond about 10 the steps of a squared loss are so short that it ends early
# Step sizes times the smoothness bound. Cross-entropy flattens and its gradients are clipped, so
# it takes steps far beyond 1/smoothness; with momentum 0.9 a squared loss diverges above 3.8.
# These, `SQUARED_...`, `SHARP`, `TOLERANCE` and the shares in `linear_fit` are from
# benchmarks/choose_defaults.py.
MOMENTUM_STEP = {"softmax": 256.0, "logistic": 256.0, "squared": 3.0, "huber": 1.0}
NOISY_STEP = {"softmax": 16.0, "logistic": 8.0, "squared": 1.0, "huber": 1.0}
CHUNK = 1 << 17  # rows that compiled functions are given at a time, at most
SHARP = 0.01  # noise in X^T X over its average eigenvalue, at most
SINGLE_PASS = ("accelerated-srgd", "one-pass-sgd")
SINGLE_PASS_OPTIONS = ("steps", "batch_size", "beta", "gradient", "accelerated")
FIXES = {
    "dp-sgd": " Fix: solver='one-pass-sgd' for independent gradients in a single pass; DP-SGD on "
    "sampled batches is DPSGDClassifier, or DPSGDRegressor."
}
# arguments of solvers that are no options
GIVEN = ("objective", "w0", "budget", "lipschitz", "ledger", "label", "noise_seed", "keep_iterates")


def solve(
    solver: str,
    model: LinearModel,
    data: tuple[Any, ...],
    budget: Budget,
    *,
    radius: float,
    clip_norm: float,
    l2: float,
    steps: int | None,
    step_size: float | None,
    options: Mapping[str, Any] | None,
    start: Tensor | None,
    neighboring: str,
    ledger: Ledger | None,
    noise_seed: int | None,
    label: str = "estimator",
    weight_bound: float | None = None,
    ranks: Ranks = ALONE,
) -> tuple[Tensor, Guarantee]:
    """Train a linear model; returns its weights, float64 of shape (d,), and what they cost.

    Args:
        solver: one of `SOLVERS`; ``"auto"`` chooses by `sums_are_sharp`.
        data: x of shape (n, features), float, rows of at most the norm that ``radius`` stands for;
            and y; and shares and weights, see `LinearProblem`, which also says how a record may
            have rows.
        radius: bound on |(x, 1)|; public.
        clip_norm: bound on each record's gradient.
        steps, step_size: the solver's; None: a default from public numbers.
        options: further arguments of the solver function, by name.
        label: public text for the ledger's entry, which the solver's name ends.
        weight_bound: public bound on the weights, if they have one.
        ranks: the processes that hold the other records.

    Raises:
        ValueError, TypeError: an unknown solver or option, or a setting out of range.
    """
    n, unit = ranks.all_sum(len(data[0])), unit_of_weights(data, weight_bound)
    rows = n * (data[0].shape[1] if len(data[0].shape) == 3 else 1)
    smoothness = model.smoothness(radius) + l2
    common: dict[str, Any] = {
        "ledger": ledger,
        "noise_seed": noise_seed,
        "label": f"{label}, {solver}",
    }
    extra = dict(options or {})
    untouched = not extra and steps is None and step_size is None
    if solver == "auto":
        sums = untouched and start is None and sums_are_sharp(model, n / unit, budget)
        solver = "sufficient-statistics" if sums else "momentum-gd"
        common["label"] = f"{label}, {solver}"
    if solver == "sufficient-statistics":
        if not untouched:
            raise TypeError(
                "solver='sufficient-statistics' takes no steps, step_size or solver_options; leave "
                "them out."
            )
        solved = sufficient_statistics(
            model,
            weighted_in_sums(data, unit),
            budget,
            radius=radius,
            l2=l2 / unit,
            neighboring=neighboring,
            ranks=ranks,
            **common,
        )
        return solved.weights, solved.guarantee
    if solver in SINGLE_PASS:
        problem = problem_of(data, model, capacity=rows, l2=l2)
        settings = one_pass(
            solver,
            n,
            model.dimension,
            budget,
            clip_norm,
            smoothness,
            steps,
            neighboring,
            extra,
            cross_entropy=is_cross_entropy(model),
        )
        one = accelerated_srgd(
            problem, data, settings, budget=budget, neighboring=neighboring, ranks=ranks, **common
        )
        return one.weights, one.guarantee
    objective = Objective(
        problem_of(data, model, capacity=rows, l2=l2),
        data,
        neighboring=neighboring,
        chunk=max(1, rows_in_chunk(data[0], model) * n // rows),
        ranks=ranks,
    )
    function, arguments = iterative(
        solver,
        model,
        n,
        budget,
        smoothness=smoothness,
        clip_norm=clip_norm,
        l2=l2,
        steps=steps,
        step_size=step_size,
    )
    result = function(
        objective, start, budget, lipschitz=clip_norm, **{**arguments, **extra}, **common
    )
    return result.weights, result.guarantee


def rows_in_chunk(x: Any, model: LinearModel) -> int:
    """Rows taken at a time: many where compiled functions take a few of them again, in cache."""
    at_once = held_in_memory(x) and linear_sums.serve(None, model.outputs, model.columns)
    return rows_at_once(model.features, CHUNK if at_once else BLOCK)


def iterative(
    solver: str,
    model: LinearModel,
    n: int,
    budget: Budget,
    *,
    smoothness: float,
    clip_norm: float,
    l2: float,
    steps: int | None,
    step_size: float | None,
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function of a solver that goes through the data many times, and its arguments.

    Where nothing else is asked for, they come from public numbers.

    Raises:
        ValueError: there is no such solver.
    """
    kl: dict[str, float] = {
        "kl_gamma": 1 / math.sqrt(2 * max(l2, 1e-3)),
        "kl_exponent": 2.0,
        "risk_bound": math.log(max(model.outputs, 2)),
    }
    match solver:
        case "momentum-gd":
            count, step = momentum_settings(model, n, budget, steps, clip_norm, smoothness)
            largest = MOMENTUM_STEP[model.loss] / smoothness
            return momentum_gd, {"steps": count, "step_size": step_size or min(step, largest)}
        case "noisy-gd":
            factor = NOISY_STEP[model.loss]
            if is_cross_entropy(model):
                factor *= affordable_steps(n, budget) / 20
            step = step_size or factor / smoothness
            return noisy_gd, {"steps": steps or NOISY_GD_STEPS, "step_size": step}
        case "kl-spider":
            kl["kl_gamma"] = min(kl["kl_gamma"], SPIDER_GAMMA)
            return kl_spider, {"smoothness": smoothness, "rounds": SPIDER_ROUNDS, **kl}
        case "adaptive-gd":
            # its steps of 1 / (2 L1) are as long as noisy_gd's
            return adaptive_gd, {"smoothness": smoothness / (2 * NOISY_STEP[model.loss])}
        case "proximal-point":
            # any number above 0 serves a convex risk; this one needs few rounds
            convexity = kl["kl_gamma"] ** -2
            return proximal_point, {"weak_convexity": convexity, "smoothness": smoothness, **kl}
    fix = FIXES.get(solver, "")
    raise ValueError(f"solver must be one of {', '.join(map(repr, SOLVERS))}, got {solver!r}.{fix}")


def option_names(solver: str) -> tuple[str, ...]:
    """Public settings of a solver, as numbers and words."""
    if solver == "sufficient-statistics":
        return ("l2",)
    if solver in SINGLE_PASS:
        return ("clip_norm", "l2", *SINGLE_PASS_OPTIONS)
    unit = LinearModel("logistic", 1)
    budget = Budget(delta=1e-5, mu=1.0)
    function, _ = iterative(
        solver, unit, 1, budget, smoothness=1.0, clip_norm=1.0, l2=0.0, steps=1, step_size=1.0
    )
    own = [name for name in inspect.signature(function).parameters if name not in GIVEN]
    return ("clip_norm", "l2", *own)


def is_cross_entropy(model: LinearModel) -> bool:
    return model.loss in ("softmax", "logistic")


def momentum_settings(
    model: LinearModel,
    n: int,
    budget: Budget,
    steps: int | None,
    clip_norm: float,
    smoothness: float,
) -> tuple[int, float]:
    """Steps of gradient descent with momentum, and the step size that suits the noise.

    Weights of a squared loss are about as long as ``sqrt(columns / smoothness)``, in units of the
    targets.
    """
    if is_cross_entropy(model):
        count, reach = steps or full_batch_steps(model, n, budget), 1.0
    else:
        count = steps or SQUARED_STEPS
        reach = SQUARED_RATE * math.sqrt(model.columns / smoothness)
    return count, reach * full_batch_rate(model, n, budget, count, clip_norm)


def sums_are_sharp(model: LinearModel, n: float, budget: Budget) -> bool:
    """Whether public numbers say that noisy sums X^T X will beat clipped gradients.

    In units of the squared radius the noise has an operator norm near ``sqrt 2 / mu sqrt(2 d)``,
    and X^T X an average eigenvalue of at most n / d. Gradients are clipped to a tenth of the
    longest, so their noise is less; but with plenty of data their many steps are slow, and end
    early in directions of little variance.
    """
    noise = math.sqrt(2) / budget.gdp * math.sqrt(2 * model.columns)
    return model.loss == "squared" and model.columns * noise <= SHARP * n


def full_batch_steps(model: LinearModel, n: int, budget: Budget) -> int:
    """Steps after which `predicted_error` falls by less than `TOLERANCE` more: 10 to 100."""
    floor = math.sqrt(model.dimension) / (budget.gdp * n)  # of the noise, whatever the steps
    return round(min(100.0, max(10.0, CURVATURE / (TOLERANCE * floor))))


def full_batch_rate(
    model: LinearModel, n: int, budget: Budget, steps: int, clip_norm: float
) -> float:
    """The learning rate of `dpoptim plan` for full batches at this clip norm."""
    noise = noise_to_signal(math.sqrt(steps) / budget.gdp, model.dimension, n)
    return learning_rate(noise, math.inf, steps, MOMENTUM) / clip_norm


def affordable_steps(n: int, budget: Budget) -> int:
    """Steps of momentum for a softmax: 20 to 100.

    Each costs noise, of which large data and budgets bear more.
    """
    return round(min(100.0, max(20.0, n * budget.gdp / 200)))


def one_pass(
    solver: str,
    n: int,
    dimension: int,
    budget: Budget,
    clip_norm: float,
    smoothness: float,
    steps: int | None,
    neighboring: str,
    options: Mapping[str, Any],
    *,
    cross_entropy: bool,
) -> SRGD:
    """Settings of the single-pass solvers."""
    settings = suggested_settings(
        n,
        dimension,
        budget.gdp,
        lipschitz=clip_norm,
        smoothness=smoothness,
        neighboring=neighboring,
    )
    changes: dict[str, Any] = {}
    # it flattens, so its curvature is far below the bound; on three data sets this was near the
    # best
    if cross_entropy:
        steps = steps or math.ceil(math.sqrt(n))
        changes["beta"] = smoothness * min(2.0, max(0.05, 0.12 / budget.gdp))
    if steps is not None:
        changes |= {"steps": steps, "batch_size": max(1, n // steps)}
    if solver == "one-pass-sgd":
        changes |= {"gradient": "independent", "accelerated": False, "mechanism": Independent()}
    known = {*SINGLE_PASS_OPTIONS, "clip_norm", "mechanism", "constraint"}
    if surplus := set(options) - known:
        raise TypeError(
            f"solver_options has unknown entries {sorted(surplus)}; known: {sorted(known)}."
        )
    values = {name: getattr(settings, name) for name in known}
    return SRGD(**{**values, **changes, **options})
