"""Which engine a plan's method needs."""

from collections.abc import Mapping

from torch import nn

from dpoptim.errors import PrivacyError
from dpoptim.gate import GaussianSum
from dpoptim.gradients.accumulation.totals import MakeTotals, Totals
from dpoptim.gradients.engine import Engine, Reduction
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.placement import Placement
from dpoptim.gradients.rows_of_records import ONE_ROW, RowsOfRecords
from dpoptim.gradients.value_clipping.value_engine import ValueEngine
from dpoptim.methods.method import TrainingMethod
from dpoptim.plan import Plan
from dpoptim.runtime.torch_features import require
from dpoptim.training.trials.isolation import Chosen
from dpoptim.training.trials.probe import positions_per_layer


def training_method(plan: Plan) -> TrainingMethod:
    """Return the plan's method, which a training loop can carry out.

    Raises:
        TypeError: the plan is for a solver.
    """
    if not isinstance(plan.method, TrainingMethod):
        raise TypeError(
            f"a plan for {plan.method.name!r} is carried out by dpoptim.solvers, not by "
            "dpoptim.attach."
        )
    return plan.method


def reads_sums(plan: Plan) -> bool:
    """Whether anything but the gate reads a step's sums.

    What the method remembers, a private clip norm, or noise that later steps take back.
    """
    method = training_method(plan)
    states = method.sensitive_state(plan), method.adaptive_clip_norm(plan)
    return not isinstance(plan.query, GaussianSum) or any(each is not None for each in states)


def engine_for(
    plan: Plan,
    model: nn.Module,
    chosen: Chosen,
    reduction: Reduction,
    *,
    partial_backward: bool = False,
    rows: RowsOfRecords = ONE_ROW,
    totals: MakeTotals = Totals,
    positions: Mapping[str, int] | None = None,
    placement: Placement | None = None,
) -> Engine:
    """Return what turns backward passes into the plan's clipped sums.

    Args:
        chosen: how records are kept apart, and what a call of the model looks like.
        rows: that make up a record.
        totals: where the sums live.
        positions: of the model's layers, if known; see `positions_per_layer`.
        placement: where its parameters are in forward passes, and otherwise.
    """
    require()  # before a record is touched
    capacity, method = plan.sampler.capacity(plan.n), training_method(plan)
    if method.value_bound is not None:
        if partial_backward:
            raise ValueError(
                "partial_backward=True is not for value clipping; use "
                "batches(physical_batch_size=...)."
            )
        if rows.per_record > 1:
            raise ValueError(
                "records of several rows are not for value clipping. Fix: dpoptim.DPSGD."
            )
        if chosen.isolation != Isolation():
            raise ValueError(
                "isolation is not for value clipping, whose bound is proved for layers. Fix: leave "
                "it out."
            )
        if placement is not None and placement.spread:
            raise PrivacyError(
                "value clipping is not supported for models under fully_shard. Fix: dpoptim.DPSGD; "
                "or the model bare, or in DistributedDataParallel."
            )
        paper = method.value_bound == "paper"
        return ValueEngine(
            model, method.rule, capacity=capacity, paper=paper, totals=totals, placement=placement
        )
    if chosen.isolation.alone and rows.per_record > 1:
        raise ValueError(
            'isolation="alone" is not for records of several rows. Fix: isolation="vmap".'
        )
    return Engine(
        model,
        method.rule,
        capacity=capacity,
        # the mean of one is no other number
        reduction="sum" if chosen.isolation.alone else reduction,
        partial_backward=partial_backward,
        positions=(positions_per_layer(model, chosen.sample) if positions is None else positions),
        isolation=chosen.isolation,
        rows=rows,
        totals=totals,
        placement=placement,
    )
