"""How noisy a single step's release is where noise is correlated: the rows of C^-1."""

import math
from functools import lru_cache

import numpy as np

from dpoptim.noise.correlated.banded import BandedToeplitz
from dpoptim.noise.correlated.buffered import BufferedToeplitz, prefix_coefficients
from dpoptim.noise.correlated.fitting import convolved, inverse
from dpoptim.noise.correlated.independent import Independent
from dpoptim.noise.correlated.strategy import Floats, Strategy
from dpoptim.noise.correlated.toeplitz import ToeplitzSquareRoot, inverse_coefficients


def increment_std(strategy: Strategy, steps: int, step: int) -> float:
    """The standard deviation of a step's noise where z's is 1; ``nan`` for trees and others'."""
    if isinstance(strategy, Independent):
        return 1.0
    if isinstance(strategy, ToeplitzSquareRoot) and strategy.normalised:
        return math.nan
    if isinstance(strategy, BandedToeplitz | BufferedToeplitz | ToeplitzSquareRoot):
        return float(_increments(strategy, steps)[step])
    return math.nan


@lru_cache(maxsize=16)
def _increments(
    strategy: BandedToeplitz | BufferedToeplitz | ToeplitzSquareRoot, steps: int
) -> Floats:
    if isinstance(strategy, BandedToeplitz):
        column, rows = strategy.coefficients(steps)
        return np.sqrt(convolved(1 / rows, inverse(column, steps) ** 2))
    if isinstance(strategy, BufferedToeplitz):
        weights, decays, rows = strategy.parameters(steps)
        first = np.diff(prefix_coefficients(weights, decays, steps), prepend=0.0)
        return np.sqrt(convolved(1 / rows, first**2))
    return np.sqrt(np.cumsum(inverse_coefficients(steps) ** 2))
