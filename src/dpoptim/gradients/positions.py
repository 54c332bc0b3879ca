"""Gradients that are sums over positions: of a sequence, of time steps. Formed, or their norms claimed first."""

from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from dpoptim.gradients.alike import LARGE, aligned_records, gram, large, matrices, record_products
from dpoptim.gradients.contributions import Outer, add_group, all_groups, at_once, flat, parts_of, zero_outside
from dpoptim.gradients.norms import row_squared_norms
from dpoptim.gradients.products import UNIT_ROUNDOFF, Groups, Sums, add_weighted_rows

CLAIM_BLOCK = LARGE  # positions; a public constant, so that no record's claim depends on how long the others are


@dataclass
class Positions:
    """Gradients ``sum_t outer(g[i, t], a[i, t])``: g of shape (B, T, p), a of shape (B, T, d).

    They are formed, and kept for the sum where `keeps` says so (by public numbers: see `Formed`). Where that is dear,
    `by_claims` gets by without: the norm that enters the clip factor is *claimed* by the Gram form
    ``sum_st (a_s . a_t)(g_s . g_t)``, which may err; then the gradients are formed to be summed, part by part, and whichever
    is longer than claimed is shortened to what was claimed. So the bound holds whatever the rounding of the claim.
    """

    g: Tensor
    a: Tensor
    claims: bool = False
    keeps: bool = True
    _kept: Tensor | None = field(default=None, repr=False)
    _claimed: Tensor | None = field(default=None, repr=False)
    _longest: Tensor | None = field(default=None, repr=False)

    def longest(self) -> Tensor | None:
        """Of claims: the squared norm of each record's longest ``g[i, t]``, since Gram products overflow with it."""
        return self._longest

    @property
    def entries(self) -> int:
        return self.g.shape[2] * self.a.shape[2]

    def by_claims(self) -> "Positions":
        return Positions(self.g, self.a, claims=True)

    def materialise(self, records: slice) -> Tensor:
        return self._form(records) if self._kept is None else self._kept[records]

    def _form(self, part: slice, out: Tensor | None = None) -> Tensor:
        room = None if out is None else self._as_matrices(out)
        return flat(record_products(self.g[part], self.a[part], room, together=at_once(self.entries)))

    def _as_matrices(self, out: Tensor) -> Tensor:
        return out.unflatten(1, (self.g.shape[2], self.a.shape[2]))

    def _room(self, records: int) -> Tensor:
        return flat(matrices(records, self.g.shape[2], self.a.shape[2], like=self.g))

    def squared_norms(self, groups: Groups) -> Tensor:
        if self.claims:
            self._claimed, self._longest = claimed_squared_norms(self.g, self.a)
            return self._claimed
        records = len(self.g)
        if self.keeps:
            self._kept = self._room(records)
        squared = []
        for part in chain.from_iterable(parts_of(group, self.entries) for group in all_groups(groups)):
            squared.append(row_squared_norms(self._form(part, None if self._kept is None else self._kept[part])))
        return squared[0] if len(squared) == 1 else torch.cat(squared)

    def add_weighted_sums(self, sums: Sums, weights: Tensor, groups: Groups) -> None:
        if self._kept is not None:
            add_weighted_rows(sums, self._kept, weights, groups)
            return
        scratch: Tensor | None = None

        def formed(part: slice) -> tuple[Tensor, Tensor]:
            nonlocal scratch
            if scratch is None or len(scratch) < part.stop - part.start:
                scratch = self._room(part.stop - part.start)
            values = self._form(part, scratch[: part.stop - part.start])
            if self._claimed is None:
                return values, weights[:, part]
            shortened = (self._claimed[part] / row_squared_norms(values)).sqrt().clamp(max=1.0)
            return values, weights[:, part] * shortened.nan_to_num(nan=0.0)  # nothing is to be shortened to nothing

        for group in all_groups(groups):
            add_group(sums, group, parts_of(group, self.entries), formed)

    def without(self, keep: Tensor) -> "Positions":
        kept = None if self._kept is None else zero_outside(self._kept, keep)
        claimed = None if self._claimed is None else zero_outside(self._claimed, keep)
        return Positions(zero_outside(self.g, keep), zero_outside(self.a, keep), self.claims, self.keeps, kept, claimed)


def claimed_squared_norms(g: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """What the Gram form says of ``|sum_t outer(g[i, t], a[i, t])|^2``, raised by about its rounding: float64, (B,).
    And the squared norm of the longest ``g[i, t]`` of each record, float64, (B,).

    The form is symmetric, so each block of positions meets only those up to its own end; what lies before counts twice.
    """
    records = len(g)
    whole = g.shape[1] % CLAIM_BLOCK == 0  # a claim, too, must not depend on the record's place
    g, a = (aligned_records(x, freely=whole and large(x.shape[1], x.shape[2])) for x in (g, a))
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
    claimed = squared.clamp_(min=0) + 4 * UNIT_ROUNDOFF[g.dtype] * lengths.square()
    return claimed[:records], longest[:records]


def positions(g: Tensor, a: Tensor, *, axis: bool) -> Outer | Positions:
    """Gradients ``sum_t outer(g[i, t], a[i, t])``: g of shape (B, T, p), a of shape (B, T, d).

    Args:
        axis: whether the layer's input has an axis of positions. That there is one position is no reason for `Outer`, which
            rounds otherwise: how many there are may depend on the longest record of the batch.
    """
    return Positions(g, a) if axis else Outer(g[:, 0], a[:, 0])
