"""Cyclic Poisson sampling: each record belongs to one of several parts, which take turns.

A record can take part only in every ``parts``-th step, so banded strategies see it in separate
queries, and its chance to be left out of each of them amplifies the noise (Choquette-Choo et al.
2023, "(Amplified) Banded Matrix Factorization").

**Theorem.** Let the strategy's columns have norm at most s, and no row in common where they are
``parts`` steps or more apart. With noise of standard deviation ``z s`` times the norm bound on the
strategy's output, a run of T steps is dominated by ``ceil(T / parts)`` compositions of
``PoissonSampled(q parts, Gaussian(z))``, also where gradients depend on what was released before.

*Proof.* Couple the worlds: all other records have the same parts and coins in both. The record's
part is a coin of its own, independent of the data; given it, the record can only take part in the
steps j, j + parts, ... Look at the strategy's output row by row. The rows of column t = j + a parts
begin at t and end before t + parts, so they are a stretch of rows that no other column of the
record reaches. Given all rows before t, everything that the other records put into the stretch is a
function of what was released (rows are released in order), so it can be subtracted; and the
record's gradient at t is a fixed vector of at most the norm bound. What is left of the stretch is
that vector times the column, with the step's coin, plus noise: a sampled Gaussian of sensitivity at
most s, whose coin is independent of all before. So the run is the adaptive composition of its
stretches, each dominated by the same pair, and there are at most ceil(T / parts). The coin of the
part mixes runs of that kind in the same way in both worlds, by which divergences do not increase.
QED. (parts = 1 is Poisson sampling.)
"""

from collections.abc import Iterator
from dataclasses import dataclass

import dp_accounting
import numpy as np

from dpoptim.noise.stream import KeyStream
from dpoptim.sampling.poisson import SamplingByCoins
from dpoptim.sampling.sampler import Floats, Indices, Position, composed_gaussians, rarely_exceeded


@dataclass(frozen=True)
class CyclicPoissonSampling(SamplingByCoins):
    """Step t samples, with probability ``sample_rate * parts``, from part t modulo ``parts``.

    Args:
        sample_rate: q, the share of the data in an expected batch, > 0.
        parts: >= 1; ``sample_rate * parts`` must be at most 1.
    """

    parts: int

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(
                f"parts={self.parts!r} leaves too few records for a batch: batch_size / n * parts "
                f"= {self.rate:.4g} must be above 0 and at most 1. Fix: fewer bands, or a smaller "
                "batch_size."
            )

    @property
    def rate(self) -> float:
        """Chance of a record to be in a batch of its part; a product that rounds above 1 is 1."""
        rate = self.sample_rate * self.parts
        return 1.0 if 1 < rate < 1 + 1e-9 else rate

    @property
    def separation(self) -> int:
        return self.parts

    def event(self, noise_multipliers: Floats) -> dp_accounting.DpEvent:
        """Poisson-sampled Gaussians, one for each turn of all parts, at the turn's least noise."""
        turns = self.participations(len(noise_multipliers))
        padded = np.full(turns * self.parts, np.inf)
        padded[: len(noise_multipliers)] = noise_multipliers
        return composed_gaussians(padded.reshape(turns, self.parts).min(1), self.rate)

    def batches(
        self, coins: KeyStream, records: int, position: Position | None = None
    ) -> Iterator[Indices]:
        """The records of one step after the other.

        **Guarantee.** Each record's part is a coin of its own (64 bits, modulo ``parts``), tossed
        once; it joins each step of its part by another coin. Both depend on no other record.
        """
        position = position or Position()
        if position.order is None:
            words = np.empty(records, dtype=np.uint64)
            coins.words(words)
            position.order = (words % np.uint64(self.parts)).astype(np.int64)
        members = [np.flatnonzero(position.order == part) for part in range(self.parts)]
        while True:
            mine = members[position.drawn % self.parts]
            position.drawn += 1
            yield mine[coins.coins(len(mine), self.rate)] if len(mine) else mine

    def capacity(self, n: int) -> int:
        expected = n * self.sample_rate
        return rarely_exceeded(expected, expected, n)

    def promise(self) -> str:
        return (
            f"each record is in one of {self.parts} parts, by a coin of its own, and joins its "
            f"part's steps, one in {self.parts}, by another coin each, q={self.rate:.6g}"
        )
