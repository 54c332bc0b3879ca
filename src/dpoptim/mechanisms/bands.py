"""How many bands correlated noise should have on cyclic Poisson batches: fewer amplify more."""

from dataclasses import dataclass, replace

import numpy as np

from dpoptim.mechanisms.correlated import CorrelatedNoise
from dpoptim.mechanisms.mechanism import RunShape
from dpoptim.noise.correlated import BandedToeplitz, Workload
from dpoptim.sampling import CyclicPoissonSampling


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
