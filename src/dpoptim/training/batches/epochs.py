"""Epochs of a plan: its steps in parts of public length, for loops that do something after each."""

from collections.abc import Iterator
from typing import Any, Protocol

from dpoptim.arguments import whole_number
from dpoptim.errors import PrivacyError
from dpoptim.training.batches.loading import Batches


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


def epochs_of(training: StepsDone, batches: Batches, total: int, count: int) -> list[Epoch]:
    """The epochs that remain, the one that was begun included.

    Args:
        batches: of all steps that remain.
        total: steps of the plan.
        count: epochs that they make, as long as each other but for a step.

    Raises:
        ValueError: more epochs than steps, or none.
    """
    count = whole_number("count", count, least=1, most=total)
    ends = [total * (number + 1) // count for number in range(count)]
    begun, epochs = training.steps_done, []
    for number, end in enumerate(ends):
        if end > begun:
            epochs.append(Epoch(training, batches, number, end - begun))
            begun = end
    return epochs
