"""Correlated noise: all prefix sums of a stream of vectors, with little noise in each."""

from dpoptim.noise.correlated.banded import BandedToeplitz
from dpoptim.noise.correlated.buffered_toeplitz import BufferedToeplitz
from dpoptim.noise.correlated.choose_strategy import BestStrategy
from dpoptim.noise.correlated.independent import Independent
from dpoptim.noise.correlated.redrawn import RedrawnToeplitz
from dpoptim.noise.correlated.strategy import NoiseState, Strategy
from dpoptim.noise.correlated.toeplitz import ToeplitzSquareRoot
from dpoptim.noise.correlated.tree import BinaryTree
from dpoptim.noise.correlated.workload import Workload

__all__ = [
    "BandedToeplitz",
    "BestStrategy",
    "BinaryTree",
    "BufferedToeplitz",
    "Independent",
    "NoiseState",
    "RedrawnToeplitz",
    "Strategy",
    "ToeplitzSquareRoot",
    "Workload",
]
