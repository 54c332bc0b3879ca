"""Sums of outer products on accelerators: measured, and added up, for many layers in few calls.

A GPU forms gradients faster than its memory takes them, where records are short: those of 64
records of a ViT-B are 22 GB. And a call takes longer than what it does for a small layer. So
Triton kernels (`outer_kernels`) form tiles of records' gradients, of many layers at once, in one of
three ways:

* *kept*: of long records, whose gradients take about the memory of what they are made of. They
  are written once, and measured meanwhile; when the clip factors are known, they are read and
  added.
* *claimed*: of short ones, whose norms come from Gram products. Then a tile is formed in
  registers, measured, added, weighted, to that of the record before, and forgotten; records that
  turn out longer than claimed are shortened to it, and added once more.
* *twice*: of all others. A first pass measures tiles and forgets them; a second forms them again,
  the same instructions on the same numbers, and adds them.

**Guarantee.** As of `products`: what is measured of a record is what is added of it, to the last
bit, and a function of its own rows, whoever else is in the batch. A sum over a group is one of
float32, in an order that is fixed by the layers' shapes and the group's size. Squares are added up
in float32 along a row of a tile, of 128 numbers at most, which loses less than 128 roundings of
2^-24, and what is less than 2^-126 of each square; the rest in float64. `MEASURED_ABOVE` and
`LEAST_SQUARE` make up for both. Entries beyond 2^63 count as not finite.
(tests/gradients/test_fused_outer.py tries to falsify it, in Triton's interpreter and on a GPU where
there is one: compilers and processors are the vendor's.)
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic.norms import NORM_BLOCK
from dpoptim.gradients.arithmetic.precision import NARROW
from dpoptim.gradients.arithmetic.products import GROUP_ROWS, Groups
from dpoptim.gradients.arithmetic.triton_calls import KINDS, firsts, tried_on
from dpoptim.gradients.choose_formula import MEMORY_CAP
from dpoptim.gradients.per_sample.fused_calls import ADD, BOTH, MEASURE, Calls
from dpoptim.gradients.per_sample.fused_factors import (
    WIDE,
    Factors,
    FusedLayer,
    Lookups,
    Way,
)
from dpoptim.gradients.per_sample.parts import all_groups, parts_of
from dpoptim.gradients.per_sample.per_sample_grads import PerSampleGrad

MEASURED_ABOVE, LEAST_SQUARE = 2.0**-16, 2.0**-126  # as in `gram_kernels`
MEASURED, ADDED = 0.25, 1.5  # what a program takes to begin or to write, in records
ROOM = 64  # numbers; each layer's sum begins on a multiple of them
KEPT_AT_ONCE = 4 * MEMORY_CAP  # entries of all records' gradients: 1 GiB
ADDED_AT_ONCE = MEMORY_CAP  # entries of sums
FORMED_AT_ONCE = MEMORY_CAP  # numbers of factors that are only made for them


class FusedOuter:
    """Gradients of several layers that are measured and added up together.

    Args:
        layers: by place, that are measured in one way; see `Calls`.
        units: of each place.
    """

    def __init__(self, layers: Mapping[int, FusedLayer], units: Sequence[str]) -> None:
        self.places, self._layers = [*layers], [*layers.values()]
        self.way = self._layers[0].way
        self._units = [units[place] for place in layers]
        self._entries = [each.sizes.entries for each in self._layers]
        self._owners = owners_of(tuple(each.sizes.tiles(self.way) for each in self._layers))
        self._kept: list[Tensor] = []
        self._claims: Tensor | None = None

    def measure(self, block: int) -> dict[str, Tensor]:
        """Squared norms of each unit's part of the records' gradients: float64, (B,); not low."""
        layers, self._layers = self._layers, []  # which have what gradients are made of
        self._calls = calls = Calls([each.form() for each in layers], self.way)
        del layers
        if self.way == "claimed":
            # so that gradients of zero are not taken to be longer than that
            self._claims = calls.claim().add_(LEAST_SQUARE * max(self._entries))
            return self._by_unit(self._claims.T, range(len(self._entries)))
        if self.way == "kept":
            self._kept = [calls.empty(calls.records, entries) for entries in self._entries]
            squares = calls.form(self._kept)
            calls.forget()
        else:
            squares, share = calls.squares(), calls.share(calls.records, MEASURED)
            calls.run(MEASURE, slice(0, calls.records), share, squares=squares)
        found = self._by_unit(squares, self._owners)
        return {
            unit: each.mul_(1 + MEASURED_ABOVE).add_(LEAST_SQUARE * self._entries_of(unit))
            for unit, each in found.items()
        }

    def longest(self) -> None:
        """None: gradients are measured as they are, or claimed to be no shorter."""
        return None

    def add(self, weights: Mapping[str, Tensor], sums: Sequence[Sums], groups: Groups) -> None:
        """Add the weighted sums; records of weight zero need not be finite.

        Args:
            weights: of each unit, float64, (k, B).
            sums: of all parameters, by place.
        """
        device = sums[self.places[0]].device
        units = dict.fromkeys(self._units)
        of_units = {unit: weights[unit].to(device) for unit in units}
        each = units if len(units) == 1 else self._units
        of_layers = torch.stack([of_units[unit] for unit in each])  # (layers or 1, k, B)
        for group in all_groups(groups):
            exact = group.stop - group.start > GROUP_ROWS
            ways = [of_layers[:, way].contiguous() for way in range(of_layers.shape[1])]
            terms = [self._sums(way, group, exact=exact) for way in ways]
            for place, found in zip(self.places, zip(*terms, strict=True), strict=True):
                sums[place].add(found[0] if len(found) == 1 else torch.cat(found))

    def _entries_of(self, unit: str) -> int:
        each = zip(self._units, self._entries, strict=True)
        return sum(entries for own, entries in each if own == unit)

    def _by_unit(self, squares: Tensor, of: Sequence[int]) -> dict[str, Tensor]:
        """Sums of the columns of (B, n) that belong to each unit's layers."""
        units = dict.fromkeys(self._units)
        if len(units) == 1:
            return {unit: squares.sum(1) for unit in units}
        columns: dict[str, list[int]] = {unit: [] for unit in units}
        for column, layer in enumerate(of):
            columns[self._units[layer]].append(column)
        return {unit: squares[:, each].sum(1) for unit, each in columns.items()}

    def _sums(self, weights: Tensor, group: slice, *, exact: bool) -> list[Tensor]:
        """``sum_i weights[layer, i] * gradient_i`` of each layer over a group: (p d,).

        Args:
            weights: (layers or 1, B).
            exact: in float64, of any number of records; else in float32.
        """
        calls, end = self._calls, self._starts()[-1]
        if self.way == "kept":
            dtype = torch.float64 if exact else torch.float32
            sums = [calls.empty(entries, dtype=dtype) for entries in self._entries]
            calls.add_kept(self._kept, sums, weights, group)
            return sums
        if not exact:
            terms = self._terms(weights, group, calls.share(group.stop - group.start, ADDED))
            return self._split(terms[0] if len(terms) == 1 else terms.sum(0))
        total = calls.empty(end, dtype=torch.float64).zero_()
        for part in parts_of(group, end, MEMORY_CAP):
            total += self._terms(weights, part, 1).sum(0, dtype=torch.float64)
        return self._split(total)

    def _terms(self, weights: Tensor, group: slice, share: int) -> Tensor:
        """The sums of so many records each: float32, (shares, numbers)."""
        calls, *starts, end = self._calls, *self._starts()
        terms = calls.empty(-(-(group.stop - group.start) // share), end)
        if not terms.numel():
            return terms
        if self._claims is None:
            calls.run(ADD, group, share, weights=weights, out=terms, starts=starts)
            return terms
        squares = calls.squares()
        calls.run(BOTH, group, share, squares=squares, weights=weights, out=terms, starts=starts)
        shorter, wanted = calls.hold(squares, self._claims, weights, group)
        calls.run(ADD, group, share, weights=shorter, out=terms, starts=starts, wanted=wanted)
        return terms

    def _starts(self) -> list[int]:
        """Where each layer's sum begins in one vector of all, and the end."""
        padded = [-(-entries // ROOM) * ROOM for entries in self._entries]
        return [*firsts(padded), sum(padded)]

    def _split(self, total: Tensor) -> list[Tensor]:
        each = zip(self._starts(), self._entries, strict=False)
        return [total[start : start + entries] for start, entries in each]


@lru_cache(maxsize=1024)
def owners_of(counts: tuple[int, ...]) -> list[int]:
    """Which layer each tile belongs to, where layers have so many."""
    return [layer for layer, count in enumerate(counts) for _ in range(count)]


def fused_among(
    gradients: Mapping[int, PerSampleGrad], units: Sequence[str]
) -> Iterator[FusedOuter]:
    """Those of a pass's gradients that are chosen for it, by where they lie and how they are tiled.

    So many at a time that what they take beside the model stays small.
    """
    alike: dict[tuple[Any, ...], dict[int, FusedLayer]] = {}
    for place, each in gradients.items():
        if (layer := each.fused_layer()) is None:
            continue
        of, alone = layer.sizes, place if layer.looked_up else None
        key = layer.way, of.records, of.device, of.dtype, of.tile(layer.way), of.divisor, alone
        alike.setdefault(key, {})[place] = layer
    for layers in alike.values():
        for some in in_parts(layers):
            yield FusedOuter(some, units)


def in_parts(layers: Mapping[int, FusedLayer]) -> Iterator[dict[int, FusedLayer]]:
    """Layers in their order, one at least in each part."""
    part: dict[int, FusedLayer] = {}
    entries = formed = 0
    for place, each in layers.items():
        of = each.sizes
        at_once = KEPT_AT_ONCE // max(1, of.records) if each.way == "kept" else ADDED_AT_ONCE
        full = entries + of.entries > at_once or formed + each.numbers > FORMED_AT_ONCE
        if part and full:
            yield part
            part, entries, formed = {}, 0, 0
        part[place] = each
        entries, formed = entries + of.entries, formed + each.numbers
    if part:
        yield part


def serves(x: Tensor) -> bool:
    """Whether gradients made of such numbers are formed by the kernel."""
    narrow = x.dtype in NARROW or x.dtype == torch.float32
    return not x.is_cpu and narrow and compiles_on(x.device, x.dtype)


@cache
def compiles_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels are there, and right, on a device: see `tried_on`.

    In whole tiles, as models have them.
    """

    def all_agree() -> bool:
        g = (torch.arange(2 * 64 * WIDE, device=device) % 7).to(dtype).view(2, 64, WIDE)
        a = torch.ones_like(g)
        index = (torch.arange(128, device=device) % 5).view(2, 64)
        exact = torch.einsum("btp,btd->bpd", g.double(), a.double())
        added = exact.scatter_add(1, index[:, :, None].expand_as(a), a.double())
        plain, looked_up = Factors.of(g, a), Factors.of(g, a, Lookups.of(index, a))
        ways: list[tuple[Factors, Way, Tensor]] = [
            *((plain, "kept", exact), (plain, "claimed", exact), (plain, "twice", exact)),
            *((looked_up, "kept", added), (looked_up, "twice", added)),
        ]
        return all(agrees(*each) for each in ways)

    return device.type in KINDS and tried_on(device, dtype, all_agree, "gradients")


def agrees(layer: Factors, way: Way, exact: Tensor) -> bool:
    """Whether norms and sums are those of such gradients, (B, p, d), but for rounding."""
    squared = exact.flatten(1).square().sum(1)
    weights = torch.ones(1, len(exact), dtype=torch.float64, device=exact.device)
    sums = Sums(exact.shape[1:], exact.device)
    fused = FusedOuter({0: FusedLayer.of(layer, way)}, ["all"])
    close = torch.allclose(fused.measure(NORM_BLOCK)["all"], squared, rtol=1e-3)
    fused.add({"all": weights}, [sums], [[len(exact)]])
    return close and torch.allclose(sums.settle()[0], exact.sum(0), rtol=1e-3)
