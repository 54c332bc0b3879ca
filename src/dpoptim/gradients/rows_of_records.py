"""Records of several rows: augmented views, a person's rows, segments. Clipped once.

Every layer sees rows and says what each row's gradients are made of. A record's gradient is the sum
(or mean) over its own rows, so here, after all layer rules and before anything is measured, rows
become *further positions* of their record: what is ``outer(g, a)`` for a row is ``sum_k outer(g_k,
a_k)`` for the record, whose norm has the cross terms between its rows. Norms, clip factors, groups
and sums are those of records from then on, and the theorem in `products` holds as it stands.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dpoptim.gradients.arithmetic.position_sums import sum_positions
from dpoptim.gradients.per_sample.joined import OverPositions, over_positions
from dpoptim.gradients.per_sample.lazy import Lazy
from dpoptim.gradients.per_sample.per_sample_grads import (
    Bias,
    Chunk,
    Dense,
    OneByOne,
    Outer,
    PerSampleGrad,
    record_by,
)
from dpoptim.gradients.per_sample.sequence_outer import SequenceOuter
from dpoptim.gradients.per_sample.sparse import Pairs, Rows, SparseOuter


@dataclass(frozen=True)
class RowsOfRecords:
    """How many rows a record has in a batch, and how their gradients make up its own.

    Args:
        per_record: K >= 1, public. In a batch, a record's rows come one after the other.
        reduction: whether a record's gradient is the ``"mean"`` or the ``"sum"`` of its rows'
            gradients.
    """

    per_record: int = 1
    reduction: Literal["mean", "sum"] = "mean"

    def whole_passes_only(self, partial_backward: bool) -> bool:
        """Refuse ``partial_backward`` where nothing tells which rows of a part belong together."""
        if partial_backward and self.per_record > 1:
            raise ValueError(
                "partial_backward=True is not for records of several rows. Fix: one backward pass "
                "on the whole batch; batches(physical_batch_size=...) for memory."
            )
        return partial_backward

    def shares(self, records: int, present: Tensor | None, device: torch.device) -> Tensor:
        """Factor of the sum over each record's rows: float64, shape (records,).

        Args:
            present: see `of_records`. A mean is over the rows that are there, a number that is the
                record's own; of a record without a row nothing is left.
        """
        there = self.per_record if present is None else present.sum(1).to(device, torch.float64)
        rows = torch.ones(records, dtype=torch.float64, device=device) * there
        return (
            rows.clamp(max=1.0)
            if self.reduction == "sum"
            else rows.clamp(max=1.0) / rows.clamp(min=1.0)
        )

    def from_loss(
        self, records: int, present: Tensor | None, of: Tensor, mean_over: float | None
    ) -> Tensor | None:
        """Factors from what a loss gives a record to its gradient, (records,): a mean is undone.

        Args:
            present: see `of_records`. of: one of the parameters.
            mean_over: the number that losses were divided by; None: they were added up.

        None: 1 for every record.
        """
        if mean_over is None and present is None and self.per_record == 1:
            return None
        shares = self.shares(records, present, of.device)
        if mean_over is None:
            return shares
        # as PyTorch rounds it
        factor = 1 / mean_over
        return shares / (float(np.float32(factor)) if of.dtype == torch.float32 else factor)

    def of_records(self, rows: PerSampleGrad, count: int, present: Tensor | None) -> PerSampleGrad:
        """The records' gradients from those of all ``count`` rows: sums over each record's own.

        Args:
            present: bool, shape (records, K): rows that are there. Others fill up a record that
                has fewer; whatever they hold, they count as exactly zero. None: all are there.

        **Guarantee.** A record's gradient is a function of its own rows, if each row's gradient is
        one of that row.
        """
        if self.per_record == 1:
            return rows  # a row that is not there has weight zero: see `shares`
        return sum_rows(
            rows if present is None else rows.without(present.reshape(-1)), count, self.per_record
        )


ONE_ROW = RowsOfRecords()


@singledispatch
def sum_rows(rows: Any, count: int, K: int) -> PerSampleGrad:
    """Gradients of count / K records of K consecutive rows each: sums of the rows' gradients.

    Any kind of per-sample gradients can be formed for rows; those that are known have a cheaper
    way.
    """
    entries = rows.materialise(slice(0, 1)).shape[1]
    form = FormedRows(lambda part, most: rows.materialise(part), K)
    return Lazy(form, count // K, entries, K * entries)


@sum_rows.register
def _(rows: Outer, count: int, K: int) -> PerSampleGrad:
    return SequenceOuter(rows.g.unflatten(0, (-1, K)), rows.a.unflatten(0, (-1, K)), rows=K)


@sum_rows.register
def _(rows: Bias, count: int, K: int) -> PerSampleGrad:
    return Dense(sum_positions(rows.outer.g.unflatten(0, (-1, K))))


@sum_rows.register
def _(rows: OverPositions, count: int, K: int) -> PerSampleGrad:
    return over_positions(as_positions(rows.g, K))


@sum_rows.register
def _(rows: Dense, count: int, K: int) -> PerSampleGrad:
    return Dense(sum_positions(rows.values.reshape(count // K, K, -1)))


@sum_rows.register
def _(rows: SequenceOuter, count: int, K: int) -> PerSampleGrad:
    return SequenceOuter(as_positions(rows.g, K), as_positions(rows.a, K))


@sum_rows.register
def _(rows: Rows, count: int, K: int) -> PerSampleGrad:
    return Rows(rows.index.reshape(count // K, -1), as_positions(rows.g, K), rows.table_rows)


@sum_rows.register
def _(rows: SparseOuter, count: int, K: int) -> PerSampleGrad:
    return sum_rows(rows.pairs(), count, K)  # each row of a record has a gradient of its own


@sum_rows.register
def _(rows: Pairs, count: int, K: int) -> PerSampleGrad:
    return Pairs.of(rows.record // K, rows.row, rows.values, count // K, rows.table_rows)


@sum_rows.register
def _(rows: Lazy, count: int, K: int) -> PerSampleGrad:
    form = FormedRows(lambda part, most: replace(rows, most=most).materialise(part), K)
    singly = None if rows.singly is None else SumOfRows(rows.singly, K, rows.keep)
    return Lazy(
        *(form, count // K, rows.entries, K * max(rows.per_record, rows.entries)),
        singly=singly,
        at_once=rows.at_once,
        at_any_size=rows.at_any_size,
    )


def as_positions(x: Tensor, K: int) -> Tensor:
    """(rows, T, d) as (records, K T, d)."""
    return x.reshape(-1, K * x.shape[1], x.shape[2])


@dataclass(frozen=True)
class FormedRows:
    """Forms records' gradients from those of their rows; see `Lazy.form`."""

    form_rows: Callable[[slice, int], Tensor]
    K: int

    def __call__(self, part: slice, most: int) -> Tensor:
        values = self.form_rows(slice(self.K * part.start, self.K * part.stop), self.K * most)
        return sum_positions(values.unflatten(0, (-1, self.K)))


@dataclass(frozen=True)
class SumOfRows:
    """Records' gradients for `record_by_record`: rows' gradients added up as they are formed."""

    rows: OneByOne
    K: int
    keep: Tensor | None

    def one_by_one(self) -> list[Chunk]:
        return [self._of_records(each) for each in self.rows.one_by_one()]

    def _of_records(self, of_row: Chunk) -> Chunk:
        together = None if of_row.of_rows is None else of_row.of_rows(self.K, self.keep)
        kept = None if self.keep is None else self.keep.tolist()
        return replace(
            of_row,
            form=self._summed(of_row.form, kept)
            if together is None
            else record_by(together, of_row.entries),
            form_few=None,
            form_measured=together,
            of_rows=None,
            form_added=None,
            positions=self.K * of_row.positions,
        )

    def _summed(
        self, form: Callable[[int], Tensor], kept: Sequence[bool] | None
    ) -> Callable[[int], Tensor]:
        def of_record(record: int) -> Tensor:
            total: Tensor | None = None
            for row in range(self.K * record, self.K * (record + 1)):
                gradient = form(row)
                if kept is None or kept[row]:
                    # the next one may take its place
                    total = gradient.clone() if total is None else total.add_(gradient)
            return torch.zeros_like(gradient) if total is None else total

        return of_record

    def in_order(self, total: Tensor) -> Tensor:
        return self.rows.in_order(total)
