"""Gradients of tables of which each record touches few rows, without a table per record."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic.norms import NORM_BLOCK, row_squared_norms
from dpoptim.gradients.arithmetic.products import Groups
from dpoptim.gradients.choose_formula import MEMORY_CAP
from dpoptim.gradients.per_sample.per_sample_grads import (
    PerSampleGrad,
    product_of_squares,
    zero_outside,
)

BLOCK_ENTRIES = 1 << 20  # float64 entries added to a table at a time


def cut_by_memory(records: int, elements_per_record: int) -> Iterator[slice]:
    """Cut ``records`` so that no block's temporary exceeds the memory cap (one at least)."""
    size = max(1, MEMORY_CAP // max(1, elements_per_record))
    for start in range(0, records, size):
        yield slice(start, min(start + size, records))


def sparse_rows(rows: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a sparse tensor of different rows, ascending, and what they hold."""
    return torch.sparse_coo_tensor(
        rows[None], values, tuple(shape), is_coalesced=True, check_invariants=False
    )


def distinct(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The different ones of (n,), ascending, and where each of ``numbers`` is among them."""
    if numbers.is_cpu:
        return torch.unique(numbers, return_inverse=True)
    return distinct_and_zeros(numbers)


def distinct_and_zeros(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """As `distinct`, with zeros after the different ones, n numbers in all.

    So a host need not wait for an accelerator to tell how many there are.
    """
    ordered, came_from = numbers.sort()
    place = torch.zeros_like(ordered)
    place[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
    found = torch.zeros_like(ordered).scatter_(0, place, ordered)
    return found, torch.empty_like(place).scatter_(0, came_from, place)


class TableGrad(PerSampleGrad):
    """Gradients of a table that touch few of its rows.

    Attributes:
        table_rows: of the table.
    """

    table_rows: int

    @abstractmethod
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """(record, table row, gradient) of every lookup, maybe repeated: (M,), (M,), (M, d)."""

    @abstractmethod
    def looked_up(self) -> tuple[Tensor, Tensor]:
        """(record, table row) of every lookup, maybe repeated: (M,), (M,)."""


@dataclass
class Rows(TableGrad):
    """Gradients that touch few rows of a table: row ``index[i, t]`` receives ``g[i, t]``.

    index: integers, shape (B, T); g: shape (B, T, d). Equal indices of a record are merged first,
    so that norms and sums cost O(records x distinct rows), never B x table.
    """

    index: Tensor
    g: Tensor
    table_rows: int
    _merged: tuple[Tensor, Tensor, Tensor] | None = field(default=None, repr=False)

    def _merge(self) -> tuple[Tensor, Tensor, Tensor]:
        """(record, table row, gradient) of each distinct pair: shapes (M,), (M,), (M, d).

        On accelerators there may be more, of the first record and row, with a gradient of zero.
        """
        if self._merged is None:
            B, T = self.index.shape
            record = torch.arange(B, device=self.index.device).repeat_interleave(T)
            pairs, place = distinct(record * self.table_rows + self.index.reshape(-1))
            merged = self.g.new_zeros(pairs.shape[0], self.g.shape[2])
            merged.index_add_(0, place, self.g.reshape(B * T, -1))
            self._merged = (pairs // self.table_rows, pairs % self.table_rows, merged)
        return self._merged

    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        return *self.looked_up(), self.g.flatten(0, 1)

    def looked_up(self) -> tuple[Tensor, Tensor]:
        B, T = self.index.shape
        record = torch.arange(B, device=self.index.device).repeat_interleave(T)
        return record, self.index.flatten()

    def squared_norms(self, groups: Groups, block: int = NORM_BLOCK) -> Tensor:
        record, _, merged = self._merge()
        squared = merged.new_zeros(self.index.shape[0], dtype=torch.float64)
        return squared.index_add_(0, record, row_squared_norms(merged, block=block))

    def materialise(self, records: slice) -> Tensor:
        index, g = self.index[records], self.g[records]
        dense = g.new_zeros(g.shape[0], self.table_rows, g.shape[2])
        dense.scatter_add_(1, index[:, :, None].expand_as(g), g)
        return dense.flatten(1)

    def add_weighted_sums(self, sums: Sums, weights: Tensor, groups: Groups) -> None:
        record, row, merged = self._merge()
        # in float64: there is nothing to save in float32
        for part in cut_by_memory(record.shape[0], 2 * merged.shape[1]):
            sums.add_rows(row[part], merged[part].double(), weights[:, record[part]])

    def without(self, keep: Tensor) -> "Rows":
        return Rows(self.index, zero_outside(self.g, keep), self.table_rows)


@dataclass(frozen=True)
class Pairs(TableGrad):
    """Gradients of few rows of a table: row ``row[m]`` of record ``record[m]`` gets ``values[m]``.

    record, row: shape (M,), no pair twice; values: shape (M, d), of ``records`` records.
    """

    record: Tensor
    row: Tensor
    values: Tensor
    records: int
    table_rows: int

    @classmethod
    def of(
        cls, record: Tensor, row: Tensor, values: Tensor, records: int, table_rows: int
    ) -> "Pairs":
        """From pairs of which some may be equal: their values are added up."""
        pairs, place = torch.unique(record * table_rows + row, return_inverse=True)
        merged = values.new_zeros(pairs.shape[0], values.shape[1]).index_add_(0, place, values)
        return cls(pairs // table_rows, pairs % table_rows, merged, records, table_rows)

    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.record, self.row, self.values

    def looked_up(self) -> tuple[Tensor, Tensor]:
        return self.record, self.row

    def squared_norms(self, groups: Groups, block: int = NORM_BLOCK) -> Tensor:
        squared = torch.zeros(self.records, dtype=torch.float64, device=self.values.device)
        return squared.index_add_(0, self.record, row_squared_norms(self.values, block=block))

    def materialise(self, records: slice) -> Tensor:
        start, stop, _ = records.indices(self.records)
        inside = (self.record >= start) & (self.record < stop)
        dense = self.values.new_zeros(stop - start, self.table_rows, self.values.shape[1])
        dense[self.record[inside] - start, self.row[inside]] = self.values[inside]
        return dense.flatten(1)

    def add_weighted_sums(self, sums: Sums, weights: Tensor, groups: Groups) -> None:
        size = max(1, BLOCK_ENTRIES // max(1, self.values.shape[1]))
        for start in range(0, len(self.record), size):
            part = slice(start, start + size)
            sums.add_rows(self.row[part], self.values[part].double(), weights[:, self.record[part]])

    def without(self, keep: Tensor) -> "Pairs":
        values = zero_outside(self.values, keep.to(self.record.device)[self.record])
        return Pairs(self.record, self.row, values, self.records, self.table_rows)


@dataclass(frozen=True)
class SparseOuter(TableGrad):
    """Gradients ``outer(a[i], g[i])`` where ``a[i]`` is a sparse vector over the rows of a table.

    A bag of embeddings has one gradient for all rows that it looked up: only how often it did so
    differs. So ``|a[i]| |g[i]|`` is the norm, and no gradient is copied per looked-up row.

    record, row, weight: the non-zero entries of ``a``, shape (M,); no (record, row) pair twice. g:
    shape (B, d).
    """

    record: Tensor
    row: Tensor
    weight: Tensor
    g: Tensor
    table_rows: int

    @classmethod
    def of(
        cls, record: Tensor, row: Tensor, weight: Tensor, g: Tensor, table_rows: int
    ) -> "SparseOuter":
        """From pairs of which some may be equal: their weights are added up."""
        pairs, place = torch.unique(record * table_rows + row, return_inverse=True)
        merged = torch.zeros(pairs.shape, dtype=torch.float64, device=g.device).index_add_(
            0, place, weight.double()
        )
        return cls(pairs // table_rows, pairs % table_rows, merged, g, table_rows)

    def squared_norms(self, groups: Groups, block: int = NORM_BLOCK) -> Tensor:
        left = row_squared_norms(self.g, block=block)
        right = torch.zeros_like(left).index_add_(0, self.record, self.weight.square())
        return product_of_squares(left, right)

    def longest(self) -> Tensor:
        return row_squared_norms(self.g)

    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        values = self.g[self.record] * self.weight[:, None].to(self.g.dtype)
        return self.record, self.row, values

    def looked_up(self) -> tuple[Tensor, Tensor]:
        return self.record, self.row

    def pairs(self) -> Pairs:
        """The same with the gradient of every looked-up row written out."""
        return Pairs(*self.columns(), len(self.g), self.table_rows)

    def materialise(self, records: slice) -> Tensor:
        return self.pairs().materialise(records)

    def add_weighted_sums(self, sums: Sums, weights: Tensor, groups: Groups) -> None:
        factors = self.weight * weights[:, self.record]
        size = max(1, BLOCK_ENTRIES // max(1, self.g.shape[1]))
        for start in range(0, len(self.record), size):
            part = slice(start, start + size)
            sums.add_rows(self.row[part], self.g[self.record[part]].double(), factors[:, part])

    def without(self, keep: Tensor) -> "SparseOuter":
        weight = zero_outside(self.weight, keep.to(self.record.device)[self.record])
        return SparseOuter(
            self.record, self.row, weight, zero_outside(self.g, keep), self.table_rows
        )
