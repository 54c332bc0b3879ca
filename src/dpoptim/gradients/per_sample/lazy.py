"""Gradients that a layer's rule forms when they are needed: of convolutions, for one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic.norms import NORM_BLOCK, row_squared_norms
from dpoptim.gradients.arithmetic.products import Groups, add_weighted_rows
from dpoptim.gradients.choose_formula import PublicSizes, may_keep
from dpoptim.gradients.per_sample.fused_factors import FusedLayer
from dpoptim.gradients.per_sample.parts import CACHE_BLOCK, add_group, all_groups, parts_of
from dpoptim.gradients.per_sample.per_sample_grads import OneByOne, PerSampleGrad, zero_outside


@dataclass
class Lazy(PerSampleGrad):
    """Gradients formed block by block by ``form``: kept if memory allows, else formed again.

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
        at_once: elements that are best formed at once; see `most_at_once`.
        at_any_size: whether that is the faster way for small gradients, too.
        alone: whether they are formed in that way, and not kept.
        there: how accelerators form them, from public sizes, if `fused_outer` serves.
        fused: that, once it is chosen.
    """

    form: Callable[[slice, int], Tensor]
    records: int
    entries: int
    per_record: int
    keep: Tensor | None = None
    most: int = 1
    singly: OneByOne | None = None
    at_once: int = CACHE_BLOCK
    at_any_size: bool = False
    alone: bool = False
    there: Callable[[PublicSizes], FusedLayer] | None = None
    fused: FusedLayer | None = None
    _kept: Tensor | None = field(default=None, repr=False)

    def chosen(self, public: PublicSizes) -> "Lazy":
        worth = public.whole_fits if self.at_any_size else public.large_kernel(self.entries)
        fused = None if self.there is None else self.there(public)
        alone = self.singly is not None and worth
        return replace(self, most=public.most, alone=alone, fused=fused)

    def in_turn(self) -> OneByOne | None:
        return self.singly if self.alone else None

    def fused_layer(self) -> FusedLayer | None:
        return self.fused

    def materialise(self, records: slice) -> Tensor:
        values = self.form(records, self.most) if self._kept is None else self._kept[records]
        return values if self.keep is None else zero_outside(values, self.keep[records])

    def squared_norms(self, groups: Groups, block: int = NORM_BLOCK) -> Tensor:
        if may_keep(self.most, self.entries):
            for part in parts_of(slice(0, self.records), self.per_record, self.at_once):
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
        return parts_of(group, max(self.entries, self.per_record), self.at_once)

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
        return replace(self, keep=keep, there=None, fused=None)
