"""Epochs of a plan: its steps in parts of public length, for loops that do something after each."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, Self

from dpoptim.arguments import whole_number
from dpoptim.errors import PrivacyError
from dpoptim.plan import Plan
from dpoptim.training.batches.loading import Batches


@dataclass(frozen=True)
class EpochEnds:
    """Where the epochs of a plan end, each of which goes as often through the records.

    Attributes:
        ends: of each epoch, the number of steps that are done then; the last is all of them.
    """

    ends: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan, count: int | None = None) -> Self:
        """The ends of ``count`` epochs; None: as many as the plan's passes, to the nearest.

        Raises:
            ValueError: more epochs than steps, or none.
        """
        steps, passes = plan.steps, plan.sampler.passes
        if count is None:
            count = min(max(1, round(plan.epochs)), steps)
        count = whole_number("count", count, least=1, most=steps)
        ends = [0]
        for number in range(1, count):
            until = passes(steps) * number / count * (1 + 1e-9)
            end = bisect_right(range(steps + 1), until, key=passes) - 1
            ends.append(min(max(end, ends[-1] + 1), steps - (count - number)))
        return cls((*ends[1:], steps))

    def number(self, done: int) -> int:
        """The epoch, from 0, that the step after ``done`` steps belongs to."""
        return bisect_right(self.ends, done)

    def longest(self) -> int:
        """Steps of the longest epoch."""
        return max(end - start for start, end in pairwise((0, *self.ends)))

    def left(self, number: int, done: int) -> int:
        """Steps of epoch ``number`` that are to come after ``done`` steps of the plan."""
        start, end = (0, *self.ends)[number : number + 2]
        return end - max(start, done)

    def passed(self, done: int) -> float:
        """How many epochs ``done`` steps are: whole at each end."""
        number = min(self.number(done), len(self.ends) - 1)
        start, end = (0, *self.ends)[number : number + 2]
        return number + (done - start) / (end - start)


class StepsDone(Protocol):
    """A training as `Epoch` needs to know it."""

    @property
    def steps_done(self) -> int: ...


class Epoch:
    """One epoch: iterate over it for its batches; ``len`` where their number is public.

    Attributes:
        number: of the plan's epochs, from 0.
        steps: that it takes, from where it is begun.
    """

    def __init__(self, training: StepsDone, batches: Batches, number: int, steps: int) -> None:
        self._training, self._batches = training, batches
        self.number, self.steps = number, steps
        self._used = False

    def __iter__(self) -> Iterator[Any]:
        """The batches of its steps, or the microbatches of which they consist.

        Raises:
            PrivacyError: a second time.
        """
        if self._used:
            raise PrivacyError(
                "an epoch's batches were asked for twice. Fix: one loop over each item of "
                "private.epochs()."
            )
        self._used = True
        last = self._training.steps_done + self.steps
        while self._training.steps_done < last:
            try:
                batch = next(self._batches)
            except StopIteration:  # the run was ended
                return
            yield batch

    def __len__(self) -> int:
        """Batches, if one is a step. TypeError: as for those that they are taken from."""
        len(self._batches)
        return self.steps

    def __repr__(self) -> str:
        return f"<private epoch {self.number}: {self.steps} steps>"


def epochs_of(training: StepsDone, batches: Batches, ends: EpochEnds) -> list[Epoch]:
    """The epochs that remain, the one that was begun included.

    Args:
        batches: of all steps that remain.
    """
    done = training.steps_done
    return [
        Epoch(training, batches, number, ends.left(number, done))
        for number in range(ends.number(done), len(ends.ends))
    ]
