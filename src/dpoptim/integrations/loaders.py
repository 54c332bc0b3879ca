"""A loader that other libraries' loops can be given before the training is attached."""

import math
from collections.abc import Iterator
from typing import Any, NoReturn

from dpoptim.errors import PrivacyError
from dpoptim.plan import Plan, require_plan
from dpoptim.training.batches.epochs import EpochEnds
from dpoptim.training.batches.logical_steps import LogicalStep, LogicalSteps


class PlanLoader:
    """The steps of a plan, one item each: ``len`` is public, and known before the training exists.

    One pass is an epoch, rounded up, so that as many epochs as the plan's are all of its steps.
    """

    def __init__(self, plan: Plan) -> None:
        require_plan(plan)
        self._length = math.ceil(plan.steps / max(1, plan.epochs) - 1e-9)
        self.steps: LogicalSteps | None = None  # set when the training is attached

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[LogicalStep]:
        return self._next(self._length)

    def _next(self, count: int) -> Iterator[LogicalStep]:
        if self.steps is None:
            raise RuntimeError(
                "the training is not attached: this loader belongs to a Trainer that attaches it. "
                "Fix: lightning.Trainer(callbacks=[private]), the callback whose loader it is."
            )
        for _ in range(count):
            step = next(self.steps, None)
            if step is None:
                return
            yield step


class EpochLoader(PlanLoader):
    """A `PlanLoader` for loops that say which epoch they begin: one pass is what remains of it.

    ``len`` is that of the longest epoch.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.ends = EpochEnds.of(plan)
        self._length = self.ends.longest()
        self._total, self._epoch = plan.steps, 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins, from 0."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[LogicalStep]:
        done = 0 if self.steps is None else self._total - len(self.steps)
        return self._next(self.ends.left(self._epoch, done))


class SealedStep:
    """A step as a subclass' ``training_step`` gets it: to be handed on to ``super()``.

    **Guarantee.** Nobody but the trainer takes it apart by mistake, with a loss that is
    not the one that `attach` checked.
    """

    def __init__(self, step: Any) -> None:
        self.step = step

    def _refuse(self, *ignored: Any) -> NoReturn:
        raise PrivacyError(
            "training_step was overridden, and reads its inputs: what it computes of them is not "
            "the loss that was checked. Fix: override per_sample_losses(model, inputs), or give "
            "losses=fn(model, inputs), one loss a record; super().training_step(...) does the rest."
        )

    __iter__ = __getitem__ = __len__ = keys = _refuse
