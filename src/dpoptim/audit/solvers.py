"""Whole-run solvers attacked, and the choice of a clip norm.

Adaptive gradient descent has two releases, and its claim is for every input: so the public part of
the risk may be made for the attack, by inputs that spend nearly all on one. It is a linear penalty,
whose constant slope says how long the gradient is, and with that what its release costs. The data
are zeros, but for a canary.

**The statistic** is there the log-likelihood ratio of the two worlds, which for noise chosen from
earlier releases is the sum over releases of ``shift (released - middle) / noise^2``: what the
canary moves, the middle of the worlds, and the noise that the public trace gives. Its sign
decides, so nothing is calibrated and every trial certifies.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpoptim.accounting import gdp_epsilon
from dpoptim.audit.bounds import Errors, Floats, gdp_lower_bound
from dpoptim.audit.finding import CONFIDENCE, DELTA, MU, Finding, finding, gaussian_finding
from dpoptim.audit.side_by_side import (
    CanaryProblem,
    Separation,
    releases_kept,
    separate,
    without_canary,
)
from dpoptim.audit.statistics import choices_seen, shifts_seen
from dpoptim.gate import choices
from dpoptim.methods.low_quantile import private_low_quantile
from dpoptim.solvers import (
    Budget,
    Objective,
    Result,
    adaptive_gd,
    kl_spider,
    noisy_gd,
    proximal_point,
)
from dpoptim.solvers.accelerated_srgd import accelerated_srgd
from dpoptim.solvers.linear_model import LinearModel
from dpoptim.solvers.momentum_gd import momentum_gd
from dpoptim.solvers.srgd_settings import SRGD
from dpoptim.solvers.sufficient_statistics import sufficient_statistics

FEWEST_RUNS = 1000  # of adaptive gradient descent, for its norms
SOLVERS: dict[str, Callable[[Objective, Budget, int], Any]] = {
    "momentum-gd": lambda o, b, s: momentum_gd(
        o, None, b, lipschitz=1.0, steps=10, step_size=0.1, noise_seed=s
    ),
    "noisy-gd": lambda o, b, s: noisy_gd(
        o, None, b, lipschitz=1.0, steps=10, step_size=0.1, noise_seed=s
    ),
    "kl-spider": lambda o, b, s: kl_spider(
        *(o, None, b),
        lipschitz=1.0,
        smoothness=1.0,
        kl_gamma=1.0,
        kl_exponent=2.0,
        risk_bound=1.0,
        noise_seed=s,
    ),
    "proximal-point": lambda o, b, s: proximal_point(
        *(o, None, b),
        lipschitz=1.0,
        smoothness=1.0,
        weak_convexity=0.1,
        kl_gamma=1.0,
        kl_exponent=2.0,
        risk_bound=1.0,
        inner_steps=4,
        noise_seed=s,
    ),
}
# gradients that the budget would pay for: one, and half of another, which is made to fit what is
# left
STEPS = 1.5
# slope, in shifts of the canary: a gradient so long costs 2 / 64, a norm sqrt(rho) / 2
STEEP = 8.0


def solver(
    name: str, trials: int, seed: int, *, mu: float = MU, neighboring: str = "zero-out"
) -> Finding:
    """A whole-run solver on records of which one, the canary, has a gradient."""

    def run(records: Tensor, world_seed: int) -> object:
        problem = CanaryProblem(trials, capacity=len(records))
        objective = Objective(problem, (records,), neighboring=neighboring)
        return SOLVERS[name](objective, Budget(DELTA, mu=mu), world_seed)

    return in_two_worlds(run, 8, trials, seed, mu=mu, neighboring=neighboring)


def in_two_worlds(
    run: Callable[[Tensor, int], object],
    rows: int,
    trials: int,
    seed: int,
    *,
    mu: float,
    neighboring: str,
) -> Finding:
    """Run a solver with the canary, the first of ``rows`` records, and without; tell them apart."""

    def world(presence: float, world_seed: int) -> Floats:
        records = torch.zeros(rows)
        records[0] = presence
        with releases_kept(trials) as kept:
            run(records, world_seed)
        return torch.stack(kept).numpy()

    return gaussian_finding(
        separate(world, low=without_canary(neighboring), confidence=CONFIDENCE, seed=seed * 10), mu
    )


def adaptive(trials: int, seed: int, *, mu: float = MU, neighboring: str = "zero-out") -> Finding:
    """Adaptive gradient descent where it spends nearly all on gradients."""
    budget = Budget(DELTA, mu=mu)
    return gaussian_finding(
        from_gradients(
            trials, seed * 10, budget=budget, neighboring=neighboring, confidence=CONFIDENCE
        ),
        mu,
    )


def adaptive_norms(
    trials: int, seed: int, *, mu: float = MU, neighboring: str = "zero-out"
) -> Finding:
    """Adaptive gradient descent that spends nearly all on norms; a trial is a run: a tenth."""
    runs, budget = max(FEWEST_RUNS, trials // 10), Budget(DELTA, mu=mu)
    found = from_norms(
        runs, seed * 10**6, budget=budget, neighboring=neighboring, confidence=CONFIDENCE
    )
    return gaussian_finding(found, mu)


def srgd(trials: int, seed: int, *, mu: float = MU, neighboring: str = "zero-out") -> Finding:
    steps, batch = 8, 4

    def run(records: Tensor, world_seed: int) -> object:
        return accelerated_srgd(
            CanaryProblem(trials, capacity=len(records)),
            (records,),
            SRGD(steps, batch, 1.0, 1.0),
            budget=Budget(DELTA, mu=mu),
            neighboring=neighboring,
            noise_seed=world_seed,
        )

    return in_two_worlds(run, steps * batch, trials, seed, mu=mu, neighboring=neighboring)


def sums(trials: int, seed: int, *, mu: float = MU, neighboring: str = "zero-out") -> Finding:
    """A regression's sums: the exact shift between the two records that differ most."""
    model = LinearModel("squared", 2, intercept=False)
    away = [math.nan, math.nan] if neighboring == "zero-out" else [0.5, math.sqrt(0.75)]
    with shifts_seen() as seen:
        for x, y in (([1.0, 0.0], 1.0), (away, -1.0)):
            sufficient_statistics(
                model,
                (np.array([x]), np.array([y])),
                Budget(DELTA, mu=mu),
                radius=1.0,
                neighboring=neighboring,
                noise_seed=seed,
            )
    (here, deviation), (there, _) = seen
    claimed = gdp_epsilon(mu, DELTA)
    shown = gdp_epsilon(float((here - there).norm()) / deviation, DELTA)
    return finding(claimed, shown, claimed, 0)


def low_quantile(trials: int, seed: int) -> Finding:
    """The exponential mechanism for the clip norm, on data where one record shifts every count.

    The record goes from below all candidates to above them, as it also does when it is zeroed out.
    Below the edge the count was the rank and falls one short of it; at the candidate above it was
    one above and becomes the rank. So the scores of the one fall by 1, that of the other rises by
    1, and their odds change by ``e^epsilon``, all that the guarantee allows; so does the chance of
    the other, as it is one candidate among hundreds. The odds are those that are drawn from
    (`noise.exponential_mechanism` draws them exactly, and has tests of its own), so nothing is
    estimated.
    """
    epsilon, edge, octaves = 2.0, 2.0**-0.125, 60
    with choices_seen(choices) as seen:
        for canary in (2.0**-octaves, 1000.0):
            values = torch.tensor([canary] + [1e-30] * 5 + [edge] + [1000.0] * 5)
            private_low_quantile(
                values, 0.5, epsilon=epsilon, low=2.0**-octaves, high=1.0, noise_seed=seed
            )
    absent, present = (logits - np.logaddexp.reduce(logits) for logits in seen)
    shown = float(np.abs(absent - present).max())
    return finding(epsilon, shown, epsilon, 0)


def from_gradients(
    trials: int, seed: int, *, budget: Budget, neighboring: str, confidence: float
) -> Separation:
    """Runs side by side, which read the gradients alone.

    A norm costs sqrt(rho) / (2 n): with a hundredth as many records as coordinates next to
    nothing, and it is still known well enough. The canary must not be seen in the norm, which all
    runs share: the slope's part along the canary lies halfway between the worlds, so that
    gradients are equally long in both, and its part across the canary sets that length.
    """
    n, rho, low = max(1, trials // 100), budget.gdp**2 / 2, without_canary(neighboring)
    shift, middle = (1 - low) / n, (1 + low) / 2 / n
    # A gradient of length sqrt(trials) r costs 2 (shift / r)^2, which is to be rho / STEPS.
    across = torch.full(
        (trials,), shift * math.sqrt(max(0.0, 2 * STEPS / rho - 1 / 4)), dtype=torch.float64
    )
    across[1::2] *= -1

    def scores(presence: float, world_seed: int) -> Floats:
        records = torch.zeros(n)
        records[0] = presence
        result = attacked_run(records, trials, across - middle, budget, neighboring, world_seed)
        return of_gradients(result, across).numpy()

    return separation_of(scores(low, seed), scores(1.0, seed + 1), confidence)


def from_norms(
    trials: int, seed: int, *, budget: Budget, neighboring: str, confidence: float
) -> Separation:
    """Runs in turn, one record in one dimension: norms cost most, a slope makes gradients cheap.

    Every release, of either kind, shows the canary in full.
    """
    low = without_canary(neighboring)
    slope = torch.tensor([STEEP * (1 - low)], dtype=torch.float64)
    middle = slope + (1 + low) / 2

    def score(presence: float, run_seed: int) -> float:
        result = attacked_run(torch.tensor([presence]), 1, slope, budget, neighboring, run_seed)
        norms = [
            (step.norm - float(middle)) / step.noise**2
            for step in result.trace
            if step.kind == "norm"
        ]
        return sum(norms) + float(of_gradients(result, middle))

    absent = np.array([score(low, seed + i) for i in range(trials)])
    present = np.array([score(1.0, seed + trials + i) for i in range(trials)])
    return separation_of(absent, present, confidence)


def attacked_run(
    records: Tensor, dimension: int, slope: Tensor, budget: Budget, neighboring: str, seed: int
) -> Result:
    """A run with steps of size 1, and all its points; the last is a plain one."""
    objective = Objective(
        CanaryProblem(dimension, len(records), slope), (records,), neighboring=neighboring
    )
    return adaptive_gd(
        *(objective, None, budget),
        lipschitz=1.0,
        smoothness=0.5,
        last_steps=1,
        keep_iterates=True,
        noise_seed=seed,
    )


def of_gradients(result: Result, middle: Tensor) -> Tensor:
    """The gradients' evidence by coordinate: sum of (released - middle) / noise^2, (d,)."""
    noises = [step.noise for step in result.trace if step.kind == "gradient"]
    total = torch.zeros_like(middle)
    for noise, (old, new) in zip(noises, pairwise(result.iterates), strict=True):
        total += (old - new - middle) / noise**2
    return total


def separation_of(absent: Floats, present: Floats, confidence: float) -> Separation:
    errors = Errors(int((absent > 0).sum()), absent.size, int((present <= 0).sum()), present.size)
    return Separation(gdp_lower_bound(errors, confidence), errors)
