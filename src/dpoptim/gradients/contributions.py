"""What one parameter's gradient is made of, record by record: norms first, then one weighted sum.

Each class describes the per-record gradients of one parameter for the B records of a backward pass and answers two
questions: the squared norm of each record's gradient, and ``sum_i weights[i] * gradient_i``. Two rules keep this honest:

* a norm is measured on the very numbers that are summed. Formulas that get the norm another way (the Gram form
  ``sum_st (a_s . a_t)(g_s . g_t)``) round differently from the sum, and cancellation inside a record makes the
  difference as large as an adversary likes;
* which formula is used depends on the layer and on public numbers alone, never on how many records, or how long, share
  the batch: otherwise one record could change the clip factors of all the others.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from dpoptim.gradients.products import (
    GROUP_ROWS,
    UNIT_ROUNDOFF,
    Groups,
    Sum,
    add_weighted_outer,
    add_weighted_rows,
    aligned_records,
    matrices,
    record_products,
    row_squared_norms,
    slices,
)

MEMORY_CAP = 1 << 26  # elements that one temporary may hold (256 MiB in float32)
CACHE_BLOCK = 1 << 20  # elements of temporaries that are made and used at once: they stay in cache
CLAIM_BLOCK = 64  # positions; a public constant, so that no record's claim depends on how long the others are
LARGEST_ENTRY = 2.0**100  # rows longer than this count as not finite: their products would leave the float32 range


class Contribution(Protocol):
    """The per-record gradients of one parameter in one backward pass."""

    def squared_norms(self, groups: Groups) -> Tensor:
        """Squared norm of each record's gradient: float64, shape (B,); not finite where a record does not count.

        Where it is a product, the contribution has a `longest`: the squared lengths of the factors on the gradient's side.

        Args:
            groups: as in `add_weighted_sum`. What is formed twice is formed in the same pieces both times.
        """
        ...

    def materialise(self, records: slice) -> Tensor:
        """The gradients themselves, shape (records, number of entries), for oracles and mixed uses."""
        ...

    def add_weighted_sum(self, total: Sum, weights: Tensor, groups: Groups) -> None:
        """Add ``sum_i weights[i] * gradient_i`` to ``total``, of as many entries as the parameter.

        Args:
            weights: float64, shape (B,).
            groups: of records that one product may sum (see `products`).
        """
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

    def squared_norms(self, groups: Groups) -> Tensor:
        return row_squared_norms(self.values)

    def materialise(self, records: slice) -> Tensor:
        return self.values[records].flatten(1)

    def add_weighted_sum(self, total: Sum, weights: Tensor, groups: Groups) -> None:
        add_weighted_rows(total, self.values.flatten(1), weights, groups)

    def without(self, keep: Tensor) -> "Direct":
        return Direct(zero_outside(self.values, keep))


@dataclass
class Outer:
    """Gradients ``outer(g[i], a[i])``: g of shape (B, p), a of shape (B, d). Never formed: |g| |a| is their norm."""

    g: Tensor
    a: Tensor
    _left: Tensor | None = field(default=None, repr=False)

    def left_squared_norms(self) -> Tensor:
        """Squared norms of ``g``, measured once for a weight and its bias."""
        if self._left is None:
            self._left = row_squared_norms(self.g)
        return self._left

    def squared_norms(self, groups: Groups) -> Tensor:
        left, right = self.left_squared_norms(), row_squared_norms(self.a)
        if self.g.dtype == torch.float32:
            return left * right  # each factor is infinite beyond 1e19, where the products would leave the float32 range
        squared = left * right
        squared[(left > LARGEST_ENTRY**2) | (right > LARGEST_ENTRY**2)] = torch.inf
        return squared

    def longest(self) -> Tensor:
        """Squared norms of ``g``: beyond float32's range of squares a norm is not finite, however short ``a`` is."""
        return self.left_squared_norms()

    def materialise(self, records: slice) -> Tensor:
        return (self.g[records, :, None] * self.a[records, None, :]).flatten(1)

    def add_weighted_sum(self, total: Sum, weights: Tensor, groups: Groups) -> None:
        add_weighted_outer(total, self.g, self.a, weights, groups)

    def without(self, keep: Tensor) -> "Outer":
        return Outer(zero_outside(self.g, keep), zero_outside(self.a, keep))


@dataclass(frozen=True)
class Left:
    """Gradients ``g[i]`` of a bias whose weight has the gradients ``outer(g[i], a[i])``."""

    outer: Outer

    def squared_norms(self, groups: Groups) -> Tensor:
        return self.outer.left_squared_norms()

    def materialise(self, records: slice) -> Tensor:
        return self.outer.g[records]

    def add_weighted_sum(self, total: Sum, weights: Tensor, groups: Groups) -> None:
        add_weighted_rows(total, self.outer.g, weights, groups)

    def without(self, keep: Tensor) -> "Left":
        return Left(self.outer.without(keep))


@dataclass
class Formed:
    """Gradients that are formed block by block by ``form``: kept if memory allows, else formed again for the sum.

    Either way the same numbers are measured and summed, because ``form`` computes each record by itself.

    Attributes:
        form: maps a slice of records to their gradients, shape (b, entries).
        records, entries: B, and the parameter's size.
        per_record: elements of the largest temporary that ``form`` needs for one record beside its result.
        keep: records that count (bool, shape (B,)); None: all of them.
    """

    form: Callable[[slice], Tensor]
    records: int
    entries: int
    per_record: int
    keep: Tensor | None = None
    _kept: Tensor | None = field(default=None, repr=False)

    def materialise(self, records: slice) -> Tensor:
        values = self.form(records) if self._kept is None else self._kept[records]
        return values if self.keep is None else zero_outside(values, self.keep[records])

    def squared_norms(self, groups: Groups) -> Tensor:
        if self.records * self.entries <= MEMORY_CAP:
            kept = [self.form(part) for part in parts_of(slice(0, self.records), self.per_record)]
            self._kept = kept[0] if len(kept) == 1 else torch.cat(kept)
            return row_squared_norms(self._kept)
        parts = chain.from_iterable(map(self._parts, all_groups(groups)))
        return torch.cat([row_squared_norms(self.form(part)) for part in parts])

    def _parts(self, group: slice) -> Iterator[slice]:
        return parts_of(group, max(self.entries, self.per_record))

    def add_weighted_sum(self, total: Sum, weights: Tensor, groups: Groups) -> None:
        if self._kept is not None:
            add_weighted_rows(total, self.materialise(slice(0, self.records)), weights, groups)
            return
        for group in all_groups(groups):
            add_group(total, group, self._parts(group), lambda part: (self.materialise(part), weights[part]))

    def without(self, keep: Tensor) -> "Formed":
        return Formed(self.form, self.records, self.entries, self.per_record, keep, self._kept)


@dataclass
class Positions:
    """Gradients ``sum_t outer(g[i, t], a[i, t])``: g of shape (B, T, p), a of shape (B, T, d).

    They are formed and kept if memory allows. Where that is dear, `by_claims` gets by without: the norm that enters the
    clip factor is *claimed* by the Gram form ``sum_st (a_s . a_t)(g_s . g_t)``, which may err; then the gradients are
    formed to be summed, part by part, and whichever is longer than claimed is shortened to what was claimed. So the
    bound holds whatever the rounding of the claim.
    """

    g: Tensor
    a: Tensor
    claims: bool = False
    _kept: Tensor | None = field(default=None, repr=False)
    _claimed: Tensor | None = field(default=None, repr=False)
    _longest: Tensor | None = field(default=None, repr=False)

    @property
    def entries(self) -> int:
        return self.g.shape[2] * self.a.shape[2]

    def by_claims(self) -> "Positions":
        return Positions(self.g, self.a, claims=True)

    def materialise(self, records: slice) -> Tensor:
        return self._form(records) if self._kept is None else self._kept[records]

    def _form(self, part: slice, out: Tensor | None = None) -> Tensor:
        return flat(record_products(self.g[part], self.a[part], None if out is None else self._as_matrices(out)))

    def _as_matrices(self, out: Tensor) -> Tensor:
        return out.unflatten(1, (self.g.shape[2], self.a.shape[2]))

    def _room(self, records: int) -> Tensor:
        return flat(matrices(records, self.g.shape[2], self.a.shape[2], like=self.g))

    def longest(self) -> Tensor | None:
        """Of claims: the squared norm of each record's longest ``g[i, t]``, since Gram products overflow with it."""
        return self._longest

    def squared_norms(self, groups: Groups) -> Tensor:
        if self.claims:
            self._claimed, self._longest = claimed_squared_norms(self.g, self.a)
            return self._claimed
        records = len(self.g)
        if records * self.entries <= MEMORY_CAP:
            self._kept = self._room(records)
        squared = []
        for part in chain.from_iterable(parts_of(group, self.entries) for group in all_groups(groups)):
            squared.append(row_squared_norms(self._form(part, None if self._kept is None else self._kept[part])))
        return squared[0] if len(squared) == 1 else torch.cat(squared)

    def add_weighted_sum(self, total: Sum, weights: Tensor, groups: Groups) -> None:
        if self._kept is not None:
            add_weighted_rows(total, self._kept, weights, groups)
            return
        scratch: Tensor | None = None

        def formed(part: slice) -> tuple[Tensor, Tensor]:
            nonlocal scratch
            if scratch is None or len(scratch) < part.stop - part.start:
                scratch = self._room(part.stop - part.start)
            values = self._form(part, scratch[: part.stop - part.start])
            if self._claimed is None:
                return values, weights[part]
            shortened = (self._claimed[part] / row_squared_norms(values)).sqrt().clamp(max=1.0)
            return values, weights[part] * shortened.nan_to_num(nan=0.0)  # nothing is to be shortened to nothing

        for group in all_groups(groups):
            add_group(total, group, parts_of(group, self.entries), formed)

    def without(self, keep: Tensor) -> "Positions":
        kept = None if self._kept is None else zero_outside(self._kept, keep)
        claimed = None if self._claimed is None else zero_outside(self._claimed, keep)
        return Positions(zero_outside(self.g, keep), zero_outside(self.a, keep), self.claims, kept, claimed)


def flat(x: Tensor) -> Tensor:
    """(B, p, d) as (B, p d), in place: the records' strides stay."""
    return x.as_strided((len(x), x.shape[1] * x.shape[2]), (x.stride(0), 1), x.storage_offset())


def claimed_squared_norms(g: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """What the Gram form says of ``|sum_t outer(g[i, t], a[i, t])|^2``, raised by about its rounding: float64, (B,).
    And the squared norm of the longest ``g[i, t]`` of each record, float64, (B,).

    The form is symmetric, so each block of positions meets only those up to its own end; what lies before counts twice.
    """
    g, a = aligned_records(g), aligned_records(a)  # a claim, too, must not depend on the record's place
    squared = lengths = longest = torch.zeros(len(g), dtype=torch.float64, device=g.device)
    for start in range(0, g.shape[1], CLAIM_BLOCK):
        block, upto = slice(start, start + CLAIM_BLOCK), slice(0, start + CLAIM_BLOCK)
        left, right = (gram(x[:, block], x[:, upto]) for x in (g, a))
        squares = left[:, :, start:].diagonal(dim1=1, dim2=2)
        longest = torch.maximum(longest, squares.amax(1).double())
        own = squares * right[:, :, start:].diagonal(dim1=1, dim2=2)
        lengths = lengths + own.sqrt().sum(1, dtype=torch.float64)
        products = left.mul_(right)
        both = products.sum((1, 2)).double()
        squared = squared + (both if start == 0 else 2 * both - products[:, :, start:].sum((1, 2)).double())
    return squared.clamp_(min=0) + 4 * UNIT_ROUNDOFF[g.dtype] * lengths.square(), longest


def gram(x: Tensor, y: Tensor) -> Tensor:
    """``x[i] @ y[i].T`` of records that lie alike in memory: (B, s, d), (B, t, d) -> (B, s, t), which lies so too."""
    return torch.bmm(x, y.transpose(1, 2), out=matrices(len(x), x.shape[1], y.shape[1], like=x))


def positions(g: Tensor, a: Tensor) -> Outer | Positions:
    """Gradients ``sum_t outer(g[i, t], a[i, t])``: g of shape (B, T, p), a of shape (B, T, d)."""
    return Outer(g[:, 0], a[:, 0]) if g.shape[1] == 1 else Positions(g, a)


def all_groups(groups: Groups) -> Iterator[slice]:
    return chain.from_iterable(slices(groups))


def parts_of(group: slice, elements_per_record: int) -> Iterator[slice]:
    """Records of a group that are formed at once: what stays in cache, one at least."""
    size = max(1, CACHE_BLOCK // max(1, elements_per_record))
    for start in range(group.start, group.stop, size):
        yield slice(start, min(start + size, group.stop))


def add_group(total: Sum, group: slice, parts: Iterator[slice], formed: Callable[[slice], tuple[Tensor, Tensor]]) -> None:
    """Add one group's weighted sum, formed part by part: one float32 sum (see `products`), float64 if it is too large.

    Args:
        formed: maps a slice of records to their gradients, shape (b, entries), and weights, float64 of shape (b,).
    """
    sum_of_group: Tensor | None = None
    for part in parts:
        values, weights = formed(part)
        if group.stop - group.start > GROUP_ROWS:
            values = values.double()
        rows, factors = values.T, weights.to(values.dtype)
        sum_of_group = torch.mv(rows, factors) if sum_of_group is None else sum_of_group.addmv_(rows, factors)
    if sum_of_group is not None:
        total.add(sum_of_group)


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

    def squared_norms(self, groups: Groups) -> Tensor:
        record, _, merged = self._merge()
        squared = merged.new_zeros(self.index.shape[0], dtype=torch.float64)
        return squared.index_add_(0, record, row_squared_norms(merged))

    def materialise(self, records: slice) -> Tensor:
        index, g = self.index[records], self.g[records]
        dense = g.new_zeros(g.shape[0], self.table_rows, g.shape[2])
        dense.scatter_add_(1, index[:, :, None].expand_as(g), g)
        return dense.flatten(1)

    def add_weighted_sum(self, total: Sum, weights: Tensor, groups: Groups) -> None:
        record, row, merged = self._merge()
        table = total.settle().view(self.table_rows, -1)
        for part in blocks(record.shape[0], 2 * merged.shape[1]):  # in float64: there is nothing to save in float32
            table.index_add_(0, row[part], merged[part].double() * weights[record[part], None])

    def without(self, keep: Tensor) -> "Rows":
        return Rows(self.index, zero_outside(self.g, keep), self.table_rows)
