"""A loader that other libraries' loops can be given before the training is attached."""

from collections.abc import Iterator
from typing import Any, NoReturn

from dpoptim.errors import PrivacyError
from dpoptim.plan import Plan, require_plan
from dpoptim.training.batches.logical_steps import LogicalStep, LogicalSteps


class PlanLoader:
    """The steps of a plan, one item each: ``len`` is public, and known before the training exists.

    Args:
        plan: the promise.
        steps_per_epoch: items of one pass of the loop; None: the whole plan in one.
    """

    def __init__(self, plan: Plan, steps_per_epoch: int | None = None) -> None:
        require_plan(plan)
        self._length = plan.steps if steps_per_epoch is None else min(plan.steps, steps_per_epoch)
        self.steps: LogicalSteps | None = None  # set when the training is attached

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[LogicalStep]:
        if self.steps is None:
            raise RuntimeError(
                "the training is not attached: this loader belongs to a Trainer that attaches it. "
                "Fix: lightning.Trainer(callbacks=[private]), the callback whose loader it is."
            )
        for _ in range(self._length):
            step = next(self.steps, None)
            if step is None:
                return
            yield step


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
