"""b-min-sep sampling (Choquette-Choo et al. 2025): a coin in each step, but none soon after heads.

A record that took part stays out for the next b - 1 steps and then has a coin in each step again.
So banded strategies see it in separate queries, as in cyclic Poisson batches, but where it may take
part nobody is told: it is in no part of the data.

**Theorem.** Let the strategy's matrix C have entries >= 0 and columns c_t, and a record's steps be
drawn from any law that looks at nothing: B with chance w_B. A run with noise of standard deviation
s is dominated by the pair of ``N(sum_(t in B) c_t, s^2 I)``, B drawn, against ``N(0, s^2 I)``, also
where gradients depend on what was released before, for add-or-remove-one and zero-out; and by the
same pair with other columns, whose inner products are at least as large.

*Proof.* That of `sampling.balls_in_bins`, whose weights w_j may be any: the sets A_j are the
patterns B. Inner products of the means are sums of those of columns, so they are at least as large
if these are. QED.

The law here: a record's waiting time is a Markov chain of its own coins, begun in its stationary
law, so every step's expected batch is the same: rate p of a coin and ``q = p / (1 + (b - 1) p)`` of
taking part. With bands at most b, two columns of one pattern are orthogonal. What the pair costs is
bounded by `accounting.min_separation`. (Under replace-one neither world is noise alone, which the
theorem does not cover.)

Coins are exact: p is a multiple of 2^-53. The first waits' chances are, to a relative 1e-12.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import dp_accounting
import numpy as np

from dpoptim.accounting.min_separation import MOST_WORK, MinSeparationDpEvent
from dpoptim.accounting.replicas import states_of
from dpoptim.noise.stream import KeyStream
from dpoptim.sampling.poisson import SamplingByCoins
from dpoptim.sampling.sampler import Floats, Indices, Position, rarely_exceeded

MOST_STEPS = 20_000  # each sample of the accounting takes so many numbers: about a minute
GRID = 1e-3  # of rows, in logarithms


@dataclass(frozen=True)
class MinSeparationSampling(SamplingByCoins):
    """Each record takes part by coins of its own, at least ``gap`` steps apart.

    Args:
        sample_rate: q, the share of the data in an expected batch, > 0.
        gap: b >= 1; ``sample_rate * gap`` must be at most 1.
    """

    relations = ("add-or-remove-one", "zero-out")

    gap: int

    def __post_init__(self) -> None:
        if not (self.sample_rate > 0 and self.sample_rate * self.gap < 1 + 1e-9 and self.gap >= 1):
            raise ValueError(
                f"gap={self.gap!r} leaves too few records for a batch: batch_size / n * gap = "
                f"{self.sample_rate * self.gap:.4g} must be above 0 and at most 1. Fix: fewer "
                "bands, or a smaller batch_size."
            )

    @property
    def rate(self) -> float:
        """p: chance to take part of who need not wait; rounded down, to what coins can show."""
        others = max(self.sample_rate, 1 - (self.gap - 1) * self.sample_rate)
        return math.floor(self.sample_rate / others * 2**53) / 2**53

    @property
    def separation(self) -> int:
        return self.gap

    def event(self, noise_multipliers: Floats) -> dp_accounting.DpEvent:
        """The mixture of all patterns, of independent noise."""
        least = float(noise_multipliers.min())
        return self.event_of_strategy(np.ones(1), (least / noise_multipliers) ** 2, least)

    def event_of_strategy(
        self, column: Floats, rows: Floats, noise_multiplier: float
    ) -> MinSeparationDpEvent:
        """The event of a strategy, by the theorem.

        Args:
            column, rows: C has ``sqrt(rows_t) column_(t - r)`` in row t and column r; over the
                sensitivity; shapes (bands,) and (steps,).
            noise_multiplier: the noise's standard deviation over the sensitivity.

        Raises:
            ValueError: more bands than ``gap``, or a negative entry: the theorem does not hold. Or
                the run is too long to account for.
        """
        steps, copies = len(rows), states_of(2, self.gap)
        if len(column) > self.gap or column.min() < 0:
            raise ValueError(
                f"b-min-sep batches need a strategy C >= 0 of at most gap={self.gap} bands."
            )
        if steps > MOST_STEPS or copies * steps > MOST_WORK:
            raise ValueError(
                f"{steps} steps with {self.gap} bands are too many for the accounting of b-min-sep "
                f"batches. Fix: "
                "sampling='cyclic-poisson', or larger batches."
            )
        # larger entries cost more: rounded up, many rows are alike
        grid = np.ceil(np.log(rows) / GRID)
        starts = np.flatnonzero(np.diff(grid, prepend=np.inf))
        return MinSeparationDpEvent(
            noise_multiplier,
            tuple(column.tolist()),
            tuple((np.exp(grid[starts] * GRID) * (1 + 1e-12)).tolist()),
            tuple(np.diff(starts, append=steps).tolist()),
            self.rate,
            self.gap,
        )

    def batches(
        self, coins: KeyStream, records: int, position: Position | None = None
    ) -> Iterator[Indices]:
        """The records of one step after the other.

        **Guarantee.** Each record's steps are a chain of its own coins, at least ``gap`` apart, and
        depend on no other record. ``position.order`` is the first step that each may be in next.
        """
        position = position or Position()
        if position.order is None:
            position.order = self._first_steps(coins, records)
        while True:
            free = np.flatnonzero(position.order <= position.drawn)
            mine = free[coins.coins(len(free), self.rate)]
            position.order[mine] = position.drawn + self.gap
            position.drawn += 1
            yield mine

    def _first_steps(self, coins: KeyStream, records: int) -> Indices:
        """The stationary law: each wait of 1, ..., gap - 1 steps p times as likely as none."""
        first = np.zeros(records, dtype=np.int64)
        waits = self.gap - 1
        chance = waits * self.rate / (1 + waits * self.rate)
        waiting = coins.coins(records, chance)
        if len(waiting):
            words = np.empty(len(waiting), dtype=np.uint64)
            coins.words(words)
            first[waiting] = (words % np.uint64(waits)).astype(np.int64) + 1
        return first

    def capacity(self, n: int) -> int:
        expected = n * self.sample_rate
        return rarely_exceeded(expected, expected, n)

    def promise(self) -> str:
        return (
            f"each record joins each step by its own coin, p={self.rate:.6g}, but none of the "
            f"{self.gap - 1} steps after one that it was in: q={self.sample_rate:.6g} of all"
        )
