"""What one parameter's gradient is made of, record by record: norms first, then weighted sums.

Each class describes the per-record gradients of one parameter for the B records of a backward pass
and answers two questions: the squared norm of each record's gradient, and ``sum_i weights[j, i] *
gradient_i`` for each j (mostly one). Two rules keep this honest:

* a norm is measured on the very numbers that are summed. Formulas that get the norm another way
  (the Gram form ``sum_st (a_s . a_t)(g_s . g_t)``) round differently from the sum, and
  cancellation inside a record makes the difference as large as an adversary likes;
* which formula is used depends on the layer and on public numbers alone, never on how many
  records, or how long, share the batch: otherwise one record could change the clip factors of all
      the others.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from dpoptim.gradients.arithmetic import NARROW
from dpoptim.gradients.norms import NORM_BLOCK, row_squared_norms
from dpoptim.gradients.products import (
    GROUP_ROWS,
    Groups,
    Sums,
    add_weighted_outer,
    add_weighted_rows,
    slices,
)

MEMORY_CAP = 1 << 26  # elements that one temporary may hold (256 MiB in float32)
CACHE_BLOCK = 1 << 20  # elements of temporaries that are made and used at once: they stay in cache
# of a product that is not zero: longer ones would leave float32 when they are weighted
LONGEST_FACTOR = 2.0**60


class PerSampleGrad(Protocol):
    """The per-record gradients of one parameter in one backward pass."""

    def squared_norms(self, groups: Groups, block: int = NORM_BLOCK) -> Tensor:
        """Squared norm of each record's gradient: float64, shape (B,); not finite where a record
        does not count.

        Args:
            groups: as in `add_weighted_sums`. What is formed twice is formed in the same pieces
                both times.
            block: of `row_squared_norms`.
        """
        ...

    def materialise(self, records: slice) -> Tensor:
        """The gradients themselves, shape (records, number of entries), for oracles and mixed
        uses.
        """
        ...

    def add_weighted_sums(self, sums: Sums, weights: Tensor, groups: Groups) -> None:
        """Add ``sum_i weights[j, i] * gradient_i`` to the j-th of ``sums``, of as many entries as
        the parameter.

        Args:
            weights: float64, shape (k, B).
            groups: of records that one product may sum (see `products`).
        """
        ...

    def without(self, keep: Tensor) -> "PerSampleGrad":
        """The same with every number of the records outside ``keep`` (bool, shape (B,)) set to
        zero.
        """
        ...


class OneByOne(Protocol):
    """Gradients that can be formed for one record after the other."""

    def one_by_one(self) -> Callable[[int], Tensor]:
        """Returns what forms the gradient of one record: float32, (entries,), dense, from a
        64-byte boundary on.
        """
        ...

    def in_order(self, total: Tensor) -> Tensor:
        """A sum of such gradients, (k, entries), with the entries in the parameter's order."""
        ...


def blocks(records: int, elements_per_record: int) -> Iterator[slice]:
    """Cut ``records`` so that no block's temporary exceeds the memory cap (one record at
    least).
    """
    size = max(1, MEMORY_CAP // max(1, elements_per_record))
    for start in range(0, records, size):
        yield slice(start, min(start + size, records))


def zero_outside(x: Tensor, keep: Tensor) -> Tensor:
    """``x`` with the records outside ``keep`` replaced by zeros, whatever they held (0 * NaN would
    stay NaN).
    """
    return torch.where(
        keep.to(x.device).view(-1, *[1] * (x.dim() - 1)),
        x,
        torch.zeros((), dtype=x.dtype, device=x.device),
    )


@dataclass(frozen=True)
class Dense:
    """Gradients that are stored: ``values`` of shape (B, ...), any trailing shape; narrow ones as
    float32.
    """

    values: Tensor

    def __post_init__(self) -> None:
        if self.values.dtype in NARROW:
            object.__setattr__(self, "values", self.values.float())

    def squared_norms(self, groups: Groups, block: int = NORM_BLOCK) -> Tensor:
        return row_squared_norms(self.values, block=block)

    def materialise(self, records: slice) -> Tensor:
        values = self.values[records]
        return values[:, None] if values.dim() == 1 else values.flatten(1)

    def add_weighted_sums(self, sums: Sums, weights: Tensor, groups: Groups) -> None:
        add_weighted_rows(sums, self.materialise(slice(None)), weights, groups)

    def without(self, keep: Tensor) -> "Dense":
        return Dense(zero_outside(self.values, keep))


@dataclass
class Outer:
    """Gradients ``outer(g[i], a[i])``: g of shape (B, p), a of shape (B, d). Never formed: |g| |a|
    is their norm.
    """

    g: Tensor
    a: Tensor
    _left: Tensor | None = field(default=None, repr=False)
    _squared: Tensor | None = field(default=None, repr=False)

    def left_squared_norms(self, block: int = NORM_BLOCK) -> Tensor:
        """Squared norms of ``g``, measured once for a weight and its bias."""
        if self._left is None:
            self._left = row_squared_norms(self.g, block=block)
        return self._left

    def squared_norms(self, groups: Groups, block: int = NORM_BLOCK) -> Tensor:
        self._squared = product_of_squares(
            self.left_squared_norms(block), row_squared_norms(self.a, block=block)
        )
        return self._squared

    def longest(self) -> Tensor:
        """Squared norms of ``g``: beyond a length a norm is not finite, however short ``a`` is."""
        return self.left_squared_norms()

    def materialise(self, records: slice) -> Tensor:
        return (self.g[records, :, None] * self.a[records, None, :]).flatten(1)

    def add_weighted_sums(self, sums: Sums, weights: Tensor, groups: Groups) -> None:
        # a weight above 1 could carry the one factor to infinity beside zeros in the other
        if self._squared is not None:
            weights = torch.where(self._squared == 0, 0.0, weights)
        add_weighted_outer(sums, self.g, self.a, weights, groups)

    def without(self, keep: Tensor) -> "Outer":
        return Outer(zero_outside(self.g, keep), zero_outside(self.a, keep), _squared=self._squared)


def product_of_squares(left: Tensor, right: Tensor) -> Tensor:
    """Squared norms of products of vectors, from those of the two: infinite where one is too long,
    and none is zero.
    """
    too_long = torch.maximum(left, right) > LONGEST_FACTOR**2
    return torch.where(too_long & (left > 0) & (right > 0), torch.inf, left * right)


@dataclass(frozen=True)
class Bias:
    """Gradients ``g[i]`` of a bias whose weight has the gradients ``outer(g[i], a[i])``."""

    outer: Outer

    def squared_norms(self, groups: Groups, block: int = NORM_BLOCK) -> Tensor:
        return self.outer.left_squared_norms(block)

    def materialise(self, records: slice) -> Tensor:
        return self.outer.g[records]

    def add_weighted_sums(self, sums: Sums, weights: Tensor, groups: Groups) -> None:
        add_weighted_rows(sums, self.outer.g, weights, groups)

    def without(self, keep: Tensor) -> "Bias":
        return Bias(self.outer.without(keep))


@dataclass
class Lazy:
    """Gradients that are formed block by block by ``form``: kept if memory allows, else formed
    again for the sum.

    Either way the same numbers are measured and summed, because ``form`` computes each record by
    itself.

    Attributes:
        form: maps a slice of records, and ``most``, to their gradients, shape (b, entries).
        records, entries: B, and the parameter's size.
        per_record: elements of the largest temporary that ``form`` needs for one record beside its
            result.
        keep: records that count (bool, shape (B,)); None: all of them.
        most: records that a pass may have. Public, as it decides how they are formed, and whether
            they are kept for the sum, which rounds otherwise then.
        singly: what forms them for `record_by_record`, if anything does.
        alone: whether they are formed in that way, and not kept.
    """

    form: Callable[[slice, int], Tensor]
    records: int
    entries: int
    per_record: int
    keep: Tensor | None = None
    most: int = 1
    singly: OneByOne | None = None
    alone: bool = False
    _kept: Tensor | None = field(default=None, repr=False)

    def one_by_one(self) -> Callable[[int], Tensor]:
        assert self.singly is not None
        return self.singly.one_by_one()

    def in_order(self, total: Tensor) -> Tensor:
        assert self.singly is not None
        return self.singly.in_order(total)

    def materialise(self, records: slice) -> Tensor:
        values = self.form(records, self.most) if self._kept is None else self._kept[records]
        return values if self.keep is None else zero_outside(values, self.keep[records])

    def squared_norms(self, groups: Groups, block: int = NORM_BLOCK) -> Tensor:
        if kept(self.most, self.entries):
            for part in parts_of(slice(0, self.records), self.per_record):
                formed = self.form(part, self.most)
                if len(formed) == self.records:
                    self._kept = formed
                    break
                self._kept = (
                    formed.new_empty(self.records, self.entries)
                    if self._kept is None
                    else self._kept
                )
                self._kept[part] = formed
            assert self._kept is not None
            return row_squared_norms(self._kept, block=block)
        parts = chain.from_iterable(map(self._parts, all_groups(groups)))
        return torch.cat(
            [row_squared_norms(self.form(part, self.most), block=block) for part in parts]
        )

    def _parts(self, group: slice) -> Iterator[slice]:
        return parts_of(group, max(self.entries, self.per_record))

    def add_weighted_sums(self, sums: Sums, weights: Tensor, groups: Groups) -> None:
        if self._kept is not None:
            add_weighted_rows(sums, self.materialise(slice(0, self.records)), weights, groups)
            return
        for group in all_groups(groups):
            add_group(
                sums,
                group,
                self._parts(group),
                lambda part: (self.materialise(part), weights[:, part]),
            )

    def without(self, keep: Tensor) -> "Lazy":
        return replace(self, keep=keep)


def kept(most: int, entries: int) -> bool:
    """Whether memory allows to keep the gradients of a parameter for all records of a pass."""
    return most * entries <= MEMORY_CAP


def flat(x: Tensor) -> Tensor:
    """(B, p, d) as (B, p d), in place: the records' strides stay."""
    return x.as_strided((len(x), x.shape[1] * x.shape[2]), (x.stride(0), 1), x.storage_offset())


def all_groups(groups: Groups) -> Iterator[slice]:
    return chain.from_iterable(slices(groups))


def at_once(elements_per_record: int) -> int:
    """Records of a part, but for the last ones of a group."""
    return max(1, CACHE_BLOCK // max(1, elements_per_record))


def parts_of(group: slice, elements_per_record: int) -> Iterator[slice]:
    """Records of a group that are formed at once: what stays in cache, one at least."""
    size = at_once(elements_per_record)
    for start in range(group.start, group.stop, size):
        yield slice(start, min(start + size, group.stop))


def add_group(
    sums: Sums,
    group: slice,
    parts: Iterator[slice],
    formed: Callable[[slice], tuple[Tensor, Tensor]],
) -> None:
    """Add one group's weighted sums: see `sum_of_group`."""
    of_group = sum_of_group(group, parts, formed)
    if of_group is not None:
        sums.add(of_group)


def sum_of_group(
    group: slice, parts: Iterator[slice], formed: Callable[[slice], tuple[Tensor, Tensor]]
) -> Tensor | None:
    """One group's weighted sums, formed part by part: in float32 (see `products`), in float64 if
    it is too large.

    Args:
        formed: maps a slice of records to their gradients, shape (b, entries), and weights,
            float64 of shape (k, b).

    Returns:
        Shape (k, entries); None for a group of no records.
    """
    of_group: Tensor | None = None
    for part in parts:
        values, weights = formed(part)
        if group.stop - group.start > GROUP_ROWS:
            values = values.double()
        rows, factors = values.T, weights.to(values.dtype)
        first = of_group is None
        of_group = values.new_empty(len(weights), values.shape[1]) if of_group is None else of_group
        for each, out in zip(factors, of_group, strict=True):
            if first:
                torch.mv(rows, each, out=out)
            else:
                out.addmv_(rows, each)
    return of_group
