"""Steps of the plan as a loop's items: whatever memory holds, one item is one step."""

from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

from dpoptim.errors import PrivacyError


class StepCounts(Protocol):
    """A training as `LogicalStep` needs to know it."""

    @property
    def steps_done(self) -> int: ...

    @property
    def step_is_complete(self) -> bool:
        """Whether all of the step's microbatches are delivered, and it is not released. Private."""
        ...


class LogicalSteps:
    """The steps of a plan that remain, one item each: a sized iterable, for one loop.

    Nothing is delivered before an item is iterated over, so that loops may fetch items ahead.

    Args:
        training: whose steps these are.
        microbatches: of all of them, in order.
        total: steps of the plan.
    """

    def __init__(self, training: StepCounts, microbatches: Iterator[Any], total: int) -> None:
        self._training, self._microbatches, self._total = training, microbatches, total
        self._given = training.steps_done

    def __len__(self) -> int:
        """Steps that remain; public."""
        return self._total - self._training.steps_done

    def __repr__(self) -> str:
        return f"<private steps: {len(self)} of {self._total} to come>"

    def __iter__(self) -> Iterator["LogicalStep"]:
        return self

    def __next__(self) -> "LogicalStep":
        if self._given >= self._total:
            raise StopIteration
        self._given += 1
        return LogicalStep(self._training, self._microbatches, self._given)


NO_BATCH = """a step of the plan is no batch: it holds as many as memory asks for. Fix:
    for batch in step:
        private.backward(losses of batch)  # one for each record
    optimizer.step()
In Lightning's manual optimization, self.private.backward, and step() of each self.optimizers()."""


class LogicalStep:
    """One step of the plan: iterate over its microbatches, hand losses over, step once."""

    def __init__(self, training: StepCounts, microbatches: Iterator[Any], number: int) -> None:
        self._training, self._microbatches, self.number = training, microbatches, number
        self._used = False

    def __repr__(self) -> str:
        return f"<private step {self.number}>"

    def __getitem__(self, key: object) -> NoReturn:
        raise PrivacyError(NO_BATCH)

    def items(self) -> NoReturn:
        raise PrivacyError(NO_BATCH)

    keys = values = items

    def __len__(self) -> NoReturn:
        raise TypeError(NO_BATCH)  # which list(step) takes for "unknown"

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        """Each microbatch of the step, collated; how many there are is private."""
        if self._used:
            raise PrivacyError(
                "a step's microbatches were asked for twice. Fix: one pass over each item of "
                "private.steps()."
            )
        if self.number != self._training.steps_done + 1:
            raise PrivacyError(
                f"step {self.number} was begun when {self._training.steps_done} steps were done. "
                "Fix: iterate over each item of private.steps() in order, and call "
                "step() of the optimizer that attach was given once after it (another one "
                "finds no gradients)."
            )
        self._used = True
        yield next(self._microbatches)
        # a loop may also call optimizer.step() after every microbatch, as in private.batches()
        while self._training.steps_done < self.number and not self._training.step_is_complete:
            yield next(self._microbatches)
