"""Learning rates that follow a plan: public numbers, by the count of steps alone."""

import torch

from dpoptim.methods.method import TrainingMethod
from dpoptim.noise.correlated import Workload
from dpoptim.noise.correlated.workload import Rates
from dpoptim.plan import Plan


class PlannedRate:
    """Set an optimizer's learning rates by those that the plan's noise is fitted to, if any.

    Args:
        optimizer: all its groups have one rate.
        rate: what the plan's rates are relative to.
        plan: of the run.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rate: float, plan: Plan) -> None:
        self._optimizer = optimizer
        self._rates = (rate * Workload(decay=decay_of(plan)).rates(plan.steps)).tolist()

    def before(self, step: int) -> None:
        """Set the rate of a step, counted from 0."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._rates[step]

    def set_after(self, steps: int) -> bool:
        """Whether the optimizer has the rate that so many steps, at least one, leave behind."""
        return all(group["lr"] == self._rates[steps - 1] for group in self._optimizer.param_groups)


def decay_of(plan: Plan) -> Rates:
    """Return the decay that the plan's noise is fitted to."""
    return plan.method.decay if isinstance(plan.method, TrainingMethod) else "none"
