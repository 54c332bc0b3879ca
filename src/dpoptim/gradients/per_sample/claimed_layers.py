"""Layers whose norms are claimed: all measured in one call, and summed in another.

`ghost_norms` does the same layer by layer. Small models have many small layers, whose calls take
longer than their arithmetic, and which are too little work to be cut for threads one by one.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self, TypeGuard

import torch
from torch import Tensor

from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic.multiplication import plain
from dpoptim.gradients.arithmetic.norms import added_in_turn, most_lost_by_each
from dpoptim.gradients.arithmetic.products import GROUP_ROWS, Groups
from dpoptim.gradients.choose_formula import CLAIMED_POSITIONS
from dpoptim.gradients.per_sample import native
from dpoptim.gradients.per_sample.ghost_norms import Claims, add_claimed_in_turn, with_rounding
from dpoptim.gradients.per_sample.parts import all_groups
from dpoptim.gradients.per_sample.per_sample_grads import PerSampleGrad
from dpoptim.gradients.per_sample.sequence_outer import (
    GHOST_SLACK,
    SequenceOuter,
    rows_of_piece,
)
from dpoptim.runtime.compiled import library
from dpoptim.runtime.compiled_work import Piece, Task, run_in_turn

AT_ONCE = 1 << 20  # entries of layers that are summed in one call: their terms take memory
# `Layers` and `Layer` of `claimed_layers.c`
LAYERS, LAYER = struct.Struct("=5q"), struct.Struct("=2Q7q3Qq2Q")


@cache
def functions() -> tuple[Piece, Piece] | None:
    """The compiled functions that claim and that add; None where there are none."""
    if library() is None:
        return None
    return Piece("dpoptim_claim_layers"), Piece("dpoptim_add_layers")


@dataclass
class Layer:
    """One of the layers, float32 on the CPU, with numbers side by side.

    Attributes:
        place: of its parameter.
        outer: its gradients.
        piece: rows that are measured together.
    """

    place: int
    outer: SequenceOuter

    def __post_init__(self) -> None:
        self.g, self.a = self.outer.g, self.outer.a
        self.positions, self.rows, self.columns = *self.g.shape[1:], self.a.shape[2]
        self.entries = self.rows * self.columns
        self.piece = rows_of_piece(self.rows, self.columns)
        self.pieces = -(-self.rows // self.piece)

    def packed(self, found: int, total: int, weights: int, squares: int, room: int) -> bytes:
        """The layer as compiled functions read it; addresses that they do not read are zero."""
        g, a = self.g, self.a
        return LAYER.pack(
            *(g.data_ptr(), a.data_ptr(), self.positions, self.rows, self.columns),
            *(g.stride(0), g.stride(1), a.stride(0), a.stride(1)),
            *(found, total, weights, self.piece, squares, room),
        )


class ClaimedLayers:
    """The layers of a pass whose norms are claimed.

    Args:
        layers: one at least, with as many records each, one at least.
        units: the unit of each place.

    **Guarantee.** As of `ghost_norms`: what is claimed of a record is a function of its own rows,
    to the last bit; what is added of it is at most as long as was claimed. It is measured, never
    low, where it is formed; a layer in which something turns out longer is formed again by
    `add_claimed_in_turn`, to the same bits. Threads share records to measure and pieces to add,
    so that how many there are changes no bit.
    """

    def __init__(self, layers: Sequence[Layer], units: Sequence[str]) -> None:
        found = functions()
        assert found is not None
        self._claim, self._add = found
        self._level = min(native.loaded().level, native.MOST_OF_PRODUCTS)
        self._layers, self._records = [*layers], layers[0].g.shape[0]
        self.places = [each.place for each in layers]
        self._unit_of = [units[place] for place in self.places]
        self._claims = self._longest = torch.empty(0)

    @classmethod
    def among(cls, gradients: Mapping[int, PerSampleGrad], units: Sequence[str]) -> Self | None:
        """Those of a pass's gradients that compiled functions serve; None where none is.

        Decided by types, shapes, devices and dtypes, which are public, and by what was `chosen`.
        """
        if functions() is None:
            return None
        layers = [Layer(i, each) for i, each in gradients.items() if serves(each)]
        return cls(layers, units) if layers else None

    def measure(self, block: int) -> dict[str, Tensor]:
        """Claim squared norms of each unit's part of the records' gradients.

        Args:
            block: of `row_squared_norms`, by which they are raised.
        """
        self._block = block
        shape = len(self._layers), self._records, 3
        found = torch.empty(shape, dtype=torch.float64, device="cpu")
        layers = [
            each.packed(of.data_ptr(), 0, 0, 0, 0)
            for each, of in zip(self._layers, found, strict=True)
        ]
        work = sum([each.positions**2 * (each.rows + each.columns) for each in self._layers])
        given = self._given(layers, slice(0, self._records))
        run_in_turn(given, [Task(self._claim, self._records * work)])
        squared, lengths, self._longest = found.unbind(2)
        factors, terms = self._most_lost(self._layers)
        ghost = with_rounding(squared, lengths, torch.float32)
        self._claims = ghost.mul_(factors).add_(terms).mul_(1 + GHOST_SLACK)
        by_unit: dict[str, list[Tensor]] = {}
        for claims, unit in zip(self._claims, self._unit_of, strict=True):
            by_unit.setdefault(unit, []).append(claims)
        return {unit: added_in_turn(of_unit) for unit, of_unit in by_unit.items()}

    def longest(self) -> Tensor:
        """The squared length of each record's longest ``g[i, t]``, once it is measured."""
        return self._longest.amax(0)

    def add(self, weights: Mapping[str, Tensor], sums: Sequence[Sums], groups: Groups) -> None:
        """Add ``sum_i weights[i] * gradient_i`` to the sum of each parameter, and forget them.

        Args:
            weights: of each unit, float64, (1, B); zero: what is there may be anything.
            sums: of all parameters, by place, one of each.
            groups: as for all per_sample_grads.
        """
        narrow = {unit: each[0].float() for unit, each in weights.items()}
        while self._layers:
            some = self._next_few()
            claims, self._claims = self._claims[: len(some)], self._claims[len(some) :]
            units, self._unit_of = self._unit_of[: len(some)], self._unit_of[len(some) :]
            for group in all_groups(groups):
                records, longer = group.stop - group.start, [*range(len(some))]
                if records == 0:
                    continue
                if records <= GROUP_ROWS:
                    of_layers = [narrow[unit][group] for unit in units]
                    longer = self._add_group(some, of_layers, claims[:, group], sums, group)
                for row in longer:
                    each, known = some[row], weights[units[row]]
                    of_layer = Claims(claims[row], each.entries, self._block, at_once=True)
                    add_claimed_in_turn(each.outer, sums[each.place], group, known, of_layer)

    def _next_few(self) -> list[Layer]:
        """Layers that are summed next, taken from those that are left."""
        entries = count = 0
        for each in self._layers:
            entries, count = entries + each.entries, count + 1
            if entries >= AT_ONCE:
                break
        some, self._layers = self._layers[:count], self._layers[count:]
        return some

    def _add_group(
        self,
        layers: Sequence[Layer],
        weights: Sequence[Tensor],
        claims: Tensor,
        sums: Sequence[Sums],
        group: slice,
    ) -> list[int]:
        """Add a group's sums, but of layers in which a record is longer than claimed.

        Args:
            weights: of each layer's records, float32.
            claims: of each layer, (layers, records).

        Returns:
            The numbers of those layers.
        """
        pieces, records = [each.pieces for each in layers], group.stop - group.start
        squares = torch.empty(sum(pieces), records, dtype=torch.float64, device="cpu")
        room = torch.empty(sum(pieces), 2 * native.VECTOR, dtype=torch.float64, device="cpu")
        totals = [torch.zeros(each.entries, dtype=torch.float32, device="cpu") for each in layers]
        lie = (totals, weights, squares.split(pieces), room.split(pieces))
        packed = [
            each.packed(0, *(of.data_ptr() for of in places))
            for each, *places in zip(layers, *lie, strict=True)
        ]
        work = sum([each.positions * each.entries for each in layers])
        rooms = max([native.outer_room(each.positions, each.rows) for each in layers])
        run_in_turn(self._given(packed, group), [Task(self._add, records * work, rooms)])
        measured = torch.stack([added_in_turn(each.unbind()) for each in squares.split(pieces)])
        factors, terms = self._most_lost(layers)
        held = measured.mul_(factors).add_(terms) <= claims  # not where it is NaN
        counts = torch.stack([*weights]) != 0
        short = (held | ~counts).all(1).tolist()
        for each, total, as_claimed in zip(layers, totals, short, strict=True):
            if as_claimed:
                sums[each.place].add(total)
        return [row for row, as_claimed in enumerate(short) if not as_claimed]

    def _most_lost(self, layers: Sequence[Layer]) -> tuple[Tensor, Tensor]:
        return most_lost_by_each(tuple(each.entries for each in layers), self._block)

    def _given(self, layers: Sequence[bytes], group: slice) -> bytes:
        """The work, as compiled functions read it."""
        some = group.stop - group.start
        head = LAYERS.pack(len(layers), self._records, group.start, some, self._level)
        return b"".join([head, *layers])


def serves(each: PerSampleGrad) -> TypeGuard[SequenceOuter]:
    """Whether compiled functions take such gradients, and are to."""
    if type(each) is not SequenceOuter or not (each.alone and each.ghost_norms) or not len(each.g):
        return False
    return each.g.shape[1] <= CLAIMED_POSITIONS and all(
        native.serves(x) and plain(x) and x.stride(2) == 1 for x in (each.g, each.a)
    )
