"""Which engine a plan's method needs."""

from torch import nn

from dpoptim.gradients.engine import Engine, Reduction
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.rows_of_records import ONE_ROW, RowsOfRecords
from dpoptim.gradients.value_engine import ValueEngine
from dpoptim.methods.value_clipped_sgd import ValueClippedSGD
from dpoptim.plan import Plan
from dpoptim.training.isolation import Chosen
from dpoptim.training.probe import positions_per_layer


def engine_for(
    plan: Plan,
    model: nn.Module,
    chosen: Chosen,
    reduction: Reduction,
    *,
    partial_backward: bool = False,
    rows: RowsOfRecords = ONE_ROW,
) -> Engine:
    """What turns backward passes into the plan's clipped sums.

    Args:
        chosen: how records are kept apart, and what a call of the model looks like.
        rows: that make up a record.
    """
    capacity, method = plan.sampler.capacity(plan.n), plan.method
    if isinstance(method, ValueClippedSGD):
        if partial_backward:
            raise ValueError("partial_backward=True is not for ValueClippedSGD; use batches(physical_batch_size=...).")
        if rows.per_record > 1:
            raise ValueError("records of several rows are not for ValueClippedSGD. Fix: dpoptim.DPSGD.")
        if chosen.isolation != Isolation():
            raise ValueError("isolation is not for ValueClippedSGD, whose bound is proved for layers. Fix: leave it out.")
        return ValueEngine(model, method.rule, capacity=capacity, paper=method.bound == "paper")
    if chosen.isolation.alone and rows.per_record > 1:
        raise ValueError('isolation="alone" is not for records of several rows. Fix: isolation="vmap".')
    return Engine(
        model,
        method.rule,
        capacity=capacity,
        reduction="sum" if chosen.isolation.alone else reduction,  # the mean of one is no other number
        partial_backward=partial_backward,
        positions=positions_per_layer(model, chosen.sample),
        isolation=chosen.isolation,
        rows=rows,
    )
