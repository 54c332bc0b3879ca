"""Poisson sampling: every record by its own coin in every step, which amplifies most.

At one rate, at rates that follow a plan, or with a largest batch: what exceeds it is left out by
coins. Hardware wants batches of one size, and a batch that is cut off silently is no Poisson batch
any more: whoever is drawn pushes another out. The event says so (`dp_accounting`'s truncated
subsampled Gaussian).

**Theorem** (of a largest batch; after Ganesh et al. 2025, arXiv 2508.15089; derived again). Let E
be the event that at least ``most`` records *other than* the one in question were drawn. It depends
on the others' coins alone, so it has the same chance in both worlds, and an attacker may be told of
it. Without E nothing is left out, with the record or without: a Poisson-sampled Gaussian of rate q.
Under E the record is in the batch with probability ``P(Bin(n, q) > most) most / (n P(E))``, in the
place of another record, so the sums differ by at most two clip norms: a sampled Gaussian of twice
the sensitivity. The step is dominated by the mixture of both with the weights 1 - P(E) and P(E).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NoReturn, Self

import dp_accounting
import numpy as np

from dpoptim.noise.stream import KeyStream
from dpoptim.sampling.sampler import (
    Floats,
    Indices,
    Position,
    Sampler,
    composed_gaussians,
    rarely_exceeded,
)


@dataclass(frozen=True)
class SamplingByCoins(Sampler):
    """Samplers by independent coins, so that processes toss for their own records.

    Args:
        sample_rate: the share of the data in an expected batch.
    """

    relations: ClassVar[tuple[str, ...]] = ("add-or-remove-one", "zero-out", "replace-one")
    by_coins = True

    sample_rate: float

    def shard(self, records: int) -> Self:
        return self

    def goes_by_places(self, *, sharded: bool) -> bool:
        return False

    def steps(self, epochs: float) -> int:
        return max(1, math.ceil(epochs / self.sample_rate - 1e-9))

    def passes(self, steps: int) -> float:
        return steps * self.sample_rate


@dataclass(frozen=True)
class PoissonSampling(SamplingByCoins):
    """Every record takes part in every step independently with probability ``sample_rate``.

    Args:
        sample_rate: q in (0, 1]; 1 takes every record in every step.
    """

    def __post_init__(self) -> None:
        if not 0 < self.sample_rate <= 1:
            raise ValueError(
                f"sample_rate must be in (0, 1], got {self.sample_rate!r}; it is batch_size / n "
                "with batch_size <= n."
            )

    def event(self, noise_multipliers: Floats) -> dp_accounting.DpEvent:
        """Poisson-sampled Gaussians, composed; equal ones are counted."""
        return composed_gaussians(noise_multipliers, self.sample_rate)

    def draw(self, coins: KeyStream, records: int) -> Indices:
        """Indices of the records of one step, ascending. One coin of 53 bits for each record.

        **Guarantee.** Each of the ``records`` indices is in the result independently of all others
        and of all other steps; the probability is ``sample_rate`` to 2^-53. The result is private.
        """
        return coins.coins(records, self.sample_rate)

    def batches(
        self, coins: KeyStream, records: int, position: Position | None = None
    ) -> Iterator[Indices]:
        position = position or Position()
        while True:
            position.drawn += 1
            yield self.draw(coins, records)

    def capacity(self, n: int) -> int:
        if self.sample_rate == 1:
            return n
        expected = n * self.sample_rate
        return rarely_exceeded(expected, expected * (1 - self.sample_rate), n)

    def promise(self) -> str:
        if self.sample_rate == 1:
            return "every step takes every record"
        return f"each record joins each step by its own 53-bit coin, q={self.sample_rate:.6g}"


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
        return composed_gaussians(noise_multipliers, self.rates(len(noise_multipliers)))

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
