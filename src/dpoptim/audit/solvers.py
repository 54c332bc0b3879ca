"""Whole-run solvers attacked, and the choice of a clip norm."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dpoptim.audit.adaptive import from_gradients, from_norms
from dpoptim.audit.bounds import Errors, epsilon_lower_bound
from dpoptim.audit.finding import (
    CONFIDENCE,
    DELTA,
    MU,
    STRONG,
    Finding,
    finding,
    gaussian_finding,
)
from dpoptim.audit.side_by_side import CanaryProblem, Floats, lowest, releases_kept, separate
from dpoptim.methods.low_quantile import private_low_quantile
from dpoptim.solvers import Budget, Objective, kl_spider, noisy_gd, proximal_point
from dpoptim.solvers.accelerated_srgd import accelerated_srgd
from dpoptim.solvers.momentum_gd import momentum_gd
from dpoptim.solvers.srgd_settings import SRGD

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


def solver(
    name: str, trials: int, seed: int, *, mu: float = MU, neighboring: str = "zero-out"
) -> Finding:
    """A whole-run solver on records of which one, the canary, has a gradient."""
    run = SOLVERS[name]

    def world(presence: float, world_seed: int) -> Floats:
        records = torch.zeros(8)
        records[0] = presence
        objective = Objective(
            CanaryProblem(trials, capacity=8), (records,), neighboring=neighboring
        )
        with releases_kept(trials) as kept:
            run(objective, Budget(DELTA, mu=mu), world_seed)
        return torch.stack(kept).numpy()

    return gaussian_finding(
        separate(world, low=lowest(neighboring), confidence=CONFIDENCE, seed=seed * 10), mu
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
    """Adaptive gradient descent where it spends nearly all on norms; a tenth of the trials, since
    each is a run.
    """
    runs, budget = max(1000, trials // 10), Budget(DELTA, mu=mu)
    found = from_norms(
        runs, seed * 10**6, budget=budget, neighboring=neighboring, confidence=CONFIDENCE
    )
    return gaussian_finding(found, mu)


def srgd(trials: int, seed: int, *, mu: float = MU, neighboring: str = "zero-out") -> Finding:
    steps, batch = 8, 4

    def world(presence: float, world_seed: int) -> Floats:
        records = torch.zeros(steps * batch)
        records[0] = presence
        with releases_kept(trials) as kept:
            accelerated_srgd(
                CanaryProblem(trials, capacity=len(records)),
                (records,),
                SRGD(steps, batch, 1.0, 1.0),
                budget=Budget(DELTA, mu=mu),
                neighboring=neighboring,
                noise_seed=world_seed,
            )
        return torch.stack(kept).numpy()

    return gaussian_finding(
        separate(world, low=lowest(neighboring), confidence=CONFIDENCE, seed=seed * 10), mu
    )


def low_quantile(trials: int, seed: int, *, epsilon: float = 2.0) -> Finding:
    """The exponential mechanism for the clip norm, on data where one record shifts every count.

    The record goes from below all candidates to above them, as it also does when it is zeroed out.
    In the lower seven octaves the count was the rank and falls one short of it; in the highest
    octave it was one above and becomes the rank. So the scores of the one fall by 1, those of the
    other rise by 1, and their odds change by ``e^epsilon``, all that the guarantee allows. The
    chance changes by nearly as much where it is small, but then takes many runs to measure.
    """
    runs = max(2000, trials // 10)
    low, edge, high = 1.0, 128.0, 256.0
    chosen = []
    for canary, start in ((0.5, 0), (1000.0, runs)):
        values = torch.tensor([canary] + [0.5] * 5 + [edge] + [1000.0] * 5)
        seeds = range(seed * 10**6 + start, seed * 10**6 + start + runs)
        drawn = [
            private_low_quantile(values, 0.5, epsilon=epsilon, low=low, high=high, noise_seed=s)[0]
            for s in seeds
        ]
        chosen.append(np.array([value > edge for value in drawn]))
    errors = Errors(int(chosen[0].sum()), runs, int((~chosen[1]).sum()), runs)
    # of the 8 candidates above the edge against the 57 others
    odds = 8 / 57 * np.exp([-epsilon / 2, epsilon / 2])
    rates = odds / (1 + odds)
    expected = expected_of(runs, rates)
    lower, limit = (epsilon_lower_bound(each, 0.0, CONFIDENCE) for each in (errors, expected))

    def needed() -> int:
        trials = runs
        while epsilon_lower_bound(expected_of(trials, rates), 0.0, CONFIDENCE) < STRONG * epsilon:
            trials *= 2
        return 2 * trials

    return finding(epsilon, lower, limit, 2 * runs, needed=needed)


def expected_of(runs: int, rates: Floats) -> Errors:
    """The wrong guesses of an attack that says "present" at these rates in the two worlds."""
    return Errors(round(runs * rates[0]), runs, round(runs * (1 - rates[1])), runs)
