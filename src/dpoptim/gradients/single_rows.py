"""Layers in which a record is a single row, measured in one call and summed in another.

A record's gradient is one outer product of two rows, and the sum one product over records. Where
compiled functions (`single_rows.c`) serve, all such layers of a pass are taken together; without
them `per_sample_grads` does the same, layer by layer, within the same bounds, but with other last
bits.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch
from torch import Tensor

from dpoptim.compiled import WHOLE, function, library
from dpoptim.compiled_work import A_NUMBER, Piece
from dpoptim.gradients.norms import RAISED_IN_FLOAT64, SAFE_SQUARES, most_lost
from dpoptim.gradients.per_sample_grads import LONGEST_FACTOR, Bias, Outer, PerSampleGrad
from dpoptim.gradients.products import GROUP_ROWS, Groups, slices
from dpoptim.gradients.sums import Sums

UNTRAINED = -1
# `Limits` of `single_rows.c`
LIMITS = struct.pack("=4d", *SAFE_SQUARES, RAISED_IN_FLOAT64, LONGEST_FACTOR**2)


# `Layer`, `Totals`, `Measured` and `Added` of `single_rows.c`
LAYER, TOTALS = struct.Struct("=QQqqqqqqdddd"), struct.Struct("=QQ")
MEASURED, ADDED = struct.Struct("=4q3q"), struct.Struct("=5q2q")


@dataclass(frozen=True)
class Functions:
    """The compiled functions.

    Attributes:
        group_room: room as for `Piece.run`, of the largest group and number of rows.
        level: of the vectors that they may use.
    """

    measure: Piece
    add: Piece
    group_room: Callable[[int, int], int]
    level: int


@cache
def functions() -> Functions | None:
    """The compiled functions; None where there are none."""
    found = library()
    room = function("dpoptim_group_room", WHOLE, WHOLE, result=WHOLE)
    if found is None or room is None:
        return None
    return Functions(Piece("dpoptim_measure_rows"), Piece("dpoptim_add_rows"), room, found.level)


@dataclass
class Sides:
    """A layer's rows, float32 on the CPU, each dense, and the places of its trained parameters."""

    g: Tensor
    a: Tensor
    weight: int | None
    bias: int | None


class SingleRows:
    """The layers of a pass in which a record is a single row.

    Args:
        layers: one at least, with as many records each, one at least.
        units: the unit of each place.

    **Guarantee.** A squared norm is a function of the record's rows, to the last bit, and never
    below the true one: chains of at most 10 additions in float32 lose less than
    `norms.most_lost` of blocks of any size. A group's sum is one chain over its records in their
    order, without those of weight zero, and the groups of a block are added in float32: conditions
    2 to 4 of the theorem in `products`. Threads share records to measure and columns to add, so
    that how many there are changes no bit.
    """

    def __init__(self, layers: Sequence[Sides], units: Sequence[str]) -> None:
        found = functions()
        assert found is not None
        self._functions = found
        self._layers, self._records, self._unit_of = layers, layers[0].g.shape[0], units
        self.places = [
            place for each in layers for place in (each.weight, each.bias) if place is not None
        ]
        self._units = list(dict.fromkeys([units[place] for place in self.places]))
        self._measured = torch.empty(0)
        self._in_c = b""

    @classmethod
    def among(cls, gradients: Mapping[int, PerSampleGrad], units: Sequence[str]) -> Self | None:
        """Those of a pass's gradients that compiled functions serve; None where none is.

        Decided by types, devices and dtypes, which are public.
        """
        if functions() is None:
            return None
        found: dict[int, Sides] = {}
        for place, each in gradients.items():
            of = each.outer if isinstance(each, Bias) else each
            if not isinstance(of, Outer) or not serves(of):
                continue
            sides = found.get(id(of))
            if sides is None:
                sides = found[id(of)] = Sides(dense(of.g), dense(of.a), None, None)
            if isinstance(each, Bias):
                sides.bias = place
            else:
                sides.weight = place
        return cls([*found.values()], units) if found else None

    def measure(self, block: int) -> dict[str, Tensor]:
        """Squared norms of each unit's part of the records' gradients, in memory of its own.

        Args:
            block: of `norms.row_squared_norms`.
        """
        self._in_c = b"".join([self._layer(each, block) for each in self._layers])
        count, units, records = len(self._layers), len(self._units), self._records
        measured = torch.empty(count + units + 1, records, dtype=torch.float64, device="cpu")
        start, of_row = measured.data_ptr(), measured.element_size() * records
        given = MEASURED.pack(
            *(count, records, self._functions.level, units),
            *(start, start + count * of_row, start + (count + units) * of_row),
        )
        numbers = sum([each.g.shape[1] + each.a.shape[1] for each in self._layers])
        self._functions.measure.run(
            b"".join([given, LIMITS, self._in_c]), A_NUMBER * records * numbers
        )
        self._measured = measured
        return {unit: measured[count + i] for i, unit in enumerate(self._units)}

    def longest(self) -> Tensor:
        """The squared length of each record's longest g, once it is measured."""
        return self._measured[-1]

    def _layer(self, each: Sides, block: int) -> bytes:
        g, a, of = each.g, each.a, self._number
        rows, columns = g.shape[1], a.shape[1]
        return LAYER.pack(
            *(g.data_ptr(), a.data_ptr(), g.stride(0), a.stride(0), rows, columns),
            *(of(each.weight), of(each.bias), *most_lost(rows, block), *most_lost(columns, block)),
        )

    def _number(self, place: int | None) -> int:
        """The number of a parameter's unit."""
        return UNTRAINED if place is None else self._units.index(self._unit_of[place])

    def add(self, weights: Mapping[str, Tensor], sums: Sequence[Sums], groups: Groups) -> None:
        """Add ``sum_i weights[i] * gradient_i`` to the sum of each parameter.

        Args:
            weights: of each unit, float64, (1, B); zero: what is there may be anything.
            sums: of all parameters, by place, one of each.
            groups: as for `add_weighted_outer`.
        """
        of_units = [weights[unit].cpu() for unit in self._units]
        factors = torch.cat(of_units) if len(of_units) > 1 else of_units[0].contiguous()
        for block in slices(groups):
            sizes = [part.stop - part.start for part in block]
            if max(sizes) <= GROUP_ROWS:
                self._add_groups(factors, sums, block[0].start, sizes)
                continue
            # a group's own sum is the same, whether or not another of its block is too large
            for part, size in zip(block, sizes, strict=True):
                if size <= GROUP_ROWS:
                    self._add_groups(factors, sums, part.start, [size])
                else:
                    self._add_large(weights, sums, part)

    def _add_groups(
        self, factors: Tensor, sums: Sequence[Sums], first: int, sizes: Sequence[int]
    ) -> None:
        """Add the sum of some groups."""
        if not sum(sizes):
            return
        terms: dict[int, Tensor] = {}
        pointers, products = [], 0
        for each in self._layers:
            rows, columns = each.g.shape[1], each.a.shape[1]
            products += rows * columns
            weight = bias = 0
            if each.weight is not None:
                terms[each.weight] = torch.empty(rows * columns, dtype=torch.float32, device="cpu")
                weight = terms[each.weight].data_ptr()
            if each.bias is not None:
                terms[each.bias] = torch.empty(rows, dtype=torch.float64, device="cpu")
                bias = terms[each.bias].data_ptr()
            pointers.append(TOTALS.pack(weight, bias))
        given = ADDED.pack(
            *(len(self._layers), self._records, self._functions.level, len(sizes), first),
            *(self._measured.data_ptr(), factors.data_ptr()),
        )
        in_c = struct.pack(f"={len(sizes)}q", *sizes)
        widest = max([each.g.shape[1] for each in self._layers])
        room = self._functions.group_room(max(sizes), widest)
        self._functions.add.run(
            b"".join([given, self._in_c, *pointers, in_c]), sum(sizes) * products, room
        )
        for place, term in terms.items():
            sums[place].add(term)

    def _add_large(self, weights: Mapping[str, Tensor], sums: Sequence[Sums], part: slice) -> None:
        """Add a group that is too large for float32."""
        for each, squared in zip(self._layers, self._measured, strict=False):
            rows = Outer(each.g[part], each.a[part], _squared=squared[part])
            for place, of_rows in ((each.weight, rows), (each.bias, rows.bias())):
                if place is not None:
                    of_group = weights[self._unit_of[place]][:, part]
                    of_rows.without(of_group[0] > 0).add_weighted_sums(
                        sums[place], of_group, [[part.stop - part.start]]
                    )


def serves(outer: Outer) -> bool:
    """Whether compiled functions read its sides."""
    g = outer.g
    return g.dtype == outer.a.dtype == torch.float32 and g.is_cpu and g.shape[0] > 0


def dense(rows: Tensor) -> Tensor:
    """The same numbers, each row dense."""
    return rows if rows.stride(1) == 1 else rows.contiguous()
