"""Attack on banded noise over balls in bins, without knowing the canaries' bins.

The likelihood ratio of a canary is a mean over the bins that it may be in.
"""

import math
from dataclasses import dataclass

import dp_accounting
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import toeplitz
from scipy.special import logsumexp, ndtr

from dpoptim.accounting.balls_in_bins import BallsInBinsDpEvent
from dpoptim.audit.banded import banded_query, canaries_trained, strategy_output
from dpoptim.audit.sampled_gaussians import SampledGaussians, Tradeoff
from dpoptim.audit.side_by_side import Floats
from dpoptim.gate import CorrelatedSum
from dpoptim.plan import Plan
from dpoptim.sampling import BallsInBins

SIMULATED = 1 << 18


@dataclass(frozen=True)
class SimulatedMixtures(SampledGaussians):
    """A family of mechanisms whose likelihood ratios are simulated."""

    def simulated(self, noise_multiplier: float) -> tuple[Floats, Floats]:
        """Log-likelihood ratios of simulated runs without and with the record."""
        raise NotImplementedError

    def tradeoff(self, noise_multiplier: float) -> Tradeoff:
        """By simulated likelihood ratios in both worlds, five deviations to the safe side."""
        rates = ndtr(np.linspace(-3.7, 3.7, 200))
        absent, present = self.simulated(noise_multiplier)
        runs = len(absent)
        # so that the true rate at the threshold is at least the stated one
        shown = np.minimum(1.0, rates + 5 * np.sqrt(rates * (1 - rates) / runs))
        thresholds = np.quantile(absent, 1 - shown)
        missed = np.searchsorted(np.sort(present), thresholds, side="right") / runs
        spread = np.sqrt(np.maximum(missed * (1 - missed), 1 / runs) / runs)
        return Tradeoff(rates, np.maximum(0.0, missed - 5 * spread))

    def least_misses(self, noise_multiplier: float, false_positive: float) -> float:
        curve = self.tradeoff(noise_multiplier)
        # to the right of a rate the curve is lower, so the next known rate is on the safe side
        place = int(np.searchsorted(curve.false_positive_rates, false_positive))
        known = curve.false_negative_rates
        return float(known[place]) if place < len(known) else 0.0


@dataclass(frozen=True)
class MixturesOfBins(SimulatedMixtures):
    """Banded noise on bins, with any one noise multiplier.

    Args:
        gram: of the bins' outputs over the squared sensitivity; shape (bins,).
    """

    gram: tuple[float, ...] = ()

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """The member with this noise."""
        return BallsInBinsDpEvent(noise_multiplier, self.gram)

    def simulated(self, noise_multiplier: float) -> tuple[Floats, Floats]:
        return simulated(self.gram, noise_multiplier)


def simulated(gram: tuple[float, ...], noise_multiplier: float) -> tuple[Floats, Floats]:
    """Log-likelihood ratios of ``SIMULATED`` runs without and with the record."""
    covariance = toeplitz(np.array(gram)) / noise_multiplier**2
    values, axes = np.linalg.eigh(covariance)
    root = axes * np.sqrt(np.maximum(values, 0.0))
    rng = np.random.default_rng(0)
    found = []
    for there in (False, True):
        a = rng.standard_normal((SIMULATED, len(gram))) @ root.T - np.diag(covariance) / 2
        if there:
            a += covariance[rng.integers(len(gram), size=SIMULATED)]
        found.append(np.asarray(logsumexp(a, axis=1) - math.log(len(gram))))
    return found[0], found[1]


def outputs_of(plan: Plan) -> tuple[CorrelatedSum, Floats]:
    """Return the plan's query, and the strategy's outputs of a record in each bin: (steps, bins).

    Raises:
        ValueError: the plan samples otherwise, or its noise is not banded.
    """
    query, strategy = banded_query(plan)
    if not isinstance(plan.sampler, BallsInBins):
        raise ValueError("this attack is for batches of balls in bins.")
    step = np.arange(plan.steps)
    alone = np.equal.outer(step % plan.sampler.parts, np.arange(plan.sampler.parts))
    return query, strategy_output(strategy, alone.astype(np.float64))


def family_of_bins(plan: Plan) -> MixturesOfBins:
    """Return the family that the plan is in, its noise apart."""
    _, outputs = outputs_of(plan)
    gram = outputs.T @ outputs
    bins = len(gram)
    lags = [float(np.diagonal(gram, lag).max()) / gram.max() for lag in range(bins)]
    # (1 / bins) sqrt(bins^2) = 1: where the search for the noise begins
    return MixturesOfBins(1 / bins, bins**2, plan.neighboring, gram=tuple(lags))


def scores_of_bins(
    plan: Plan,
    present: NDArray[np.bool_],
    *,
    noise_seed: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Floats:
    """Run the plan with the canaries in ``present``, (m,), and score each one's presence: (m,)."""
    query, outputs = outputs_of(plan)
    with canaries_trained(plan, present, noise_seed, dtype) as (_, _, released):
        seen = outputs.T @ strategy_output(banded_query(plan)[1], released)
    variance = (query.standard_deviation / query.norm_bound) ** 2
    ratios = (seen - np.square(outputs).sum(0)[:, None] / 2) / variance
    return np.asarray(logsumexp(ratios, axis=0) - math.log(len(ratios)))
