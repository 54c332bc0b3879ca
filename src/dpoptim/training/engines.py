"""Which engine a plan's method needs."""

from typing import Any

from torch import nn
from torch.utils.data import Dataset

from dpoptim.gradients.engine import Engine, Reduction
from dpoptim.gradients.value_engine import ValueEngine
from dpoptim.methods.value_clipped_sgd import ValueClippedSGD
from dpoptim.plan import Plan
from dpoptim.training.probe import positions_per_layer


def engine_for(
    plan: Plan, model: nn.Module, train_set: Dataset[Any], reduction: Reduction, partial_backward: bool
) -> Engine:
    """What turns backward passes into the plan's clipped sums."""
    capacity, method = plan.sampler.capacity(plan.n), plan.method
    if isinstance(method, ValueClippedSGD):
        if partial_backward:
            raise ValueError("partial_backward=True is not for ValueClippedSGD; use batches(physical_batch_size=...).")
        return ValueEngine(model, method.rule, capacity=capacity, paper=method.bound == "paper")
    return Engine(
        model,
        method.rule,
        capacity=capacity,
        reduction=reduction,
        partial_backward=partial_backward,
        positions=positions_per_layer(model, train_set),
    )
