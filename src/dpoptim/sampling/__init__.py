"""Records of a step, and what the accountant may make of it.

A sampler owns both the draw and the event, so that what is sampled and what is accounted cannot
drift apart.
"""

from dpoptim.sampling.balls_in_bins import BallsInBins
from dpoptim.sampling.cyclic_poisson import CyclicPoissonSampling
from dpoptim.sampling.fixed_batches import AllRecords, FixedBatches
from dpoptim.sampling.min_separation import MinSeparationSampling
from dpoptim.sampling.poisson import (
    PlannedPoissonSampling,
    PoissonSampling,
    TruncatedPoissonSampling,
)
from dpoptim.sampling.sampler import Draws, Floats, Indices, Position, Sampler

__all__ = [
    "AllRecords",
    "BallsInBins",
    "CyclicPoissonSampling",
    "Draws",
    "FixedBatches",
    "Floats",
    "Indices",
    "MinSeparationSampling",
    "PlannedPoissonSampling",
    "PoissonSampling",
    "Position",
    "Sampler",
    "TruncatedPoissonSampling",
]
