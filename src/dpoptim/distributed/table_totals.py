"""Totals of models with tables of which few rows are looked up, whole or on several ranks.

Each rank owns a stretch of every table's rows. What ranks have of it goes to its owner, which alone
selects there and adds noise; what is released goes to all. So a step's messages cost the rows that
were looked up or selected, and no table.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from dpoptim.distributed.ranks import Ranks, part_sizes
from dpoptim.errors import PrivacyError
from dpoptim.gradients.accumulation.sums import added_up
from dpoptim.gradients.accumulation.table_sums import TableSums, number_of_rows, weights_of
from dpoptim.gradients.accumulation.totals import Totals, mean_of
from dpoptim.gradients.per_sample.per_sample_grads import PerSampleGrad
from dpoptim.gradients.per_sample.sparse import TableGrad, sparse_rows
from dpoptim.noise.few_rows import Vector


class TableTotals(Totals):
    """Totals in which tables have `TableSums`; see there for what their counts are.

    Args:
        parameters: as for `Totals`.
        others: totals of those of them that are no tables.
        tables: names of the parameters that are tables, and of their rows which do not count.
        takes_sparse: whether who moves a parameter takes a sparse gradient.
        ranks: of which each gets a stretch of every table's rows, added up over all.

    **Guarantee.** Every row of a table, and its count, is in exactly one rank's stretch, and every
    rank's records in it: a record is one rank's, which counts all rows that it looks up.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        others: Totals,
        *,
        tables: Mapping[nn.Parameter, tuple[str, Collection[int]]],
        takes_sparse: Callable[[nn.Parameter], bool],
        ranks: Ranks,
    ) -> None:
        self._parameters, self._others, self._ranks = parameters, others, ranks
        self._takes_sparse = takes_sparse
        of_others = iter(others.sums)
        self._tables = {
            place: TableSums(p, *tables[p]) for place, p in enumerate(parameters) if p in tables
        }
        self.sums = [self._tables.get(place) or next(of_others) for place in range(len(parameters))]
        self._seen: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def look(
        self, place: int, rows: PerSampleGrad, present: Tensor | None, per_record: int
    ) -> None:
        if place not in self._tables:
            return
        table = self._tables[place]
        if not isinstance(rows, TableGrad):
            table.refuse()
        looked_up, row = rows.looked_up()
        keep = table.counted(row)
        if present is not None:
            keep &= present.reshape(-1).to(row.device)[looked_up]
        self._seen.setdefault(place, []).append((looked_up[keep] // per_record, row[keep]))

    def finish(self, place: int) -> None:
        if place == len(self._parameters) - 1:  # the pass is over
            self._count()

    def _count(self) -> None:
        """Count the rows that were looked up in a pass; a record's map is over all tables."""
        seen, self._seen = self._seen, {}
        maps: dict[int, tuple[Tensor, Tensor]] = {}
        records = 0
        for place, each in seen.items():
            size = self._tables[place].table_shape[0]
            pairs = torch.unique(torch.cat([record * size + row for record, row in each]))
            maps[place] = pairs // size, pairs % size
            records = max(records, int(maps[place][0].amax()) + 1 if len(pairs) else 0)
        weights = weights_of(number_of_rows([record for record, _ in maps.values()], records))
        for place, (record, row) in maps.items():
            self._tables[place].add_counts(row, weights.to(row.device)[record])

    def restart(self) -> None:
        super().restart()
        self._seen = {}

    def take(self) -> list[list[Tensor]]:
        raise PrivacyError(
            "the sums of tables with selected rows are not one vector, which this method reads. "
            "Fix: dpoptim.DPSGD."
        )

    def take_by_parameter(self) -> list[Vector]:
        """This rank's rows of each table, sparse; the others' sums; and the tables' counts, sparse.

        Rows are counted from the first that is this rank's.
        """
        self._seen = {}
        tables = [*self._tables.values()]
        sums = [self._own_rows(table.take_rows()) for table in tables]
        counts = [self._own_rows(table.take_counts()) for table in tables]
        return [*sums, *self._others.take_by_parameter(), *counts]

    def _own_rows(self, total: Tensor) -> Tensor:
        """The sum of all ranks' rows in this rank's stretch of a table."""
        if self._ranks.size == 1:
            return total
        sizes = part_sizes(len(total), self._ranks.size)
        row = total.indices()[0]
        ends = torch.tensor([*accumulate(sizes)], device=row.device)
        cuts = torch.searchsorted(row, ends).diff(prepend=ends.new_zeros(1)).tolist()
        theirs = torch.cat(self._ranks.swap(row.split(cuts)))
        values = torch.cat(self._ranks.swap(total.values().split(cuts)))
        first = sum(sizes[: self._ranks.rank])
        return sparse_rows(
            *added_up(theirs - first, values), (sizes[self._ranks.rank], *total.shape[1:])
        )

    def write_means(self, released: list[Tensor], divisor: float) -> None:
        tables, others = released[: len(self._tables)], released[len(self._tables) :]
        self._others.write_means(others, divisor)
        with torch.no_grad():
            for place, total in zip(self._tables, tables, strict=True):
                p = self._parameters[place]
                rows, values = self._of_all(total.indices()[0], total.values(), len(p))
                mean = mean_of(values, divisor, p.dtype)
                if self._takes_sparse(p):
                    p.grad = sparse_rows(rows, mean, p.shape)
                else:
                    p.grad = torch.zeros_like(p).index_copy_(0, rows, mean)

    def _of_all(self, rows: Tensor, values: Tensor, entries: int) -> tuple[Tensor, Tensor]:
        """The rows of a table that all ranks released, ascending, and what they hold."""
        size = self._ranks.size
        if size == 1:
            return rows, values
        first = sum(part_sizes(entries, size)[: self._ranks.rank])
        return (
            torch.cat(self._ranks.swap([rows + first] * size)),
            torch.cat(self._ranks.swap([values] * size)),
        )
