"""Noise that later steps take back, so that prefix sums carry little (Denisov et al. 2022).

On cyclic Poisson batches fewer bands amplify more, and `best_bands` chooses how many.
"""

from dataclasses import dataclass, replace

import dp_accounting
import numpy as np

from dpoptim.gate import CorrelatedSum
from dpoptim.mechanisms.mechanism import RunShape, StepMechanism
from dpoptim.noise.correlated import BandedToeplitz, BestStrategy, Independent, Strategy, Workload
from dpoptim.sampling import BallsInBins, CyclicPoissonSampling, MinSeparationSampling
from dpoptim.sampling.balls_in_bins import mixture_event


@dataclass(frozen=True)
class CorrelatedNoise(StepMechanism):
    """Gaussian noise that is correlated over the steps by a strategy matrix.

    **Guarantee.** If a record adds at most the norm bound to each sum that it takes part in: the
    whole run is **one** Gaussian of the noise multiplier, the strategy's sensitivity for the
    sampler's pattern of participations being in the noise (Denisov et al. 2022, Theorem 2.1). Or,
    where the sampler tosses coins and the strategy has no more bands than there are steps between
    participations, the sampler's event for independent noise of that multiplier (the theorem of
    `sampling.cyclic_poisson`).

    Args:
        strategy: how the noise of different steps hangs together, or `BestStrategy` to choose by
            the run's numbers.
    """

    strategy: Strategy | BestStrategy

    def audit_family(self, run: RunShape) -> str:
        if isinstance(run.sampler, BallsInBins):
            return "balls in bins"
        if isinstance(run.sampler, MinSeparationSampling) and self.amplified(run):
            return "sampled apart"
        return "sampled by turns" if self.amplified(run) else "fixed order"

    def made_for(self, run: RunShape) -> Strategy:
        """Return the strategy of this run."""
        if not isinstance(self.strategy, BestStrategy):
            return self.strategy
        sampler = run.sampler
        return self.strategy.made_for(
            run.steps, sampler.participations(run.steps), sampler.separation
        )

    def amplified(self, run: RunShape) -> bool:
        """Whether a record's participations are separate queries, each with a coin of its own."""
        return run.sampler.by_coins and bands_of(self.made_for(run)) <= run.sampler.separation

    def event(self, run: RunShape, noise_multiplier: float) -> dp_accounting.DpEvent:
        strategy, sampler = self.made_for(run), run.sampler
        if self.amplified(run):
            if isinstance(sampler, MinSeparationSampling) and isinstance(strategy, BandedToeplitz):
                column, rows = strategy.coefficients(run.steps)
                sensitivity = self.query(run, noise_multiplier, 1.0).sensitivity
                return sampler.event_of_strategy(column, rows / sensitivity**2, noise_multiplier)
            return sampler.event(np.full(run.steps, noise_multiplier))
        if isinstance(sampler, BallsInBins) and isinstance(strategy, BandedToeplitz):
            query = self.query(run, noise_multiplier, 1.0)
            means = strategy.outputs_of_bins(run.steps, sampler.parts)
            return mixture_event(means, noise_multiplier, query.sensitivity)
        return dp_accounting.GaussianDpEvent(noise_multiplier)

    def query(self, run: RunShape, noise_multiplier: float, norm_bound: float) -> CorrelatedSum:
        strategy, sampler = self.made_for(run), run.sampler
        # each participation is a query of its own, and costs what its column is long
        if self.amplified(run):
            return CorrelatedSum(norm_bound, noise_multiplier, strategy, run.steps)
        return CorrelatedSum(
            norm_bound,
            noise_multiplier,
            strategy,
            run.steps,
            participations=sampler.participations(run.steps),
            separation=sampler.separation,
            regular=sampler.regular,
        )

    def prefix_noise(self, run: RunShape) -> float:
        strategy = self.made_for(run)
        drawn = self.query(run, 1.0, 1.0).standard_deviation  # its sensitivity for this pattern
        sums = strategy.prefix_std(run.steps) * (drawn / strategy.sensitivity(run.steps))
        once = np.eye(1, run.steps)[0]  # independent noise, added up by the same optimizer
        independent = strategy.workload.errors(once, np.ones(run.steps))
        return float(np.sqrt(np.mean(sums**2) / np.mean(independent**2)))


def bands_of(strategy: Strategy) -> float:
    """Steps in which one record's part is seen; infinite where nothing is known."""
    if isinstance(strategy, Independent):
        return 1
    return strategy.bands if isinstance(strategy, BandedToeplitz) else np.inf


@dataclass(frozen=True)
class BandedError:
    """Result of a number of bands within a budget.

    Attributes:
        bands: of strategy and sampler.
        noise_multiplier: that the budget asks for.
        mean_error: root of the mean squared error of the iterates, over the norm bound.
    """

    bands: int
    noise_multiplier: float
    mean_error: float


def banded_error(run: RunShape, workload: Workload, *, epsilon: float, delta: float) -> BandedError:
    """Calibrate banded noise on a `CyclicPoissonSampling` of as many parts."""
    bands = run.sampler.separation
    strategy = BandedToeplitz(bands, workload=workload)
    noise = CorrelatedNoise(strategy).calibrate(run, epsilon=epsilon, delta=delta)
    return BandedError(
        bands, noise, noise * float(np.sqrt(np.mean(strategy.prefix_std(run.steps) ** 2)))
    )


def best_bands(
    run: RunShape, most: int, workload: Workload, *, epsilon: float, delta: float
) -> int:
    """Return the number of bands of least mean error: powers of 2, until two in a row are worse.

    Args:
        run: with any sampler. most: bands to consider. workload: see `BandedToeplitz`. epsilon,
        delta: the budget.
    """
    best: BandedError | None = None
    worse, bands = 0, 1
    while bands <= min(most, run.steps) and worse < 2:
        shape = replace(run, sampler=CyclicPoissonSampling(run.batch_size / run.n, bands))
        found = banded_error(shape, workload, epsilon=epsilon, delta=delta)
        if best is None or found.mean_error < best.mean_error:
            best, worse = found, 0
        else:
            worse += 1
        bands *= 2
    assert best is not None
    return best.bands
