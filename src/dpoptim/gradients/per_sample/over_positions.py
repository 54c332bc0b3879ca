"""Gradients that are sums over positions, of biases: formed together on accelerators."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic import positions_there
from dpoptim.gradients.arithmetic.norms import NORM_BLOCK
from dpoptim.gradients.arithmetic.position_sums import sum_positions
from dpoptim.gradients.arithmetic.products import Groups
from dpoptim.gradients.per_sample.per_sample_grads import Dense, PerSampleGrad, zero_outside


def over_positions(g: Tensor) -> PerSampleGrad:
    """Sums of ``g`` (B, T, n) over T."""
    return OverPositions(g) if positions_there.serves(g) else Dense(sum_positions(g))


@dataclass(frozen=True)
class OverPositions(PerSampleGrad):
    """Gradients ``sum_t g[i, t]`` of (B, T, n), formed when they are needed: see `side_by_side`."""

    g: Tensor

    @cached_property
    def formed(self) -> Dense:
        return Dense(sum_positions(self.g))

    def squared_norms(self, groups: Groups, block: int = NORM_BLOCK) -> Tensor:
        return self.formed.squared_norms(groups, block)

    def materialise(self, records: slice) -> Tensor:
        return self.formed.materialise(records)

    def add_weighted_sums(self, sums: Sums, weights: Tensor, groups: Groups) -> None:
        self.formed.add_weighted_sums(sums, weights, groups)

    def without(self, keep: Tensor) -> "OverPositions":
        return OverPositions(zero_outside(self.g, keep))


def side_by_side(several: Sequence[Dense | OverPositions]) -> Tensor:
    """All gradients of each record, one after the other: (B, the sum of their entries)."""
    lazy = [x for x in several if isinstance(x, OverPositions)]
    if len({x.g.dtype for x in lazy}) != 1:
        return torch.cat([x.materialise(slice(None)) for x in several], 1)
    widths = [x.g.shape[2] for x in lazy]
    formed = iter(positions_there.sums_of([x.g for x in lazy]).split(widths, 1))
    parts = [
        next(formed) if isinstance(x, OverPositions) else x.materialise(slice(None))
        for x in several
    ]
    return torch.cat(parts, 1)
