"""The engine's sums of one batch, to be held against the truth."""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.engine import Engine, Reduction
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.oracle import Loss
from dpoptim.gradients.placement import IN_PLACE, Placement
from dpoptim.gradients.rows_of_records import ONE_ROW, RowsOfRecords
from dpoptim.noise.few_rows import FewRows, Vector, memory_of

LARGE_BATCH = 1 << 12  # records


def engine_sums(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    records: int,
    clipping: Clipping,
    reduction: Reduction,
    isolation: Isolation | None = None,
    rows: RowsOfRecords = ONE_ROW,
    placement: Placement = IN_PLACE,
    positions: Mapping[str, int] | None = None,
) -> list[Vector]:
    """The engine's sums of one backward pass over the whole batch, in the parameters' shapes.

    In the dtypes that they are added in, or of large tables the rows that were looked up. Given
    ``positions`` of the layers, by formulas for large batches, which keep no gradients.
    """
    engine = Engine(
        model,
        clipping,
        capacity=records if positions is None else max(records, LARGE_BATCH),
        positions=positions,
        reduction=reduction,
        isolation=isolation,
        rows=rows,
        totals=placement.trial_totals,
        placement=placement,
    )
    engine.attach()
    try:
        engine.begin_microbatch(records)
        loss(model, batch).backward()
        taken = engine.take_by_parameter()
        if not any(isinstance(each, FewRows) for each in taken):  # else it is one a parameter
            taken = engine.totals.own_views(memory_of(taken))
        return [
            each if isinstance(each, FewRows) else each.view(placement.part_shape(p))
            for p, each in zip(engine.parameters, taken, strict=True)
        ]
    finally:
        engine.detach()
        placement.settle()


def worst_mismatch(found: Mapping[str, float]) -> tuple[str, float]:
    """The parameter whose sums differ most, and by how much."""
    name = max(found, key=lambda key: (math.isnan(found[key]), found[key]))
    return name, found[name]
