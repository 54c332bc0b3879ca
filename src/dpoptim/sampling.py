"""Which records take part in a step, and what the accountant may make of it.

A sampler owns both the draw and the event, so that what is sampled and what is accounted cannot
drift apart.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import dp_accounting
import numpy as np
from numpy.typing import NDArray

from dpoptim.arguments import one_of
from dpoptim.noise.stream import KeyStream

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]
Order = Literal["reshuffled", "shuffled", "given"]


@dataclass
class Position:
    """Where a run stands in its data: what drawing the next batches needs of the past. Private.

    Attributes:
        order: the permutation in force, of batches that are cut from one; int64, shape (records,).
        drawn: batches drawn so far.
    """

    order: Indices | None = None
    drawn: int = 0


class Draws(Protocol):
    """Where batches come from."""

    def batches(
        self, coins: KeyStream, records: int, position: Position | None = None
    ) -> Iterator[Indices]:
        """See `Sampler.batches`."""
        ...


class Sampler(Protocol):
    """Who takes part in which step; frozen, and made of public numbers only."""

    @property
    def relations(self) -> tuple[str, ...]:
        """The neighbouring relations for which its events hold; the first is the default."""
        ...

    def event(self, noise_multipliers: Floats) -> dp_accounting.DpEvent:
        """The event of a run whose steps release sums with independent Gaussian noise.

        Args:
            noise_multipliers: of each step: noise std over the bound on what a record adds to its
                sum; shape (steps,).
        """
        ...

    def participations(self, steps: int) -> int:
        """Steps of a run that one record takes part in, at most."""
        ...

    @property
    def separation(self) -> int:
        """Fewest steps from one participation of a record to its next."""
        ...

    @property
    def whole_passes(self) -> bool:
        """Whether a run must be of whole passes over the data."""
        ...

    @property
    def by_coins(self) -> bool:
        """Whether each participation is a coin of its own, so that `event` is amplified."""
        ...

    @property
    def regular(self) -> bool:
        """Whether a record takes part in steps i, i + separation, i + 2 separation, ... for some
        i, and no others.
        """
        ...

    def batches(
        self, coins: KeyStream, records: int, position: Position | None = None
    ) -> Iterator[Indices]:
        """The records of one step after the other, for as many steps as anyone asks for. Private.

        Args:
            coins: decide.
            records: in the data set.
            position: where to start, kept up to date; a fresh one by default.
        """
        ...

    def shard(self, records: int) -> Draws:
        """What draws one process's part of every batch where processes hold ``records`` of all the
        records each.

        **Guarantee.** Records take part as they would if one process drew: its coins decide about
        its own records alone.
        """
        ...

    def steps(self, epochs: float) -> int:
        """Steps in this many passes, rounded up, so that what runs is what is accounted."""
        ...

    def passes(self, steps: int) -> float:
        """Expected passes over the data in this many steps."""
        ...

    def capacity(self, n: int) -> int:
        """A size that a batch of ``n`` nominal records exceeds with negligible probability
        (public).
        """
        ...

    def promise(self) -> str:
        """How records come to take part, in words."""
        ...

    def releases(self, steps: int) -> str:
        """How much a run of so many planned steps releases, in words."""
        ...


@dataclass(frozen=True)
class PoissonSampling:
    """Every record takes part in every step independently with probability ``sample_rate``.

    Args:
        sample_rate: q in (0, 1]; 1 takes every record in every step.
    """

    sample_rate: float

    def __post_init__(self) -> None:
        if not 0 < self.sample_rate <= 1:
            raise ValueError(
                f"sample_rate must be in (0, 1], got {self.sample_rate!r}; it is batch_size / n "
                "with batch_size <= n."
            )

    @property
    def relations(self) -> tuple[str, ...]:
        return ("add-or-remove-one", "zero-out", "replace-one")

    @property
    def whole_passes(self) -> bool:
        return False

    @property
    def by_coins(self) -> bool:
        return True

    @property
    def regular(self) -> bool:
        return False

    @property
    def separation(self) -> int:
        return 1

    def participations(self, steps: int) -> int:
        return steps

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

    def shard(self, records: int) -> "PoissonSampling":
        return self

    def steps(self, epochs: float) -> int:
        return max(1, math.ceil(epochs / self.sample_rate - 1e-9))

    def passes(self, steps: int) -> float:
        return steps * self.sample_rate

    def capacity(self, n: int) -> int:
        if self.sample_rate == 1:
            return n
        expected = n * self.sample_rate
        return min(n, math.ceil(expected + 9 * math.sqrt(expected * (1 - self.sample_rate)) + 32))

    def promise(self) -> str:
        if self.sample_rate == 1:
            return "every step takes every record"
        return f"each record joins each step by its own 53-bit coin, q={self.sample_rate:.6g}"

    def releases(self, steps: int) -> str:
        return at_most(steps)


@dataclass(frozen=True)
class FixedBatches:
    """Each pass cuts the data into disjoint batches, in an order that does not depend on what the
    records hold.

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

    n: int
    batch_size: int
    order: Order = "reshuffled"

    def __post_init__(self) -> None:
        one_of("order", self.order, get_args(Order))

    @property
    def relations(self) -> tuple[str, ...]:
        return ("zero-out", "replace-one")

    @property
    def whole_passes(self) -> bool:
        return True

    @property
    def by_coins(self) -> bool:
        return False

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

    def participations(self, steps: int) -> int:
        """Steps that one record takes part in, at most."""
        return math.ceil(steps / self.steps_per_pass)

    def event(self, noise_multipliers: Floats) -> dp_accounting.DpEvent:
        """One Gaussian for each pass, at the least noise of those steps of the pass that a record
        may take part in.

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

    def releases(self, steps: int) -> str:
        return at_most(steps)


@dataclass(frozen=True)
class ShardOfFixedBatches:
    """One process's part of `FixedBatches` of a data set whose records are shared out: as many
    batches a pass.

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
class AllRecords:
    """A solver that takes its records as it needs them, each as often as its budget pays for."""

    @property
    def relations(self) -> tuple[str, ...]:
        return ("zero-out", "replace-one")

    @property
    def whole_passes(self) -> bool:
        return False

    @property
    def by_coins(self) -> bool:
        return False

    @property
    def regular(self) -> bool:
        return False

    @property
    def separation(self) -> int:
        return 1

    def participations(self, steps: int) -> int:
        return steps

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


def at_most(steps: int) -> str:
    return f"at most {steps} noisy sums are released"


def composed(noise_multipliers: Floats, sample_rate: float) -> dp_accounting.DpEvent:
    """Gaussians on Poisson batches of one rate, composed; equal ones are counted, whatever their
    order.
    """
    values, counts = np.unique(noise_multipliers, return_counts=True)
    events = []
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        step: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(value)
        if sample_rate < 1:
            step = dp_accounting.PoissonSampledDpEvent(sample_rate, step)
        events.append(dp_accounting.SelfComposedDpEvent(step, count))
    return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)


def one_gaussian(
    noise_multipliers: Floats, steps_per_pass: int, *, moves: bool
) -> dp_accounting.DpEvent:
    """The Gaussian of the steps that cost most of those that one record can take part in, one of
    each pass.

    Args:
        noise_multipliers: shape (steps,), > 0.
        moves: whether a record's place changes from pass to pass.
    """
    values = np.unique(noise_multipliers)
    passes = math.ceil(len(noise_multipliers) / steps_per_pass)
    if len(values) == 1:
        return dp_accounting.SelfComposedDpEvent(
            dp_accounting.GaussianDpEvent(float(values[0])), passes
        )
    costs = np.zeros(passes * steps_per_pass)
    costs[: len(noise_multipliers)] = noise_multipliers**-2.0
    by_pass = costs.reshape(passes, steps_per_pass)
    most = by_pass.max(1).sum() if moves else by_pass.sum(0).max()
    return dp_accounting.GaussianDpEvent(float(most**-0.5) * (1 - 2.0**-40))
