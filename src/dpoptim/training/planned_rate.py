"""Learning rates that follow a plan, and a clip norm that the run finds: public numbers alone."""

import math

import torch

from dpoptim.methods.method import TrainingMethod
from dpoptim.methods.private_quantile import PrivateQuantile
from dpoptim.noise.correlated import Workload
from dpoptim.noise.correlated.workload import Rates
from dpoptim.plan import Plan

KEPT = "planned_rate"  # in an optimizer's groups, and so in checkpoints


class PlannedRate:
    """Set an optimizer's learning rates by those that the plan's noise is fitted to, if any.

    Args:
        optimizer: all its groups have one rate.
        rate: what the plan's rates are relative to.
        plan: of the run.
        chosen_for: the clip norm that ``rate`` was chosen for, by which it is scaled where the run
            finds another (only their product matters); None: it stays as it is.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rate: float,
        plan: Plan,
        chosen_for: float | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._rates = (rate * Workload(decay=decay_of(plan)).rates(plan.steps)).tolist()
        self._chosen_for = chosen_for if finds_clip_norm(plan) else None
        self._begun = (rate, self._chosen_for)
        for group in optimizer.param_groups:
            group[KEPT] = self._begun

    def before(self, step: int, clip_norm: float) -> None:
        """Set the rate of a step, counted from 0.

        Args:
            clip_norm: that of the step, public; ``nan`` while it is searched for.

        **Guarantee.** Post-processing: a clip norm that the run found is a release of the run.
        """
        factor = 1.0
        if self._chosen_for is not None and not math.isnan(clip_norm):
            factor = self._chosen_for / clip_norm
        for group in self._optimizer.param_groups:
            group["lr"] = self._rates[step] * factor

    def as_begun(self) -> bool:
        """Whether the optimizer, maybe one of a checkpoint, began by this rate."""
        return all(tuple(group[KEPT]) == self._begun for group in self._optimizer.param_groups)


def finds_clip_norm(plan: Plan) -> bool:
    """Whether the run finds its clip norm from noisy counts."""
    return isinstance(getattr(plan.method, "clip_norm", None), PrivateQuantile)


def decay_of(plan: Plan) -> Rates:
    """Return the decay that the plan's noise is fitted to."""
    return plan.method.decay if isinstance(plan.method, TrainingMethod) else "none"
