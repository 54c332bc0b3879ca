"""The slow truth: per-record gradients from micro-batches of one, to hold the engine against."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.adding.row_terms import RowTerms
from dpoptim.gradients.arithmetic.precision import computed_in
from dpoptim.gradients.arithmetic.products import margin
from dpoptim.gradients.engine import Engine, Reduction
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.placement import IN_PLACE, Placement
from dpoptim.gradients.rows_of_records import ONE_ROW, RowsOfRecords
from dpoptim.noise.few_rows import FewRows, Vector, memory_of

Loss = Callable[[nn.Module, Any], Tensor]
KEPT = 1 << 25  # entries of gradients that are kept rather than computed again
WIDENED = 1 << 20  # that are made float64 at a time


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradients_alone(model: nn.Module, loss: Loss, records: Iterable[Any]) -> list[Tensor]:
    """Gradient of each record's loss in a batch of one: for each parameter (B, *parameter)."""
    return RecordsAlone(model, loss, list(records)).stacked()


def squared_norms(gradients: list[Tensor]) -> Tensor:
    """Squared norms of records' gradients, on the device of their first part: float64, (B,)."""
    squared = []
    for g in gradients:
        flat = g.reshape(len(g), -1)
        # one for all parts: what is allocated for each anew does not fit where the last one lay
        room = flat.new_empty(len(flat), min(WIDENED, flat.shape[1]), dtype=torch.float64)
        for part in flat.split(WIDENED, 1):
            wide = room[:, : part.shape[1]].copy_(part)
            squared.append(torch.linalg.vector_norm(wide, dim=1).square().to(gradients[0].device))
    return torch.stack(squared).sum(0)


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


class RecordsAlone:
    """Gradients of records in batches of their own.

    Kept, or, where they are large, computed again whenever they are wanted, one record's at a time;
    where processes have parts of a model too large for one, this one's parts.

    Args:
        records: batches of one.

    Attributes:
        squared: float64, shape (B,): the square of each record's whole gradient's norm.
        dtype: that the gradients were computed in.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, records: Sequence[Any], placement: Placement = IN_PLACE
    ) -> None:
        self._model, self._loss, self._records = model, loss, records
        self._placement = placement
        self._kept: list[list[Tensor]] = []
        keep = len(records) * sum(p.numel() for p in trainable(model).values()) <= KEPT
        squared = []
        for gradients in self:
            squared.append(squared_norms([g.unsqueeze(0) for g in gradients]))
            self.dtype = min((computed_in(g.dtype) for g in gradients), key=lambda d: d.itemsize)
            if keep:
                self._kept.append(gradients)
            del gradients  # before the next record's take as much
        self.squared = placement.added(torch.cat(squared))

    def __iter__(self) -> Iterator[list[Tensor]]:
        """Each record's gradients, one a parameter."""
        if len(self._kept) == len(self._records):
            yield from self._kept
            return
        parameters = list(trainable(self._model).values())
        for record in self._records:
            yield self._placement.gradients(self._loss(self._model, record), parameters)

    def stacked(self) -> list[Tensor]:
        """One tensor a parameter, with the records on the first axis."""
        return [torch.stack(each) for each in zip(*self, strict=True)]

    def subtract(self, sums: list[Vector], weights: Sequence[float]) -> None:
        """Take weighted gradients from sums, in place; leave out those of weight 0, even NaN."""
        records = iter(self)
        for weight in weights:
            gradients = next(records)
            if weight:
                for place, g in enumerate(gradients):
                    sums[place] = subtract(sums[place], g, weight)
                del g
            del gradients  # before the next record's take as much

    def distances(
        self, ours: list[Vector], clipping: Clipping, order: Sequence[int], reduction: Reduction
    ) -> dict[str, float]:
        """How far the engine's sums are off by parameter (Euclidean); writes over them.

        Args:
            order: which of the records each one of the batch is.
        """
        rounding = margin(self.dtype, len(order), common_factor=reduction == "mean")
        factors = clipping.factors(self.squared, rounding).tolist()
        self.subtract(ours, [max(factor, 0.0) * order.count(i) for i, factor in enumerate(factors)])
        left = [each.value if isinstance(each, FewRows) else each for each in ours]
        squared = torch.stack([each.norm().square().cpu() for each in left])
        found = self._placement.added(squared).sqrt().tolist()
        return dict(zip(trainable(self._model), found, strict=True))


def subtract(total: Vector, g: Tensor, weight: float) -> Vector:
    """Take ``weight * g`` from ``total`` in place, a few rows at a time: each is widened first.

    Of a table in memory for few rows, in memory for these and those of ``g`` that are not zero.
    """
    if isinstance(total, FewRows):
        return less(total, g, weight)
    if g.dim() == 0:
        return total.sub_(g, alpha=weight)
    rows = max(1, WIDENED // max(1, g[0].numel() if len(g) else 1))
    for part, of_g in zip(total.split(rows), g.split(rows), strict=True):
        part.sub_(of_g, alpha=weight)
    return total


def less(total: FewRows, g: Tensor, weight: float) -> FewRows:
    """A table less the weighted rows of ``g``, of which most are zero."""
    columns = total.value.shape[1]
    terms = RowTerms([columns], torch.float64, total.device)
    terms.add(total.row, total.value)
    start = 0
    for part in g.reshape(-1, columns).split(max(1, WIDENED // columns)):
        row = part.ne(0).any(1).nonzero()[:, 0]
        terms.add(row + start, part[row].double().mul_(-weight))
        start += len(part)
    return FewRows(total.out, 0, *terms.take())


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

    In float64, or of large tables the rows that were looked up. Given ``positions`` of the layers,
    by formulas for large batches, which keep no gradients.
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
            each if isinstance(each, FewRows) else each.double().view(placement.part_shape(p))
            for p, each in zip(engine.parameters, taken, strict=True)
        ]
    finally:
        engine.detach()
        placement.settle()


def worst_mismatch(found: Mapping[str, float]) -> tuple[str, float]:
    """The parameter whose sums differ most, and by how much."""
    name = max(found, key=lambda key: (math.isnan(found[key]), found[key]))
    return name, found[name]
