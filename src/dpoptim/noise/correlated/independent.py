"""Fresh noise in every step: C is the identity, and errors of prefix sums grow like sqrt(t)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from dpoptim.noise.correlated.strategy import NoiseState, Strategy
from dpoptim.noise.correlated.workload import Floats
from dpoptim.noise.stream import KeyStream


@dataclass(frozen=True)
class Independent(Strategy):
    """Independent noise: best for single increments, worst for prefix sums. Remembers nothing."""

    def _sensitivity(self, steps: int, k: int, b: int, *, regular: bool) -> float:
        """sqrt(k), exactly: the steps are separate queries."""
        return math.sqrt(k)

    def prefix_std(self, steps: int) -> Floats:
        """sqrt(t + 1) at step t."""
        return np.sqrt(np.arange(1, steps + 1, dtype=np.float64))

    def increment_std(self, steps: int) -> Floats:
        return np.ones(steps)

    def start(self, steps: int, sizes: Sequence[int], stream: KeyStream) -> NoiseState:
        return IndependentState(steps, sizes, stream)


class IndependentState(NoiseState):
    def _increment(self, remembered: list[Tensor], like: Tensor) -> Tensor:
        return self._draw(like)
