"""Samplers' answers, a run's place in its data, its length, and events of Gaussian steps."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import dp_accounting
import numpy as np
from numpy.typing import NDArray

from dpoptim.arguments import positive_number, whole_number
from dpoptim.noise.stream import KeyStream
from dpoptim.origins import of_this_library

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass
class Position:
    """A run's place in its data: what drawing the next batches needs of the past. Private.

    Attributes:
        order: the permutation in force, of batches that are cut from one; int64, shape (records,).
        drawn: batches drawn so far.
    """

    order: Indices | None = None
    drawn: int = 0


class Draws(Protocol):
    """Source of batches."""

    def batches(
        self, coins: KeyStream, records: int, position: Position | None = None
    ) -> Iterator[Indices]:
        """See `Sampler.batches`."""
        ...


def rarely_exceeded(expected: float, variance: float, n: int) -> int:
    """A size that a batch of independent records exceeds with a chance below e^-40.

    By Bernstein's inequality: ``exp(-t^2 / (2 variance + 2 t / 3))`` at ``t = 9 sqrt(variance) +
    32``.
    """
    return min(n, math.ceil(expected + 9 * math.sqrt(variance) + 32))


class Sampler(ABC):
    """Rule of who takes part in which step; frozen, and made of public numbers only.

    What a sampler leaves as it is here promises least: nothing is amplified, and a record may take
    part in every step.

    Attributes:
        relations: the neighbouring relations for which its events hold; the first is the default.
        whole_passes: whether a run must be of whole passes over the data.
        by_coins: whether each participation is a coin of its own, so that `event` is amplified.
    """

    relations: ClassVar[tuple[str, ...]]
    whole_passes: ClassVar[bool] = False
    by_coins: ClassVar[bool] = False

    @property
    def separation(self) -> int:
        """Fewest steps from one participation of a record to its next."""
        return 1

    @property
    def regular(self) -> bool:
        """Whether a record takes part exactly in the steps i, i + separation, ... for some i."""
        return False

    def relative_batch(self, step: int) -> float:
        """The expected batch of a step, counted from 0, over the first step's."""
        return 1.0

    @property
    def largest_relative_batch(self) -> float:
        """The largest of `relative_batch`."""
        return 1.0

    def goes_by_places(self, *, sharded: bool) -> bool:
        """Whether where a unit stands among the others may decide which steps it takes part in.

        If so, one who comes to stand elsewhere moves others into other steps: the events hold only
        for neighbours in which everybody keeps the place. Where coins of its own decide, or a
        uniformly random permutation, who replaces another takes over its steps, wherever it stands.

        A class of other code does not inherit the answer of one of this library, which knows how
        its own records are drawn: see `by_places`.

        Args:
            sharded: whether each process draws of records that it alone has.
        """
        return True

    def by_places(self, *, sharded: bool) -> bool:
        """Return `goes_by_places`, or True where a class of other code has not said so itself."""
        kind = type(self)
        says_itself = of_this_library(kind) or "goes_by_places" in vars(kind)
        return not says_itself or self.goes_by_places(sharded=sharded)

    def participations(self, steps: int) -> int:
        """Steps of a run that one record takes part in, at most."""
        return math.ceil(steps / self.separation)

    @abstractmethod
    def event(self, noise_multipliers: Floats) -> dp_accounting.DpEvent:
        """The event of a run whose steps release sums with independent Gaussian noise.

        Args:
            noise_multipliers: of each step: noise std over the bound on what a record adds to its
                sum; shape (steps,).
        """

    @abstractmethod
    def batches(
        self, coins: KeyStream, records: int, position: Position | None = None
    ) -> Iterator[Indices]:
        """The records of one step after the other, for as many steps as anyone asks for. Private.

        Args:
            coins: decide.
            records: in the data set.
            position: where to start, kept up to date; a fresh one by default.
        """

    @abstractmethod
    def shard(self, records: int) -> Draws:
        """Return what draws one process's part of each batch, its own being ``records`` of all.

        **Guarantee.** Records take part as they would if one process drew: its coins decide about
        its own records alone.
        """

    @abstractmethod
    def steps(self, epochs: float) -> int:
        """Steps in this many passes, rounded up, so that what runs is what is accounted."""

    @abstractmethod
    def passes(self, steps: int) -> float:
        """Expected passes over the data in this many steps."""

    @abstractmethod
    def capacity(self, n: int) -> int:
        """A size that a batch of ``n`` nominal records exceeds with negligible chance. Public."""

    @abstractmethod
    def promise(self) -> str:
        """How records come to take part, in words."""

    def releases(self, steps: int) -> str:
        """How much a run of so many planned steps releases, in words."""
        return f"at most {steps} noisy sums are released"


def composed_gaussians(
    noise_multipliers: Floats, sample_rates: float | Floats
) -> dp_accounting.DpEvent:
    """Gaussians on Poisson batches, composed; equal ones counted, in any order.

    Args:
        noise_multipliers: of each step, shape (steps,).
        sample_rates: of each step, shape (steps,), or of all.
    """
    rates = np.broadcast_to(sample_rates, len(noise_multipliers))
    # stretches of equal steps first: to sort ten million steps takes longer than all that follows
    changes = np.diff(noise_multipliers).astype(bool)
    if np.ndim(sample_rates):
        changes |= np.diff(rates).astype(bool)
    starts = np.flatnonzero(np.concatenate([[True], changes])[: len(noise_multipliers)])
    lengths = np.diff(np.append(starts, len(noise_multipliers)))
    pairs = np.stack([noise_multipliers[starts], rates[starts]])
    kinds, kind = np.unique(pairs, axis=1, return_inverse=True)
    counts = np.zeros(kinds.shape[1], np.int64)
    np.add.at(counts, kind.ravel(), lengths)
    events = []
    for (value, rate), count in zip(kinds.T.tolist(), counts.tolist(), strict=True):
        step: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(value)
        if rate < 1:
            step = dp_accounting.PoissonSampledDpEvent(rate, step)
        events.append(dp_accounting.SelfComposedDpEvent(step, count))
    return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)


def one_gaussian(
    noise_multipliers: Floats, steps_per_pass: int, *, moves: bool
) -> dp_accounting.DpEvent:
    """The Gaussian of the costliest steps that one record can take part in, one of each pass.

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


MOST_STEPS = 10_000_000


def number_of_steps(sampler: Sampler, epochs: float | None, steps: int | None) -> int:
    """Steps of the run: epochs rounded up to whole steps, so that what runs is accounted."""
    if (epochs is None) == (steps is None):
        raise ValueError("give either epochs or steps: one of them, and not both.")
    if steps is not None:
        whole = whole_number("steps", steps, least=1)
    else:
        whole = sampler.steps(positive_number("epochs", epochs))
    if whole > MOST_STEPS:
        given = f"epochs of {epochs:g}" if steps is None else f"steps of {steps:g}"
        raise ValueError(
            f"{given} make a run that is too long to account for; plan at most {MOST_STEPS} steps."
        )
    return whole
