"""Poisson sampling at rates that follow a plan: batches that grow, or shrink, during the run."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import dp_accounting
import numpy as np

from dpoptim.noise.stream import KeyStream
from dpoptim.sampling.events import composed
from dpoptim.sampling.poisson import PoissonSampling, SamplingByCoins
from dpoptim.sampling.sampler import Floats, Indices, Position


@dataclass(frozen=True)
class PlannedPoissonSampling(SamplingByCoins):
    """Every record takes part in every step independently, with a probability that is planned.

    Args:
        sample_rate: q in (0, 1] until the first change.
        changes: pairs (s, f): from step s on, counted from 0, the rate is f q, in (0, 1]; s >= 1
            and ascending. Public.
    """

    changes: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        for factor in (1.0, *(f for _, f in self.changes)):
            _ = PoissonSampling(self.rate(factor))  # validates

    def rate(self, factor: float) -> float:
        """The rate of batches so many times the first; a product that rounds above 1 is 1."""
        rate = self.sample_rate * factor
        return 1.0 if 1 < rate < 1 + 1e-9 else rate

    def relative_batch(self, step: int) -> float:
        return next((f for start, f in reversed(self.changes) if step >= start), 1.0)

    @property
    def largest_relative_batch(self) -> float:
        return max(1.0, *(f for _, f in self.changes))

    def rates(self, steps: int) -> Floats:
        """Return the rate of each step: shape (steps,)."""
        starts = np.array([0, *(start for start, _ in self.changes)])
        rates = np.array([self.rate(f) for f in (1.0, *(f for _, f in self.changes))])
        return rates[np.searchsorted(starts, np.arange(steps), "right") - 1]

    def event(self, noise_multipliers: Floats) -> dp_accounting.DpEvent:
        """Poisson-sampled Gaussians, each at its step's rate, composed; equal ones are counted."""
        return composed(noise_multipliers, self.rates(len(noise_multipliers)))

    def batches(
        self, coins: KeyStream, records: int, position: Position | None = None
    ) -> Iterator[Indices]:
        """The records of one step after the other.

        **Guarantee.** As for `PoissonSampling.draw`, at the step's rate. Which step it is depends
        on the number of batches drawn alone.
        """
        position = position or Position()
        while True:
            rate = self.rate(self.relative_batch(position.drawn))
            position.drawn += 1
            yield PoissonSampling(rate).draw(coins, records)

    def steps(self, epochs: float) -> int:
        done, step, rate = 0.0, 0, self.sample_rate
        for start, factor in self.changes:
            if done + (start - step) * rate >= epochs - 1e-9:
                break
            done, step, rate = done + (start - step) * rate, start, self.rate(factor)
        return max(1, step + math.ceil((epochs - done) / rate - 1e-9))

    def passes(self, steps: int) -> float:
        return float(self.rates(steps).sum())

    def capacity(self, n: int) -> int:
        return PoissonSampling(self.rate(self.largest_relative_batch)).capacity(n)

    def promise(self) -> str:
        later = ", ".join(f"{f * self.sample_rate:.6g} from step {s}" for s, f in self.changes)
        return (
            f"each record joins each step by its own 53-bit coin, q={self.sample_rate:.6g}, {later}"
        )
