"""Samplers without coins: disjoint batches of every pass over the data, or all records."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import dp_accounting
import numpy as np

from dpoptim.arguments import one_of
from dpoptim.noise.stream import KeyStream
from dpoptim.sampling.sampler import (
    Floats,
    Indices,
    Position,
    Sampler,
    composed_gaussians,
    one_gaussian,
)

Order = Literal["reshuffled", "shuffled", "given"]


@dataclass(frozen=True)
class FixedBatches(Sampler):
    """Each pass cuts the data into disjoint batches, in an order that no record's values decide.

    Nothing is amplified: a record takes part in exactly one step of every pass. Only for relations
    in which neighbours have equally many records, since a removed one would shift all that follow
    it.

    Args:
        n: the number of records, exact and public.
        batch_size: records in a batch; the last one of a pass may be smaller.
        order: ``"reshuffled"`` (a fresh permutation each pass), ``"shuffled"`` (one permutation,
            the same batches in every pass) or ``"given"`` (the data set's own order, which must
            not depend on the records).
    """

    relations = ("zero-out", "replace-one")
    whole_passes = True

    n: int
    batch_size: int
    order: Order = "reshuffled"

    def __post_init__(self) -> None:
        one_of("order", self.order, get_args(Order))

    @property
    def regular(self) -> bool:
        return self.order != "reshuffled"

    @property
    def steps_per_pass(self) -> int:
        return math.ceil(self.n / self.batch_size)

    @property
    def separation(self) -> int:
        """Fewest steps from one participation of a record to its next."""
        return 1 if self.order == "reshuffled" else self.steps_per_pass

    def goes_by_places(self, *, sharded: bool) -> bool:
        """Whether the order is given, or shards' batches follow from how many records each has."""
        return self.order == "given" or sharded

    def participations(self, steps: int) -> int:
        """Steps that one record takes part in, at most."""
        return math.ceil(steps / self.steps_per_pass)

    def event(self, noise_multipliers: Floats) -> dp_accounting.DpEvent:
        """One Gaussian for each pass, at the least noise of its steps that a record may be in.

        Given the order, which no record decides, the steps that a record takes part in are fixed,
        and their squared shifts over the noise add up: in its place of each pass where the order
        stays, in the worst place of each where not.
        """
        return one_gaussian(
            noise_multipliers, self.steps_per_pass, moves=self.order == "reshuffled"
        )

    def batches(
        self, coins: KeyStream, records: int, position: Position | None = None
    ) -> Iterator[Indices]:
        """One batch after the other, pass after pass.

        **Guarantee.** Which records are in which batch depends on ``records`` and the coins alone.
        """
        if records != self.n:
            raise ValueError(
                f"the data set has {records} records, but the batches were planned for n={self.n}."
            )
        position = position or Position()
        while True:
            step = position.drawn % self.steps_per_pass
            if position.order is None or (step == 0 and self.order == "reshuffled"):
                position.order = self._permutation(coins, records)
            start = step * self.batch_size
            position.drawn += 1
            yield position.order[start : start + self.batch_size]

    def shard(self, records: int) -> "ShardOfFixedBatches":
        return ShardOfFixedBatches(self)

    def _permutation(self, coins: KeyStream, records: int) -> Indices:
        if self.order == "given":
            return np.arange(records)
        words = np.empty(records, dtype=np.uint64)
        coins.words(words)
        return np.argsort(words, kind="stable")

    def steps(self, epochs: float) -> int:
        if not math.isfinite(epochs) or epochs != int(epochs) or epochs < 1:
            raise ValueError(
                f"epochs must be a whole number of passes over fixed batches, got {epochs!r}."
            )
        return int(epochs) * self.steps_per_pass

    def passes(self, steps: int) -> float:
        return steps / self.steps_per_pass

    def capacity(self, n: int) -> int:
        return self.batch_size

    def promise(self) -> str:
        order = {
            "reshuffled": "fresh shuffles",
            "shuffled": "one shuffle",
            "given": "the data set's own order",
        }[self.order]
        return (
            f"each record is in one of {self.steps_per_pass} disjoint batches of every pass, by "
            f"{order}"
        )


@dataclass(frozen=True)
class ShardOfFixedBatches:
    """One process's part of `FixedBatches` of shared-out records: as many batches a pass.

    Each process cuts a permutation of its own records. All parts of a batch together may exceed
    ``whole.batch_size``, by less than one record a process.
    """

    whole: FixedBatches

    def batches(
        self, coins: KeyStream, records: int, position: Position | None = None
    ) -> Iterator[Indices]:
        """See `FixedBatches.batches`; with fewer records than steps, some batches are empty."""
        position = position or Position()
        steps = self.whole.steps_per_pass
        while True:
            step = position.drawn % steps
            if position.order is None or (step == 0 and self.whole.order == "reshuffled"):
                position.order = self.whole._permutation(coins, records)
            position.drawn += 1
            yield position.order[step * records // steps : (step + 1) * records // steps]


@dataclass(frozen=True)
class AllRecords(Sampler):
    """A solver that takes its records as it needs them, each as often as its budget pays for."""

    relations = ("zero-out", "replace-one")

    def goes_by_places(self, *, sharded: bool) -> bool:
        return False  # all take part in every step

    def event(self, noise_multipliers: Floats) -> dp_accounting.DpEvent:
        """Gaussians, composed."""
        return composed_gaussians(noise_multipliers, 1.0)

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
