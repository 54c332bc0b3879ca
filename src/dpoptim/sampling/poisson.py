"""Every record by its own coin in every step: the sampling that amplifies most."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import dp_accounting

from dpoptim.noise.stream import KeyStream
from dpoptim.sampling.events import composed
from dpoptim.sampling.sampler import Floats, Indices, Position, Sampler, rarely_exceeded


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
        return composed(noise_multipliers, self.sample_rate)

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
