"""Layers whose gradients are formed for one record after the other.

Each is measured, weighted and summed before the next one's.

Clipping needs the norm of a record's whole gradient before it can add the first number of it. To
form all gradients and keep them takes memory for every record, mostly fresh pages; ghost
norms (`sequence_outer`) take arithmetic. The gradients of a single record take neither, and
mostly stay in cache; of small models, those of a few, so that threads need not wait for each other
after every record.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic.norms import blocks_in, read_part, squared_norms_of_parts
from dpoptim.gradients.arithmetic.products import GROUP_ROWS, Groups
from dpoptim.gradients.per_sample import native
from dpoptim.gradients.per_sample.parts import all_groups, parts_of, records_at_once
from dpoptim.gradients.per_sample.per_sample_grads import Chunk, OneByOne
from dpoptim.runtime.worker_threads import worker_threads

Weigh = Callable[[slice, Mapping[str, Tensor]], Mapping[str, Tensor]]
Weights = Mapping[str, list[list[float]]]  # of some records, by unit: one for each sum
FEW = 4  # records that must fit into cache for all to be formed at once
# entries that wait for their weights: every wait is one for all threads, and a round of calls
WAITING = 1 << 22


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
    shares = deal_to_threads(
        [
            (place, units[place], chunk)
            for place, layer in layers.items()
            for chunk in layer.one_by_one()
        ],
        torch.get_num_threads(),
        block,
    )
    entries = sum(sums[place].entries for place in layers)
    few = records_at_once(entries) >= FEW
    with worker_threads(len(shares)) as run:
        for group in all_groups(groups):
            if group.stop == group.start:
                continue
            dtype = torch.float64 if group.stop - group.start > GROUP_ROWS else torch.float32
            of_group = {place: zero_terms(sums[place], dtype) for place in layers}
            weights: dict[str, list[list[float]]] = {}
            for part in parts_of(group, entries, WAITING):
                # what is formed of one part is added before the next takes its memory
                run([partial(share.turn, of_group, weights, part, few=few) for share in shares])
                weights = {
                    unit: each.T.tolist()
                    for unit, each in weigh(part, norms_by_unit(shares, block)).items()
                }
            run([partial(share.finish, weights) for share in shares])
            for place, layer in layers.items():
                sums[place].add(layer.in_order(of_group.pop(place)))


def sum_in_turn(
    layer: OneByOne, sums: Sums, group: slice, weights: Tensor, block: int
) -> tuple[Tensor | None, Tensor]:
    """Sum one group's gradients, whose weights are known, and measure what is summed.

    Args:
        layer: of one parameter, float32. sums: that the group is for.
        weights: float64, (k, B); zero where a record does not count.
        block: of `row_squared_norms`.

    Returns:
        The term of each sum, (k, entries), None for no records; and the squared norms, (b,),
        float64, as `norms.in_blocks` reads them, or zero for records that do not count.
    """
    records = group.stop - group.start
    if not records:
        return None, weights.new_empty(0)
    shares = deal_to_threads(
        [(0, "", chunk) for chunk in layer.one_by_one()], torch.get_num_threads(), block
    )
    total = zero_terms(sums, torch.float64 if records > GROUP_ROWS else torch.float32)
    known = weights[:, group].T.tolist()
    with worker_threads(len(shares)) as run:
        run([partial(share.add_known, total, known, group) for share in shares])
    # in the order of the chunks, to whomever they were dealt
    starts = [chunk.start for share in shares for _, _, chunk in share.chunks]
    order = sorted(range(len(starts)), key=starts.__getitem__)
    squared = torch.cat([share.squared for share in shares])[order].sum(0)
    return layer.in_order(total), squared


@dataclass
class Share:
    """The chunks of gradients that one thread forms, measures and adds up.

    Attributes:
        chunks: with the place of the parameter, and its unit.
        formed: each chunk's gradients of some records, (b, entries) where they were formed at once.
        norms: of their blocks, float32, one chunk's after the other's; see `read_part`.
        squared: norms of what `add_known` added, float64, (chunks, b).
    """

    chunks: list[tuple[int, str, Chunk]]
    block: int
    formed: list[Sequence[Tensor] | Tensor] = field(default_factory=list)
    norms: Tensor = field(default_factory=partial(torch.empty, 0, 0))
    squared: Tensor = field(default_factory=partial(torch.empty, 0, 0))
    _totals: list[list[Tensor]] = field(default_factory=list)
    _rooms: dict[int, Tensor] = field(default_factory=dict)

    @property
    def blocks(self) -> list[int]:
        """The number of blocks of each chunk."""
        return [blocks_in(chunk.entries, self.block) for _, _, chunk in self.chunks]

    def turn(
        self, of_group: Mapping[int, Tensor], weights: Weights, part: slice, *, few: bool
    ) -> None:
        """Add what is formed, and form the gradients of the next records.

        Args:
            of_group: what is added to until `finish`: of each place, (k, entries).
            few: whether the part's records are formed at once by chunks that can.
        """
        if not self._totals:
            self._totals = [
                [total[chunk.start : chunk.start + chunk.entries] for total in of_group[place]]
                for place, _, chunk in self.chunks
            ]
        self._add(weights)
        blocks, records = self.blocks, part.stop - part.start
        self.norms = torch.empty(records, sum(blocks), dtype=torch.float32, device="cpu")
        one_by_one: list[tuple[list[Tensor], Chunk, Sequence[Tensor]]] = []
        for place, ((_, _, chunk), out) in enumerate(
            zip(self.chunks, self.norms.split(blocks, 1), strict=True)
        ):
            if chunk.form_measured is not None:
                formed = self._room(place, records, chunk.entries)
                chunk.form_measured(part, formed, out, self.block)
                self.formed.append(formed)
            elif few and chunk.form_few is not None:
                room = self._rooms.get(place)
                fits = room is not None and len(room) >= records
                formed = chunk.form_few(part, room[:records] if fits and room is not None else None)
                if not fits:
                    self._rooms[place] = formed
                read_part(formed, out, block=self.block)
                self.formed.append(formed)
            else:
                gradients: list[Tensor] = []
                self.formed.append(gradients)
                one_by_one.append((gradients, chunk, out.unbind()))
        for i, record in enumerate(range(part.start, part.stop)):
            for gradients, chunk, norms in one_by_one:
                gradients.append(chunk.form(record))
                read_part(gradients[-1], norms[i], block=self.block)

    def _room(self, place: int, records: int, entries: int) -> Tensor:
        room = self._rooms.get(place)
        if room is None or room.shape[0] < records:
            room = torch.empty(records, entries, dtype=torch.float32, device="cpu")
            self._rooms[place] = room
        return room[:records]

    def finish(self, weights: Weights) -> None:
        """Add what is formed; the group is over."""
        self._add(weights)
        self._totals = []

    def add_known(self, total: Tensor, weights: list[list[float]], group: slice) -> None:
        """Form, measure and add one record's gradients after the other's: they stay in cache."""
        shape = len(self.chunks), len(weights)
        self.squared = torch.empty(shape, dtype=torch.float64, device="cpu")
        for place, (_, _, chunk) in enumerate(self.chunks):
            into = total[:, chunk.start : chunk.start + chunk.entries].unbind()
            norms = torch.empty(len(weights), blocks_in(chunk.entries, self.block))
            for i, of_record in enumerate(weights):
                record = slice(group.start + i, group.start + i + 1)
                if chunk.form_measured is not None:
                    formed = self._room(place, 1, chunk.entries)
                    chunk.form_measured(record, formed, norms[i : i + 1], self.block)
                else:
                    formed = chunk.form(record.start)[None]
                    read_part(formed, norms[i : i + 1], block=self.block)
                add_few(into, formed, [of_record])
            self.squared[place] = norms.double().square_().sum(1)

    def _add(self, weights: Weights) -> None:
        for totals, (_, unit, _), gradients in zip(
            self._totals, self.chunks, self.formed, strict=False
        ):
            add_few(totals, gradients, weights[unit])
        self.formed = []


def add_few(
    totals: Sequence[Tensor], gradients: Sequence[Tensor] | Tensor, weights: list[list[float]]
) -> None:
    """Add the weighted gradients of some records, (b, entries), to each of the totals.

    One after the other: a product of several at once would round by how many they are, which other
    layers have a say in.
    """
    for total, of_total in zip(totals, zip(*weights, strict=True), strict=True):
        if isinstance(gradients, Tensor) and native.adds(total, gradients):
            native.add(total, gradients, of_total)
            continue
        for gradient, weight in zip(gradients, of_total, strict=True):
            if weight != 0:  # what does not count may be anything
                total.add_(gradient, alpha=weight)


def deal_to_threads(chunks: list[tuple[int, str, Chunk]], hands: int, block: int) -> list[Share]:
    """The chunks dealt to at most so many hands, about as much work to each."""
    shares = [Share([], block) for _ in range(min(hands, len(chunks)))]
    held = [0] * len(shares)
    work = {id(chunk): chunk.entries * chunk.positions for _, _, chunk in chunks}
    for each in sorted(chunks, key=lambda each: -work[id(each[2])]):
        least = held.index(min(held))
        shares[least].chunks.append(each)
        held[least] += work[id(each[2])]
    return shares


def norms_by_unit(shares: Sequence[Share], block: int) -> dict[str, Tensor]:
    """The squared norms of the formed records' gradients in each unit: float64, (b,).

    They are added up in one order, to whomever the chunks were dealt.
    """
    norms = [share.norms.split(share.blocks, 1) for share in shares]
    of_unit: dict[str, list[tuple[int, int, int, int]]] = {}
    for hand, share in enumerate(shares):
        for i, (place, unit, chunk) in enumerate(share.chunks):
            of_unit.setdefault(unit, []).append((place, chunk.start, hand, i))
    squared = {}
    for unit, places in of_unit.items():
        order = [(hand, i) for _, _, hand, i in sorted(places)]
        read = torch.cat([norms[hand][i] for hand, i in order], 1).double()
        parts = [shares[hand].formed[i] for hand, i in order]
        squared[unit] = squared_norms_of_parts(parts, read, block=block)
    return squared


def zero_terms(sums: Sums, dtype: torch.dtype) -> Tensor:
    """Zeros to add up a term of each sum in, (k, entries)."""
    return torch.zeros(sums.count, sums.entries, dtype=dtype, device=sums.device)
