"""Poisson sampling whose batches have a largest size: what exceeds it is left out by coins.

Hardware wants batches of one size, and a batch that is cut off silently is no Poisson batch any
more: whoever is drawn pushes another out. The event says so (`dp_accounting`'s truncated
subsampled Gaussian).

**Theorem** (after Ganesh et al. 2025, arXiv 2508.15089; derived again). Let E be the event that at
least ``most`` records *other than* the one in question were drawn. It depends on the others' coins
alone, so it has the same chance in both worlds, and an attacker may be told of it. Without E
nothing is left out, with the record or without: a Poisson-sampled Gaussian of rate q. Under E the
record is in the batch with probability ``P(Bin(n, q) > most) most / (n P(E))``, in the place of
another record, so the sums differ by at most two clip norms: a sampled Gaussian of twice the
sensitivity. The step is dominated by the mixture of both with the weights 1 - P(E) and P(E).
"""

import math
from dataclasses import dataclass
from typing import NoReturn

import dp_accounting
import numpy as np

from dpoptim.noise.stream import KeyStream
from dpoptim.sampling.poisson import PoissonSampling
from dpoptim.sampling.sampler import Floats, Indices


@dataclass(frozen=True)
class TruncatedPoissonSampling(PoissonSampling):
    """As `PoissonSampling`, but at most ``most`` records in a step.

    Args:
        n: records; exact and public, since the event depends on their number.
        most: the largest batch; a larger one keeps a uniformly random part of it. >= 1.
    """

    relations = ("zero-out", "replace-one")

    n: int
    most: int

    def event(self, noise_multipliers: Floats) -> dp_accounting.DpEvent:
        """Truncated subsampled Gaussians, composed; equal ones are counted."""
        values, counts = np.unique(noise_multipliers, return_counts=True)
        events = [
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.TruncatedSubsampledGaussianDpEvent(
                    self.n, self.sample_rate, self.most, value
                ),
                count,
            )
            for value, count in zip(values.tolist(), counts.tolist(), strict=True)
        ]
        return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)

    def draw(self, coins: KeyStream, records: int) -> Indices:
        """Indices of the records of one step, ascending.

        **Guarantee.** Coins as for `PoissonSampling`; of a larger batch a part of ``most`` records
        is kept, each part with the same probability. Both look at nothing but how many records
        there are.
        """
        if records != self.n:
            raise ValueError(
                f"the data set has {records} records, but the batches were planned for n={self.n}."
            )
        drawn = super().draw(coins, records)
        if len(drawn) <= self.most:
            return drawn
        words = np.empty(len(drawn), dtype=np.uint64)
        coins.words(words)
        return np.sort(drawn[np.argsort(words, kind="stable")[: self.most]])

    def shard(self, records: int) -> NoReturn:
        """None: the largest batch is one of all processes together.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "largest_batch is for one process: several would have to agree on who is left out. "
            "Fix: leave largest_batch out."
        )

    def capacity(self, n: int) -> int:
        return min(self.most, super().capacity(n))

    def promise(self) -> str:
        return f"{super().promise()}; of a batch above {self.most} a random part is left out"


def largest_batch_of(batch_size: int, factor: float) -> int:
    """The largest batch, where it is given as a multiple of the expected one."""
    return math.ceil(batch_size * factor - 1e-9)
