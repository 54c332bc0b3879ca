"""The slow truth: gradients from micro-batches of one, and the engine's sums beside it."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.arithmetic.precision import computed_in
from dpoptim.gradients.arithmetic.products import margin
from dpoptim.gradients.engine import Engine, Reduction
from dpoptim.gradients.expected_sums import (
    CLIPPING_AND_NOT,
    WIDENED,
    ClippedSums,
    Summing,
    subtract,
)
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.placement import IN_PLACE, Placement
from dpoptim.gradients.rows_of_records import ONE_ROW, RowsOfRecords
from dpoptim.gradients.watch.contents import Contents
from dpoptim.noise.few_rows import FewRows, Vector, memory_of
from dpoptim.runtime.parametrizations import parametrizations_kept

Loss = Callable[[nn.Module, Any], Tensor]
KEPT = 1 << 25  # entries of gradients that are kept rather than computed again
# Of the largest norm: less is rounding, even in float64, of a gradient that cancels. What is less
# in float32 may be a record's own beside one with large numbers.
ROUNDED_AWAY = 64 * torch.finfo(torch.float64).eps
ABOUT_MEDIAN = 0.5, 1.5  # of it
LARGE_BATCH = 1 << 12  # records


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(Contents.of(model).trainable())


def gradients_alone(model: nn.Module, loss: Loss, records: Iterable[Any]) -> list[Tensor]:
    """Gradient of each record's loss in a batch of one: for each parameter (B, *parameter)."""
    return RecordsAlone(model, loss, list(records)).stacked()


def squared_norms(gradients: list[Tensor]) -> Tensor:
    """Squared norms of records' gradients, on the device of their first part: float64, (B,)."""
    squared = []
    for g in gradients:
        flat = g.reshape(len(g), -1)
        if flat.numel() <= WIDENED:  # small: a trial has thousands of them
            squared.append(torch.linalg.vector_norm(flat.double(), dim=1).square())
            continue
        # one for all parts: what is allocated for each anew does not fit where the last one lay
        room = flat.new_empty(len(flat), min(WIDENED, flat.shape[1]), dtype=torch.float64)
        for part in flat.split(WIDENED, 1):
            wide = room[:, : part.shape[1]].copy_(part)
            squared.append(torch.linalg.vector_norm(wide, dim=1).square())
    return torch.stack([each.to(gradients[0].device) for each in squared]).sum(0)


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
    """

    def __init__(
        self, model: nn.Module, loss: Loss, records: Sequence[Any], placement: Placement = IN_PLACE
    ) -> None:
        self._model, self._loss, self._records = model, loss, records
        self._placement = placement
        self._kept: list[list[Tensor]] = []
        self._squared: list[Tensor] = []
        self._sums: dict[Any, list[ClippedSums]] = {}  # those asked for last

    def __iter__(self) -> Iterator[list[Tensor]]:
        """Each record's gradients, one a parameter."""
        if self._kept and len(self._kept) == len(self._records):
            yield from self._kept
            return
        parameters, self._kept = list(trainable(self._model).values()), []
        keep = len(self._records) * sum(p.numel() for p in parameters) <= KEPT
        for record in self._records:
            gradients = self._placement.gradients(self._loss(self._model, record), parameters)
            if keep:
                self._kept.append(gradients)
            yield gradients
            del gradients  # before the next record's take as much

    def _measured(self) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """The square of each record's whole gradient's norm, and its gradients."""
        known = [*self._squared]
        for gradients in self:  # no `enumerate`, which holds what came before until there is more
            if known:
                squared = known.pop(0)
            else:
                each = squared_norms([g.unsqueeze(0) for g in gradients])
                squared = self._placement.added(each)[0]
                self._squared.append(squared)
            yield squared, gradients
            del gradients

    @property
    def squared(self) -> Tensor:
        """The square of each record's whole gradient's norm: float64, shape (B,)."""
        if len(self._squared) < len(self._records):
            for _ in self._measured():
                pass
        return torch.stack(self._squared)

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

    def clipped_sums(self, order: Sequence[int], reduction: Reduction) -> list[ClippedSums]:
        """The sums that the engine should give of a batch: `CLIPPING_AND_NOT`, from one pass.

        By the norm of the first record that has one; where that is not about the median, by the
        median, in a second pass.

        Args:
            order: which of the records is at each place of the batch.
        """
        asked = tuple(order), reduction
        if asked not in self._sums:
            self._sums.clear()
            self._sums[asked] = self._clipped_sums(*asked)
        return self._sums[asked]

    def _clipped_sums(self, order: Sequence[int], reduction: Reduction) -> list[ClippedSums]:
        """`clipped_sums`, of which nothing is known."""
        found = self._added(order, reduction)
        norms = self.squared.sqrt()[list(order)]
        norms = norms[norms.isfinite() & (norms > 0)]
        norms = norms[norms > ROUNDED_AWAY * norms.max()] if len(norms) else norms
        median = float(norms.median()) if len(norms) else 0.0
        least, most = ABOUT_MEDIAN
        if least * median <= self._scale() <= most * median:
            return found
        found.clear()  # before others take as much
        return self._added(order, reduction, median)

    def _scale(self) -> float:
        """The norm of the first record that has one, so far; 0: none has."""
        known = (float(each.sqrt()) for each in self._squared)
        return next((norm for norm in known if 0 < norm < math.inf), 0.0)

    def _added(
        self, order: Sequence[int], reduction: Reduction, scale: float | None = None
    ) -> list[ClippedSums]:
        """`clipped_sums`, with bounds of this norm."""
        sums = [Summing(bound, order) for bound in CLIPPING_AND_NOT]
        for squared, gradients in self._measured():
            dtype = min((computed_in(g.dtype) for g in gradients), key=lambda d: d.itemsize)
            rounding = margin(dtype, len(order), common_factor=reduction == "mean")
            for each in sums:
                norm = self._scale() if scale is None else scale
                each.add(squared, gradients, norm, rounding)
            del gradients  # before the next record's take as much
        norm = self._scale() if scale is None else scale
        largest = max((n for n in self.squared.sqrt().tolist() if math.isfinite(n)), default=0.0)
        return [each.clipped(norm, largest) for each in sums]


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
    engine.attach(watched=False)
    try:
        engine.begin_microbatch(records)
        with parametrizations_kept(model):
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
