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

from dpoptim.clipping import InC
from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic.batch_invariant import with_dense_rows
from dpoptim.gradients.arithmetic.norms import RAISED_IN_FLOAT64, SAFE_SQUARES, most_lost
from dpoptim.gradients.arithmetic.products import GROUP_ROWS, Groups, slices
from dpoptim.gradients.per_sample.per_sample_grads import LONGEST_FACTOR, Bias, Outer, PerSampleGrad
from dpoptim.runtime.compiled import WHOLE, function, library
from dpoptim.runtime.compiled_work import A_NUMBER, Piece, Task, floats, run_in_turn

UNTRAINED = -1
# `Limits` of `single_rows.c`
LIMITS = struct.pack("=4d", *SAFE_SQUARES, RAISED_IN_FLOAT64, LONGEST_FACTOR**2)
# `Rows`, `Layer`, `Rule` and `Group`
ROWS, LAYER = struct.Struct("=4q4Q3q"), struct.Struct("=2Q6q4d3Q")
RULE, GROUP = struct.Struct("=5d"), struct.Struct("=2q")


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
    weight: int | None = None
    bias: int | None = None

    def __post_init__(self) -> None:
        self.rows, self.columns = self.g.shape[1], self.a.shape[1]


class Totals:
    """Sums of a layer's gradients over some groups, to be written.

    Args:
        each: of one layer.
        blocks: of groups; sums of one are float32, of several float64.

    Attributes:
        in_c: addresses, 0 for what there is not: of a sum of one block, of all, of the bias's.
    """

    def __init__(self, each: Sides, blocks: int) -> None:
        self._terms: list[tuple[int, Tensor]] = []
        weight = total = bias = 0
        if each.weight is not None:
            entries = each.rows * each.columns
            self._of_block = of_all = floats(entries)
            weight = of_all.data_ptr()
            if blocks > 1:
                of_all = torch.empty(entries, dtype=torch.float64, device="cpu")
                total = of_all.data_ptr()
            self._terms.append((each.weight, of_all))
        if each.bias is not None:
            of_bias = torch.empty(each.rows, dtype=torch.float64, device="cpu")
            bias = of_bias.data_ptr()
            self._terms.append((each.bias, of_bias))
        self.in_c = weight, total, bias

    def add_to(self, sums: Sequence[Sums]) -> None:
        for place, term in self._terms:
            sums[place].add(term)


NONE_OF_THEM = (0, 0, 0)


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
        self._units = list({units[place]: None for place in self.places})
        # of each place's unit; None: not trained
        self._number: dict[int | None, int] = {None: UNTRAINED}
        self._number |= {place: self._units.index(units[place]) for place in self.places}
        # for squared norms of each weight's gradients, of each unit, of the longest g, and factors
        rows = len(layers) + 2 * len(self._units) + 1
        self._measured = torch.empty(rows, self._records, dtype=torch.float64, device="cpu")

    @classmethod
    def among(cls, gradients: Mapping[int, PerSampleGrad], units: Sequence[str]) -> Self | None:
        """Those of a pass's gradients that compiled functions serve; None where none is.

        Decided by types, devices and dtypes, which are public.
        """
        if functions() is None:
            return None
        found: dict[int, Sides] = {}
        for place, each in gradients.items():
            of = each.outer if type(each) is Bias else each
            sides = found.get(id(of))
            if sides is None:
                if type(of) is not Outer or not serves(of):
                    continue
                sides = found[id(of)] = Sides(with_dense_rows(of.g), with_dense_rows(of.a))
            if of is each:
                sides.weight = place
            else:
                sides.bias = place
        return cls([*found.values()], units) if found else None

    def measure(self, block: int) -> dict[str, Tensor]:
        """Squared norms of each unit's part of the records' gradients, in memory of its own.

        Args:
            block: of `norms.row_squared_norms`.
        """
        run_in_turn(self._given(block), [self._measuring()])
        return self._squared_norms()

    def longest(self) -> Tensor:
        """The squared length of each record's longest g, once it is measured."""
        return self._measured[len(self._layers) + len(self._units)]

    def clip_and_add(
        self, rules: Mapping[str, InC], sums: Sequence[Sums], groups: Groups, block: int
    ) -> dict[str, Tensor]:
        """`measure`, find the factors, and `add`, in one call, to the same bits.

        Args:
            rules: of each unit.
            sums, groups: as for `add`; no group is larger than `GROUP_ROWS`.
            block: as for `measure`.
        """
        totals = [Totals(each, len(groups)) for each in self._layers]
        packed = [RULE.pack(*rules[unit]) for unit in self._units]
        given = self._given(block, totals, groups, rules=packed)
        run_in_turn(given, [self._measuring(), self._adding(groups)])
        for each in totals:
            each.add_to(sums)
        return self._squared_norms()

    def _squared_norms(self) -> dict[str, Tensor]:
        rows = self._measured[len(self._layers) :].unbind()
        return dict(zip(self._units, rows, strict=False))

    def add(self, weights: Mapping[str, Tensor], sums: Sequence[Sums], groups: Groups) -> None:
        """Add ``sum_i weights[i] * gradient_i`` to the sum of each parameter.

        Args:
            weights: of each unit, float64, (1, B); zero: what is there may be anything.
            sums: of all parameters, by place, one of each.
            groups: as for `add_weighted_outer`.
        """
        factors = self._measured[-len(self._units) :]
        for of_unit, unit in zip(factors, self._units, strict=True):
            of_unit.copy_(weights[unit][0])
        if largest_group(groups) <= GROUP_ROWS:
            self._add_groups(sums, groups, 0)
            return
        for block in slices(groups):
            # a group's own sum is the same, whether or not another one is too large
            for part in block:
                size = part.stop - part.start
                if size <= GROUP_ROWS:
                    self._add_groups(sums, [[size]], part.start)
                else:
                    self._add_large(weights, sums, part)

    def _add_groups(self, sums: Sequence[Sums], groups: Groups, first: int) -> None:
        totals = [Totals(each, len(groups)) for each in self._layers]
        run_in_turn(self._given(0, totals, groups, first), [self._adding(groups)])
        for each in totals:
            each.add_to(sums)

    def _measuring(self) -> Task:
        numbers = sum([each.rows + each.columns for each in self._layers])
        return Task(self._functions.measure, A_NUMBER * self._records * numbers)

    def _adding(self, groups: Groups) -> Task:
        products = sum([each.rows * each.columns for each in self._layers])
        widest = max([each.rows for each in self._layers])
        room = self._functions.group_room(largest_group(groups), widest)
        return Task(self._functions.add, sum(map(sum, groups)) * products, room)

    def _given(
        self,
        block: int,
        totals: Sequence[Totals] = (),
        groups: Groups = (),
        first: int = 0,
        rules: Sequence[bytes] = (),
    ) -> bytes:
        """The work, as compiled functions read it."""
        count, units, measured = len(self._layers), len(self._units), self._measured
        step = measured.element_size() * self._records
        start = measured.data_ptr()
        of_units = start + count * step
        longest = of_units + units * step
        sizes = [GROUP.pack(size, i) for i, sizes in enumerate(groups) for size in sizes]
        head = ROWS.pack(
            *(count, self._records, self._functions.level, units, start, of_units, longest),
            *(longest + step, len(rules), len(sizes), first),
        )
        at = [each.in_c for each in totals] or [NONE_OF_THEM] * count
        layers = [self._layer(each, block, of) for each, of in zip(self._layers, at, strict=True)]
        return b"".join([head, LIMITS, *layers, *rules, *sizes])

    def _layer(self, each: Sides, block: int, totals: Sequence[int]) -> bytes:
        g, a, of, rows, columns = each.g, each.a, self._number, each.rows, each.columns
        return LAYER.pack(
            *(g.data_ptr(), a.data_ptr(), g.stride(0), a.stride(0), rows, columns),
            *(of[each.weight], of[each.bias], *most_lost(rows, block), *most_lost(columns, block)),
            *totals,
        )

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


def largest_group(groups: Groups) -> int:
    """Records of the largest group."""
    return max([max(block, default=0) for block in groups], default=0)


def serves(outer: Outer) -> bool:
    """Whether compiled functions read its sides."""
    g = outer.g
    return g.dtype == outer.a.dtype == torch.float32 and g.is_cpu and g.shape[0] > 0
