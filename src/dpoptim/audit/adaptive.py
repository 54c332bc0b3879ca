"""Attacks on adaptive gradient descent's two releases, by inputs that spend nearly all on one.

Its claim is for every input, so the public part of the risk may be made for the attack: a linear
penalty, whose constant slope says how long the gradient is, and with that what its release costs.
The data are zeros, but for a canary.

**The statistic** is the log-likelihood ratio of the two worlds, which for noise chosen from
earlier releases is the sum over releases of ``shift (released - middle) / noise^2``: what the
canary moves, the middle of the worlds, and the noise that the public trace gives. Its sign
decides, so nothing is calibrated and every trial certifies.
"""

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dpoptim.audit.bounds import Errors, gdp_lower_bound
from dpoptim.audit.side_by_side import CanaryProblem, Floats, Separation, without_canary
from dpoptim.solvers import Budget, Objective, Result, adaptive_gd

# gradients that the budget would pay for: one, and half of another, which is made to fit what is
# left
STEPS = 1.5
# slope, in shifts of the canary: a gradient so long costs 2 / 64, a norm sqrt(rho) / 2
STEEP = 8.0


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
    """A run with steps of size 1, and all its points."""
    objective = Objective(
        CanaryProblem(dimension, len(records), slope), (records,), neighboring=neighboring
    )
    return adaptive_gd(
        objective, None, budget, lipschitz=1.0, smoothness=0.5, keep_iterates=True, noise_seed=seed
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
