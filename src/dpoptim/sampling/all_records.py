"""Nothing is sampled: for solvers that take records as they need them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import dp_accounting
import numpy as np

from dpoptim.noise.stream import KeyStream
from dpoptim.sampling.events import composed
from dpoptim.sampling.sampler import Floats, Indices, Position, Sampler


@dataclass(frozen=True)
class AllRecords(Sampler):
    """A solver that takes its records as it needs them, each as often as its budget pays for."""

    relations = ("zero-out", "replace-one")

    def event(self, noise_multipliers: Floats) -> dp_accounting.DpEvent:
        """Gaussians, composed."""
        return composed(noise_multipliers, 1.0)

    def batches(
        self, coins: KeyStream, records: int, position: Position | None = None
    ) -> Iterator[Indices]:
        position = position or Position()
        while True:
            position.drawn += 1
            yield np.arange(records)

    def shard(self, records: int) -> "AllRecords":
        return self

    def steps(self, epochs: float) -> int:
        return max(1, math.ceil(epochs))

    def passes(self, steps: int) -> float:
        return float(steps)

    def capacity(self, n: int) -> int:
        return n

    def promise(self) -> str:
        return "nothing is sampled: the number of records is public"

    def releases(self, steps: int) -> str:
        return (
            "noisy sums, norms and choices are released for as long as the one budget pays for them"
        )
