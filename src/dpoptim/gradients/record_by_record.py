"""Layers whose gradients are formed for one record after the other: measured, weighted and summed
before the next one's.

Clipping needs the norm of a record's whole gradient before it can add the first number of it. To
form all gradients and keep them takes memory for every record, mostly fresh pages; to claim their
norms first (`positions`) takes arithmetic. The gradients of a single record take neither, and
mostly stay in cache; of small models, those of a few.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from dpoptim.gradients.norms import read_part, squared_norm_of_parts
from dpoptim.gradients.parts import all_groups, parts_of
from dpoptim.gradients.per_sample_grads import OneByOne, Piece
from dpoptim.gradients.products import GROUP_ROWS, Groups
from dpoptim.gradients.sums import Sums
from dpoptim.gradients.worker_threads import worker_threads

Weigh = Callable[[slice, Mapping[str, Tensor]], Mapping[str, Tensor]]


def add_record_by_record(
    layers: Mapping[int, OneByOne],
    units: Sequence[str],
    sums: Sequence[Sums],
    groups: Groups,
    block: int,
    weigh: Weigh,
) -> None:
    """Add the weighted sums of these layers' gradients to ``sums``.

    Args:
        layers: by the places of their parameters; float32, on one device.
        units, sums: of all parameters, by place: what they are clipped with, and what is added
            to.
        groups: as for all per_sample_grads: the records of one are added up in float32, in float64
            if there are too many.
        block: of `row_squared_norms`.
        weigh: maps some records and the squared norms of their gradients in each unit, float64 of
            shape (b,), to their weights in each unit, float64 of shape (k, b), one for each sum;
            zero where a record does not count.

    **Guarantee.** What is formed, measured and weighed of a record is a function of its own rows,
    to the last bit, whoever else is in the batch: conditions 2 to 4 of the theorem in `products`.
    Other layers that run in the pass without adding to the record change its norm by the rounding
    of float64 sums.
    """
    shares = dealt(
        [
            (place, units[place], piece)
            for place, layer in layers.items()
            for piece in layer.one_by_one()
        ],
        torch.get_num_threads(),
        block,
    )
    entries = sum(len(sums[place].totals[0]) for place in layers)
    with worker_threads(len(shares)) as run:
        for group in all_groups(groups):
            if group.stop == group.start:
                continue
            dtype = torch.float64 if group.stop - group.start > GROUP_ROWS else torch.float32
            of_group = {place: room(sums[place], dtype) for place in layers}
            weights: dict[str, list[list[float]]] = {}
            for part in parts_of(group, entries):
                # what is formed of one part is added before the next takes its memory
                run([partial(share.turn, of_group, weights, part) for share in shares])
                weights = {
                    unit: each.T.tolist()
                    for unit, each in weigh(part, measured(shares, block)).items()
                }
            run([partial(share.add, of_group, weights) for share in shares])
            for place, layer in layers.items():
                sums[place].add(layer.in_order(of_group.pop(place)))


@dataclass
class Share:
    """The pieces of gradients that one thread forms, measures and adds up.

    Attributes:
        pieces: with the place of the parameter, and its unit.
        formed: of some records, each piece's gradients, and what was read of their norms.
    """

    pieces: list[tuple[int, str, Piece]]
    block: int
    formed: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)

    def turn(
        self, of_group: Mapping[int, Tensor], weights: Mapping[str, list[list[float]]], part: slice
    ) -> None:
        """Add what is formed, and form the gradients of the next records."""
        self.add(of_group, weights)
        self.formed = [
            [
                (gradient, read_part(gradient, block=self.block))
                for gradient in (piece.form(record) for _, _, piece in self.pieces)
            ]
            for record in range(part.start, part.stop)
        ]

    def add(self, of_group: Mapping[int, Tensor], weights: Mapping[str, list[list[float]]]) -> None:
        for i, gradients in enumerate(self.formed):
            for (place, unit, piece), (gradient, _) in zip(self.pieces, gradients, strict=True):
                entries = slice(piece.start, piece.start + piece.entries)
                for total, weight in zip(of_group[place], weights[unit][i], strict=True):
                    if weight != 0:  # what does not count may be anything
                        total[entries].add_(gradient, alpha=weight)
        self.formed = []


def dealt(pieces: list[tuple[int, str, Piece]], hands: int, block: int) -> list[Share]:
    """The pieces dealt to at most so many hands, about as many entries to each."""
    shares = [Share([], block) for _ in range(min(hands, len(pieces)))]
    held = [0] * len(shares)
    for each in sorted(pieces, key=lambda each: -each[2].entries):
        least = held.index(min(held))
        shares[least].pieces.append(each)
        held[least] += each[2].entries
    return shares


def measured(shares: Sequence[Share], block: int) -> dict[str, Tensor]:
    """The squared norms of the formed records' gradients in each unit: float64, (b,).

    They are added up in one order, to whomever the pieces were dealt.
    """
    of_unit: dict[str, list[tuple[int, int, int, int]]] = {}
    for hand, share in enumerate(shares):
        for i, (place, unit, piece) in enumerate(share.pieces):
            of_unit.setdefault(unit, []).append((place, piece.start, hand, i))
    return {
        unit: torch.cat(
            [
                squared_norm_of_record(
                    [shares[hand].formed[record][i] for _, _, hand, i in sorted(places)], block
                )
                for record in range(len(shares[0].formed))
            ]
        )
        for unit, places in of_unit.items()
    }


def squared_norm_of_record(pieces: Sequence[tuple[Tensor, Tensor]], block: int) -> Tensor:
    gradients, read = zip(*pieces, strict=True)
    return squared_norm_of_parts(gradients, torch.cat(read), block=block)


def room(sums: Sums, dtype: torch.dtype) -> Tensor:
    """Zeros to add up a term of each sum in, (k, entries)."""
    return torch.zeros(
        len(sums.totals), len(sums.totals[0]), dtype=dtype, device=sums.totals[0].device
    )
