"""Per-sample gradients of a parameter used several times (tied weights), cross terms included."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpoptim.gradients.arithmetic.batch_invariant import aligned_records, gram
from dpoptim.gradients.arithmetic.position_sums import never_alone
from dpoptim.gradients.arithmetic.products import Groups
from dpoptim.gradients.per_sample.fused_factors import Lookups
from dpoptim.gradients.per_sample.ghost_norms import ghost_squared_norms
from dpoptim.gradients.per_sample.lazy import Lazy
from dpoptim.gradients.per_sample.per_sample_grads import Chunk, PerSampleGrad
from dpoptim.gradients.per_sample.sequence_outer import SequenceOuter
from dpoptim.gradients.per_sample.sparse import Pairs, Rows, TableGrad


def merge(
    uses: Sequence[PerSampleGrad], records: int, entries: int, most: int = 1
) -> PerSampleGrad:
    """The sum of several uses of one parameter, of as many ``entries``.

    Args:
        most: records that a pass may have, public.
    """
    if len(uses) == 1:
        return uses[0]
    tables = [use for use in uses if isinstance(use, TableGrad)]
    if len(tables) == len(uses):
        return join_tables(tables, records)
    heads = [use for use in uses if isinstance(use, SequenceOuter)]
    lookups = [table for table in tables if isinstance(table, Rows)]
    if (
        len(heads) == 1
        and len(lookups) == len(uses) - 1
        and heads[0].g.shape[2] == lookups[0].table_rows
    ):
        table = join_tables(lookups, records)
        assert isinstance(table, Rows)
        head = heads[0]
        way = "twice" if head.fused == "claimed" else head.fused  # no Gram form knows of lookups
        return TiedHead(head.g, head.a, head.ghost_norms, most, head.alone, way, table=table)

    def form(part: slice, _: int) -> Tensor:
        return sum((use.materialise(part) for use in uses[1:]), start=uses[0].materialise(part))

    return Lazy(form, records, entries, (len(uses) + 1) * entries, most=most)


def join_tables(tables: Sequence[TableGrad], records: int) -> Rows | Pairs:
    """Lookups in one table, several times in a pass: O(records x distinct rows) as ever."""
    lookups = [table for table in tables if isinstance(table, Rows)]
    size = tables[0].table_rows
    if len(lookups) == len(tables):
        return Rows(
            torch.cat([use.index for use in lookups], 1),
            torch.cat([use.g for use in lookups], 1),
            size,
        )
    columns = zip(*(table.columns() for table in tables), strict=True)
    record, row, values = (torch.cat(column) for column in columns)
    return Pairs.of(record, row, values, records, size)


@dataclass
class TiedHead(SequenceOuter):
    """A table looked up in and multiplied by: a language model's embedding and output layer.

    The head's gradients are formed as ever (or have ghost norms); those of the looked-up rows
    are added in place.
    """

    table: Rows | None = None

    def form(self, part: slice, out: Tensor | None = None) -> Tensor:
        formed = super().form(part, out)
        self._look_up(part, formed)
        return formed

    def _compiled(self, start: int, stop: int) -> Chunk:
        """As without compiled functions: looked-up rows are added before anything is measured."""
        _, T, d = self.a.shape
        return Chunk(start * d, (stop - start) * d, self.form_rows(start, stop), positions=T)

    def form_rows(self, start: int, stop: int) -> Callable[[int], Tensor]:
        assert self.table is not None
        head, index, g = super().form_rows(start, stop), self.table.index, self.table.g

        def form(record: int) -> Tensor:
            formed = head(record)
            here = (index[record] >= start) & (index[record] < stop)
            rows = g[record][here]
            places = (index[record][here] - start)[:, None].expand_as(rows)
            formed.view(stop - start, -1).scatter_add_(0, places, rows)
            return formed

        return form

    def _look_up(self, part: slice, formed: Tensor) -> None:
        assert self.table is not None
        index, g = self.table.index[part], self.table.g[part]
        self._as_matrices(formed).scatter_add_(1, index[:, :, None].expand_as(g), g)

    def _lookups(self) -> Lookups:
        assert self.table is not None
        return Lookups.of(self.table.index, self.table.g)

    def _ghost_norms(self, groups: Groups, block: int) -> tuple[Tensor, Tensor]:
        assert self.table is not None
        index, rows = self.table.index, self.table.g
        # <sum_t outer(g_t, a_t), row s of the table receives e_s> = sum_st g_t[index_s] (a_t .
        # e_s)
        g, a = self.sides()
        looked_up = g.gather(2, index[:, None, :].expand(-1, g.shape[1], -1))
        products = gram(aligned_records(a), aligned_records(rows))[: len(rows)]
        cross = never_alone(looked_up * products).sum((1, 2))[: len(rows)].double()
        head, longest = ghost_squared_norms(g, a)
        table = self.table.squared_norms(groups, block)
        # What ghost norms read too low, the sum makes good: longer gradients are shortened.
        return (head + table + 2 * cross).clamp(min=0), longest

    def without(self, keep: Tensor) -> "TiedHead":
        assert self.table is not None
        return replace(super().without(keep), table=self.table.without(keep))
