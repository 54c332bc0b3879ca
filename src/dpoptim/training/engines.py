"""Which engine a plan's method needs."""

from typing import Any

from torch import nn

from dpoptim.gradients.engine import Engine, Reduction
from dpoptim.gradients.rows_of_records import ONE_ROW, RowsOfRecords
from dpoptim.gradients.value_engine import ValueEngine
from dpoptim.methods.value_clipped_sgd import ValueClippedSGD
from dpoptim.plan import Plan
from dpoptim.training.probe import positions_per_layer


def engine_for(
    plan: Plan,
    model: nn.Module,
    row: Any,
    reduction: Reduction,
    *,
    partial_backward: bool = False,
    rows: RowsOfRecords = ONE_ROW,
) -> Engine:
    """What turns backward passes into the plan's clipped sums.

    Args:
        row: one of the data set, for its shapes.
        rows: that make up a record.
    """
    capacity, method = plan.sampler.capacity(plan.n), plan.method
    if isinstance(method, ValueClippedSGD):
        if partial_backward:
            raise ValueError("partial_backward=True is not for ValueClippedSGD; use batches(physical_batch_size=...).")
        if rows.per_record > 1:
            raise ValueError("records of several rows are not for ValueClippedSGD. Fix: dpoptim.DPSGD.")
        return ValueEngine(model, method.rule, capacity=capacity, paper=method.bound == "paper")
    return Engine(
        model,
        method.rule,
        capacity=capacity,
        reduction=reduction,
        partial_backward=partial_backward,
        positions=positions_per_layer(model, [row]),  # type: ignore[arg-type]
        rows=rows,
    )
