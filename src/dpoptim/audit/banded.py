"""Attacks on banded noise, whose strategy's output the attacker makes from what was released.

*By turns* (cyclic Poisson batches) the attacker knows each canary's part: the guarantee holds for
every part, so he may be told it. A canary's turns are separate stretches of the output; in each,
the likelihood ratio is that of a sampled Gaussian in the direction of the canary's column.

*In bins* (balls in bins) he does not know it: the likelihood ratio is a mean over the bins that the
canary may be in.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import dp_accounting
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import toeplitz
from scipy.special import logsumexp, ndtr

from dpoptim.accounting.balls_in_bins import BallsInBinsDpEvent
from dpoptim.audit.bounds import Floats
from dpoptim.audit.sampled_gaussians import SampledGaussians, Tradeoff
from dpoptim.audit.side_by_side import releases_kept
from dpoptim.audit.small_runs import attach_canaries
from dpoptim.audit.two_worlds import LENGTH, Canaries, canary_data, log_likelihood_ratio
from dpoptim.gate import CorrelatedSum
from dpoptim.noise.correlated import BandedToeplitz
from dpoptim.plan import Plan
from dpoptim.sampling import BallsInBins, CyclicPoissonSampling
from dpoptim.training.private_training import PrivateTraining

Kind = TypeVar("Kind")
SIMULATED = 1 << 18


def banded_query(plan: Plan) -> tuple[CorrelatedSum, BandedToeplitz]:
    """Return the plan's query and its strategy.

    Raises:
        ValueError: the plan's noise is not banded.
    """
    query = plan.query
    if not isinstance(query, CorrelatedSum) or not isinstance(query.strategy, BandedToeplitz):
        raise ValueError("this attack is for banded noise.")
    return query, query.strategy


def sampler_of(plan: Plan, kind: type[Kind], batches: str) -> Kind:
    """Return the plan's sampler, which is of this kind.

    Raises:
        ValueError: it is not, or the plan's noise is not banded.
    """
    banded_query(plan)
    if not isinstance(plan.sampler, kind):
        raise ValueError(f"this attack is for {batches}.")
    return plan.sampler


def strategy_output(strategy: BandedToeplitz, inputs: Floats) -> Floats:
    """C times inputs of shape (steps, k): written down here, not asked of the strategy."""
    steps = len(inputs)
    column, rows = strategy.coefficients(steps)
    output = np.zeros_like(inputs)
    for lag, coefficient in enumerate(column):
        output[lag:] += coefficient * inputs[: steps - lag]
    return np.asarray(output * np.sqrt(rows)[:, None])


@contextmanager
def canaries_trained(
    plan: Plan, present: NDArray[np.bool_], noise_seed: int | None, dtype: torch.dtype
) -> Iterator[tuple[PrivateTraining, NDArray[np.int64], Floats]]:
    """Run the plan with the canaries in ``present``, (m,).

    Yields the training, the canaries that were its records, and what was released of each
    canary's coordinate, in norm bounds: shape (steps, m).
    """
    data = canary_data(plan.neighboring, torch.from_numpy(present))
    model = Canaries(len(present), dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    length = LENGTH * plan.method.rule.norm
    with (
        releases_kept(len(present)) as kept,
        attach_canaries(plan, model, optimizer, data, noise_seed) as private,
    ):
        for index, sign in private.batches():
            private.backward(model(index) * sign.to(dtype) * length)
            optimizer.step()
        released = torch.stack(kept).numpy() / plan.method.rule.norm
        yield private, data.tensors[0].numpy(), released


def family_of_turns(plan: Plan) -> SampledGaussians:
    """Return the plan's family, its noise apart: written down here, not asked of it."""
    sampler = sampler_of(plan, CyclicPoissonSampling, "cyclic Poisson batches")
    turns = -(-plan.steps // sampler.parts)
    return SampledGaussians(plan.batch_size / plan.n * sampler.parts, turns, plan.neighboring)


def scores_of_turns(
    plan: Plan,
    present: NDArray[np.bool_],
    *,
    noise_seed: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Floats:
    """Run the plan with the canaries in ``present``, (m,), and score each one's presence: (m,)."""
    sampler = sampler_of(plan, CyclicPoissonSampling, "cyclic Poisson batches")
    # of who is not there
    parts = np.random.default_rng(0).integers(sampler.parts, size=len(present))
    with canaries_trained(plan, present, noise_seed, dtype) as (private, records, released):
        parts[records] = known_parts(private)
    return turn_scores(plan, released, parts)


def known_parts(private: PrivateTraining) -> NDArray[np.int64]:
    """Return the parts that the run dealt its records into."""
    order = private._steps.secret_state()["queue"]["order"]
    return np.asarray(order.numpy())


def turn_scores(plan: Plan, released: Floats, parts: NDArray[np.int64]) -> Floats:
    """Score canaries by what was released of their coordinates.

    Args:
        released: (steps, m), in norm bounds. parts: of the canaries, (m,).
    """
    (query, strategy), sampler = (
        banded_query(plan),
        sampler_of(plan, CyclicPoissonSampling, "cyclic Poisson batches"),
    )
    column, rows = strategy.coefficients(plan.steps)
    weights = np.sqrt(rows)
    output = strategy_output(strategy, released)
    noise = query.standard_deviation / query.norm_bound
    scores = np.zeros(len(parts))
    for step in range(plan.steps):
        direction = column[: plan.steps - step] * weights[step : step + len(column)]
        length = float(np.linalg.norm(direction))
        mine = parts == step % sampler.parts
        seen = direction @ output[step : step + len(direction), mine] / length**2
        scores[mine] += log_likelihood_ratio(
            seen,
            noise_multiplier=noise / length,
            sample_rate=sampler.rate,
            neighboring=plan.neighboring,
        )
    return scores


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
        return simulated_bins(self.gram, noise_multiplier)


def simulated_bins(gram: tuple[float, ...], noise_multiplier: float) -> tuple[Floats, Floats]:
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


def outputs_of_bins(plan: Plan) -> tuple[CorrelatedSum, Floats]:
    """The plan's query, and the strategy's outputs of a record in each bin: (steps, bins)."""
    sampler = sampler_of(plan, BallsInBins, "batches of balls in bins")
    query, strategy = banded_query(plan)
    step = np.arange(plan.steps)
    alone = np.equal.outer(step % sampler.parts, np.arange(sampler.parts))
    return query, strategy_output(strategy, alone.astype(np.float64))


def family_of_bins(plan: Plan) -> MixturesOfBins:
    """Return the family that the plan is in, its noise apart."""
    _, outputs = outputs_of_bins(plan)
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
    query, outputs = outputs_of_bins(plan)
    with canaries_trained(plan, present, noise_seed, dtype) as (_, _, released):
        seen = outputs.T @ strategy_output(banded_query(plan)[1], released)
    variance = (query.standard_deviation / query.norm_bound) ** 2
    ratios = (seen - np.square(outputs).sum(0)[:, None] / 2) / variance
    return np.asarray(logsumexp(ratios, axis=0) - math.log(len(ratios)))
