"""What one parameter's gradient is made of, record by record, without forming it: norms first, then one weighted sum.

Each class describes the per-record gradients of one parameter for the B records of a backward pass and answers two
questions: the squared norm of each record's gradient, and ``sum_i weights[i] * gradient_i``. The rule that keeps this
honest: *a norm is measured on the very numbers that are summed*, or else the record's mass (see `products`) is
reported along with it, so that cancellation inside a record cannot hide a large rounding error behind a small norm.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from dpoptim.gradients.products import (
    CANCELLATION_LIMIT,
    UNIT_ROUNDOFF,
    add_weighted_outer,
    row_squared_norms,
)

MEMORY_CAP = 1 << 26  # elements that one temporary may hold (256 MiB in float32)
LARGEST_ENTRY = 2.0**100  # rows longer than this count as not finite: their products would leave the float32 range


@dataclass(frozen=True)
class Norms:
    """Squared norms and squared masses of B records (float64, shape (B,)); not finite where a record does not count."""

    squared: Tensor
    mass_squared: Tensor


class Rounding(Protocol):
    """Says how many rows a product may sum, given how far its records may cancel (`products.chunk_rows`)."""

    def __call__(self, cancellation: float) -> int: ...


class Contribution(Protocol):
    """The per-record gradients of one parameter in one backward pass."""

    def norms(self) -> Norms: ...

    def materialise(self, records: slice) -> Tensor:
        """The gradients themselves, shape (records, number of entries), for oracles and mixed uses."""
        ...

    def add_weighted_sum(self, total: Tensor, weights: Tensor, rounding: Rounding) -> None:
        """Add ``sum_i weights[i] * gradient_i`` to ``total`` (float64, shape (number of entries,))."""
        ...

    def without(self, keep: Tensor) -> "Contribution":
        """The same with every number of the records outside ``keep`` (bool, shape (B,)) set to zero."""
        ...


def blocks(records: int, elements_per_record: int) -> Iterator[slice]:
    """Cut ``records`` so that no block's temporary exceeds the memory cap (one record at least)."""
    size = max(1, MEMORY_CAP // max(1, elements_per_record))
    for start in range(0, records, size):
        yield slice(start, min(start + size, records))


def zero_outside(x: Tensor, keep: Tensor) -> Tensor:
    """``x`` with the records outside ``keep`` replaced by zeros, whatever they held (0 * NaN would stay NaN)."""
    return torch.where(keep.view(-1, *[1] * (x.dim() - 1)), x, torch.zeros((), dtype=x.dtype, device=x.device))


@dataclass(frozen=True)
class Direct:
    """Gradients that are stored: ``values`` of shape (B, ...), any trailing shape."""

    values: Tensor

    def norms(self) -> Norms:
        squared = row_squared_norms(self.values)
        return Norms(squared, squared)

    def materialise(self, records: slice) -> Tensor:
        return self.values[records].flatten(1)

    def add_weighted_sum(self, total: Tensor, weights: Tensor, rounding: Rounding) -> None:
        values = self.values.flatten(1)
        ones = values.new_ones(values.shape[0], 1)
        add_weighted_outer(total.view(1, -1), ones, values, weights, rounding(1.0))

    def without(self, keep: Tensor) -> "Direct":
        return Direct(zero_outside(self.values, keep))


@dataclass
class Outer:
    """Gradients ``sum_t outer(g[i, t], a[i, t])``: g of shape (B, T, p); a of shape (B, T, d) once expanded.

    ``expand`` turns a block of ``a`` into shape (b, T, d) where that is larger than what was saved (convolutions).
    """

    g: Tensor
    a: Tensor
    features: int  # d
    expand: Callable[[Tensor], Tensor] | None = None
    _stored: Tensor | None = field(default=None, repr=False)

    def _right(self, records: slice) -> Tensor:
        return self.a[records] if self.expand is None else self.expand(self.a[records])

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        return self.g.shape[0], self.g.shape[1], self.g.shape[2], self.features

    def norms(self) -> Norms:
        B, T, p, d = self._shape
        if T == 1:
            left, right = row_squared_norms(self.g), row_squared_norms(self._right(slice(None)))
            squared = left * right
            squared[(left > LARGEST_ENTRY**2) | (right > LARGEST_ENTRY**2)] = torch.inf
            return Norms(squared, squared)
        if p * d <= T * (d + p) and B * p * d <= MEMORY_CAP:
            # Stored and summed as stored: the arithmetic of an ordinary weight gradient, and exact norms.
            self._stored = torch.cat([self.materialise(part) for part in blocks(B, T * d)])
            squared = row_squared_norms(self._stored)
            return Norms(squared, squared)
        return self._norms_with_mass()

    def _norms_with_mass(self) -> Norms:
        """Norms by the cheaper of the Gram form and the materialised one; bounds from above, and masses."""
        B, T, p, d = self._shape
        gram = T * (d + p) < p * d
        squared, mass = [], []
        for part in blocks(B, max(2 * T * T if gram else p * d, T * d)):
            g, a = self.g[part], self._right(part)
            left, right = row_squared_norms(g), row_squared_norms(a)
            mass_squared = left * right  # (sum_t |g_t| |a_t|)^2 is at most this (Cauchy-Schwarz)
            mass_squared[(left > LARGEST_ENTRY**2) | (right > LARGEST_ENTRY**2)] = torch.inf
            if gram:
                form = torch.bmm(a, a.transpose(1, 2)) * torch.bmm(g, g.transpose(1, 2))
                value = form.sum((1, 2), dtype=torch.float64)
                # Roundings in each of the T^2 terms, which sum to at most the squared mass, and of their sum.
                slack = d + p + 4 + (T * T if g.dtype == torch.float64 else 1)
            else:
                value = row_squared_norms(torch.bmm(g.transpose(1, 2), a))
                slack = 4 * (T + 2)  # with h = (T + 2) u: |G^ - G| <= h A, so N^2 <= N^^2 + 2 h (1 + h) A^2 + h^2 A^2
            squared.append(value.clamp_min(0) + slack * UNIT_ROUNDOFF[g.dtype] * mass_squared)
            mass.append(mass_squared)
        return Norms(torch.cat(squared), torch.cat(mass))

    def materialise(self, records: slice) -> Tensor:
        return torch.bmm(self.g[records].transpose(1, 2), self._right(records)).flatten(1)

    def add_weighted_sum(self, total: Tensor, weights: Tensor, rounding: Rounding) -> None:
        B, T, p, d = self._shape
        if self._stored is not None:
            Direct(self._stored).add_weighted_sum(total, weights, rounding)
            return
        rows_per_product = rounding(1.0 if T == 1 else CANCELLATION_LIMIT)
        for part in blocks(B, T * d):
            left, right = self.g[part].reshape(-1, p), self._right(part).reshape(-1, d)
            row_weights = weights[part].repeat_interleave(T)
            add_weighted_outer(total.view(p, d), left, right, row_weights, rows_per_product)

    def without(self, keep: Tensor) -> "Outer":
        stored = None if self._stored is None else zero_outside(self._stored, keep)
        return Outer(zero_outside(self.g, keep), zero_outside(self.a, keep), self.features, self.expand, stored)


@dataclass
class Rows:
    """Gradients that touch few rows of a table: row ``index[i, t]`` receives ``g[i, t]``.

    index: integers, shape (B, T); g: shape (B, T, d). Equal indices of a record are merged first, so that norms and
    sums cost O(records x distinct rows), never B x table.
    """

    index: Tensor
    g: Tensor
    table_rows: int
    _merged: tuple[Tensor, Tensor, Tensor] | None = field(default=None, repr=False)

    def _merge(self) -> tuple[Tensor, Tensor, Tensor]:
        """(record, table row, gradient) of each distinct pair: shapes (M,), (M,), (M, d)."""
        if self._merged is None:
            B, T = self.index.shape
            record = torch.arange(B, device=self.index.device).repeat_interleave(T)
            pairs, place = torch.unique(record * self.table_rows + self.index.reshape(-1), return_inverse=True)
            merged = self.g.new_zeros(pairs.shape[0], self.g.shape[2])
            merged.index_add_(0, place, self.g.reshape(B * T, -1))
            self._merged = (pairs // self.table_rows, pairs % self.table_rows, merged)
        return self._merged

    def norms(self) -> Norms:
        record, _, merged = self._merge()
        squared = merged.new_zeros(self.index.shape[0], dtype=torch.float64)
        squared.index_add_(0, record, row_squared_norms(merged))
        return Norms(squared, squared)

    def materialise(self, records: slice) -> Tensor:
        index, g = self.index[records], self.g[records]
        dense = g.new_zeros(g.shape[0], self.table_rows, g.shape[2])
        dense.scatter_add_(1, index[:, :, None].expand_as(g), g)
        return dense.flatten(1)

    def add_weighted_sum(self, total: Tensor, weights: Tensor, rounding: Rounding) -> None:
        record, row, merged = self._merge()
        table = total.view(self.table_rows, -1)
        for part in blocks(record.shape[0], 2 * merged.shape[1]):  # in float64: there is nothing to save in float32
            table.index_add_(0, row[part], merged[part].double() * weights[record[part], None])

    def without(self, keep: Tensor) -> "Rows":
        return Rows(self.index, zero_outside(self.g, keep), self.table_rows)


@dataclass(frozen=True)
class Mixed:
    """Several uses of one parameter in layers of different kinds (tied weights): gradients added record by record."""

    parts: Sequence[Contribution]
    records: int
    entries: int

    def _block(self, records: slice) -> Tensor:
        first, *others = (part.materialise(records) for part in self.parts)
        total = first.clone()
        for other in others:
            total += other
        return total

    def norms(self) -> Norms:
        parts = [row_squared_norms(self._block(part)) for part in blocks(self.records, self.entries)]
        squared = torch.cat(parts)
        return Norms(squared, squared)

    def materialise(self, records: slice) -> Tensor:
        return self._block(records)

    def add_weighted_sum(self, total: Tensor, weights: Tensor, rounding: Rounding) -> None:
        for part in blocks(self.records, self.entries):  # the same blocks as for the norms: the same numbers
            Direct(self._block(part)).add_weighted_sum(total, weights[part], rounding)

    def without(self, keep: Tensor) -> "Mixed":
        return Mixed([part.without(keep) for part in self.parts], self.records, self.entries)


def merge(uses: Sequence[Contribution], records: int, entries: int) -> Contribution:
    """One contribution for all uses of a parameter in a pass, cross terms included."""
    if len(uses) == 1:
        return uses[0]
    if all(isinstance(use, Direct) for use in uses):
        return Direct(torch.stack([use.materialise(slice(None)) for use in uses]).sum(0))
    if all(isinstance(use, Outer) and use.expand is None for use in uses):
        outers = [use for use in uses if isinstance(use, Outer)]
        g, a = torch.cat([use.g for use in outers], 1), torch.cat([use.a for use in outers], 1)
        return Outer(g, a, outers[0].features)
    if all(isinstance(use, Rows) for use in uses):
        rows = [use for use in uses if isinstance(use, Rows)]
        return Rows(
            torch.cat([use.index for use in rows], 1),
            torch.cat([use.g for use in rows], 1),
            rows[0].table_rows,
        )
    return Mixed(list(uses), records, entries)
