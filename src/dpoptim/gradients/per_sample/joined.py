"""Small gradients of many parameters, formed, measured and added up as if they were one's.

Of biases, which are sums over positions, and of normalisations, for example.

A call takes longer than what it does with the gradients of a bias or of a normalisation, most of
all on accelerators, and models have a hundred of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic.norms import NORM_BLOCK, row_squared_norms
from dpoptim.gradients.arithmetic.position_sums import (
    served_together,
    sum_positions,
    sums_side_by_side,
)
from dpoptim.gradients.arithmetic.precision import computed_in
from dpoptim.gradients.arithmetic.products import Groups, add_weighted_rows
from dpoptim.gradients.per_sample.per_sample_grads import Dense, PerSampleGrad, zero_outside

SMALL = 1 << 16  # entries of a parameter
SMALL_HERE = 1 << 12  # the same on the CPU, where a copy takes longer than a call from there on


def over_positions(g: Tensor) -> PerSampleGrad:
    """Sums of ``g`` (B, T, n) over T."""
    return OverPositions(g) if served_together(g) else Dense(sum_positions(g))


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
    formed = iter(sums_side_by_side([x.g for x in lazy]).split(widths, 1))
    parts = [
        next(formed) if isinstance(x, OverPositions) else x.materialise(slice(None))
        for x in several
    ]
    return torch.cat(parts, 1)


class Joined:
    """Small gradients of several parameters, side by side.

    Args:
        several: by place, of as many records each, on one device.
        units: of each place.

    **Guarantee.** As of `Dense`: a record's numbers are copied, whoever else is in the batch.
    """

    def __init__(self, several: Mapping[int, Dense | OverPositions], units: Sequence[str]) -> None:
        self.places = [*several]
        by_unit: dict[str, list[int]] = {}
        for place in self.places:
            by_unit.setdefault(units[place], []).append(place)
        self._by_unit = {
            unit: (of_unit, side_by_side([several[place] for place in of_unit]))
            for unit, of_unit in by_unit.items()
        }

    @classmethod
    def among(cls, gradients: Mapping[int, PerSampleGrad], units: Sequence[str]) -> "Joined | None":
        """Those of a pass's gradients that are small, and of one kind; None: fewer than two.

        Decided by types, shapes, devices and dtypes, which are public.
        """
        small = {
            place: each
            for place, each in gradients.items()
            if isinstance(each, Dense | OverPositions) and is_small(each)
        }
        kinds = {kind_of(each) for each in small.values()}
        return cls(small, units) if len(small) > 1 and len(kinds) == 1 else None

    def measure(self, block: int) -> dict[str, Tensor]:
        """Squared norms of each unit's part of the records' gradients: see `row_squared_norms`."""
        return {
            unit: row_squared_norms(values, block=block)
            for unit, (_, values) in self._by_unit.items()
        }

    def longest(self) -> None:
        """None: stored gradients are measured as they are."""
        return None

    def add(self, weights: Mapping[str, Tensor], sums: Sequence[Sums], groups: Groups) -> None:
        """Add the weighted sums; records of weight zero need not be finite.

        Args:
            weights: of each unit, float64, (k, B).
        """
        for unit, (places, values) in self._by_unit.items():
            first, of_unit = sums[places[0]], weights[unit].to(values.device)
            counted = (of_unit != 0).any(0)[:, None]
            joined = Sums([values.shape[1]], values.device, first.directions)
            add_weighted_rows(joined, values.where(counted, 0.0), of_unit, groups)
            sizes = [sums[place].entries for place in places]
            taken = [each.split(sizes) for each in joined.take() if each is not None]
            for place, terms in zip(places, zip(*taken, strict=True), strict=False):
                sums[place].add(terms[0] if len(terms) == 1 else torch.cat(terms))


def is_small(each: Dense | OverPositions) -> bool:
    """Whether the gradients are few."""
    numbers = each.g if isinstance(each, OverPositions) else each.values
    entries = numbers.shape[2] if isinstance(each, OverPositions) else numbers[:1].numel()
    return numbers.dim() > 1 and entries <= (SMALL_HERE if numbers.is_cpu else SMALL)


def kind_of(each: Dense | OverPositions) -> tuple[torch.device, torch.dtype]:
    """Where the gradients lie, and in which dtype."""
    if isinstance(each, OverPositions):
        return each.g.device, computed_in(each.g.dtype)
    return each.values.device, each.values.dtype
