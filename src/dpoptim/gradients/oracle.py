"""The slow truth: per-record gradients from micro-batches of one, to hold the engine against."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.arithmetic import computed_in
from dpoptim.gradients.engine import Engine, Reduction
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.products import margin
from dpoptim.gradients.rows_of_records import ONE_ROW, RowsOfRecords

Loss = Callable[[nn.Module, Any], Tensor]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradients_alone(model: nn.Module, loss: Loss, records: Iterable[Any]) -> list[Tensor]:
    """Gradient of each record's loss in a batch of one: for each parameter (B, *parameter)."""
    parameters, singles = list(trainable(model).values()), list(records)
    rows = [p.new_zeros(len(singles), *p.shape) for p in parameters]
    for i, record in enumerate(singles):
        gradients = torch.autograd.grad(loss(model, record), parameters, allow_unused=True)
        for row, g in zip(rows, gradients, strict=True):
            if g is not None:
                row[i] = g
    return rows


def squared_norms(gradients: list[Tensor]) -> Tensor:
    """Of each record's whole gradient, on the device of its first part: float64, (B,)."""
    device = gradients[0].device
    return torch.stack(
        [
            torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1, dtype=torch.float64)
            .square()
            .to(device)
            for g in gradients
        ]
    ).sum(0)


def clipped_sums(
    gradients: list[Tensor], clipping: Clipping, capacity: int, reduction: Reduction = "mean"
) -> list[Tensor]:
    """The sums that the engine should give, float64; records that are not finite left out."""
    squared = squared_norms(gradients)
    dtype = min((computed_in(g.dtype) for g in gradients), key=lambda d: d.itemsize)
    factors = clipping.factors(squared, margin(dtype, capacity, common_factor=reduction == "mean"))
    sums = [g.new_zeros(g.shape[1:], dtype=torch.float64) for g in gradients]
    for i, factor in enumerate(factors.tolist()):
        if factor > 0:
            for total, g in zip(sums, gradients, strict=True):
                total.add_(g[i], alpha=factor)
    return sums


def engine_sums(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    records: int,
    clipping: Clipping,
    reduction: Reduction,
    isolation: Isolation | None = None,
    rows: RowsOfRecords = ONE_ROW,
) -> list[Tensor]:
    """What the engine makes of one backward pass over the whole batch."""
    engine = Engine(
        model, clipping, capacity=records, reduction=reduction, isolation=isolation, rows=rows
    )
    engine.attach()
    try:
        engine.begin_microbatch(records)
        loss(model, batch).backward()
        return engine.split(engine.take())
    finally:
        engine.detach()


def worst_mismatch(
    names: Iterable[str], ours: list[Tensor], truth: list[Tensor]
) -> tuple[str, float]:
    """The parameter whose sums differ most, and by how much (Euclidean)."""
    distances = {name: float((a - b).norm()) for name, a, b in zip(names, ours, truth, strict=True)}
    name = max(distances, key=lambda key: (math.isnan(distances[key]), distances[key]))
    return name, distances[name]
