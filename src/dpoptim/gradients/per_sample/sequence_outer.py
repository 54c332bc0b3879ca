"""Gradients that are sums over positions or time steps: lazy, or by ghost norms first."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Self

import torch
from torch import Tensor

from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic.batch_invariant import (
    matrices,
    record_matrices,
    record_products,
    with_dense_rows,
)
from dpoptim.gradients.arithmetic.multiplication import onednn_forms_gradients, plain
from dpoptim.gradients.arithmetic.norms import NORM_BLOCK, raised, row_squared_norms
from dpoptim.gradients.arithmetic.onednn import INNER, filled_up, transposed_product
from dpoptim.gradients.arithmetic.precision import NARROW, multiplies_narrow, widened
from dpoptim.gradients.arithmetic.products import Groups, add_weighted_rows
from dpoptim.gradients.choose_formula import (
    CLAIMED_POSITIONS,
    PublicSizes,
    may_keep,
)
from dpoptim.gradients.per_sample import fused_outer, native
from dpoptim.gradients.per_sample.fused_factors import (
    Factors,
    FusedLayer,
    Lookups,
    Way,
    way_there,
)
from dpoptim.gradients.per_sample.ghost_norms import (
    Claims,
    add_claimed,
    add_claimed_in_turn,
    ghost_squared_norms,
)
from dpoptim.gradients.per_sample.joined import over_positions
from dpoptim.gradients.per_sample.parts import (
    add_group,
    all_groups,
    flat_view,
    most_at_once,
    parts_of,
    records_at_once,
)
from dpoptim.gradients.per_sample.per_sample_grads import (
    Chunk,
    Outer,
    PerSampleGrad,
    record_by,
    zero_outside,
)

GHOST_SLACK = 2.0**-20  # relative; more than forming and measuring round away
SHORT, FEW_ENTRIES = 64, 1 << 16  # positions and entries: see `SequenceOuter.short`
WHOLE = 16  # numbers of a widest vector
CHUNK = 1 << 18  # entries that a thread forms, measures and adds up at a time: they stay in cache
PIECE = 1 << 14  # the same where norms are claimed: small layers have one for each of a few threads
TILE = 2 * native.PANEL  # rows in two panels


@dataclass
class SequenceOuter(PerSampleGrad):
    """Gradients ``sum_t outer(g[i, t], a[i, t])``: g of shape (B, T, p), a of (B, T, d).

    What autocast made narrow is widened where gradients are formed, a part at a time, or measured,
    unless the device multiplies it to float32 as it is.

    On accelerators `fused_outer` measures and adds them, several layers at a time. Elsewhere
    they are formed, and kept for the sum where memory allows (see `Lazy`). Where that is dear they
    are formed for one record after the other (`alone`: see `record_by_record`). Where that takes
    too much memory as well, `ghost_norms` gets by without: the norm that enters the clip factor is
    the *ghost norm*, by the Gram form ``sum_st (a_s . a_t)(g_s . g_t)``, which may err; then the
    gradients are formed to be summed (with `alone`, one by one), and whichever is longer than its
    ghost norm is shortened to that. So the bound holds whatever the rounding of ghost norms.

    Attributes:
        most: records that a pass may have, public.
        fused: how `fused_outer` measures them, if it does.
        short: whether filling up so few positions for oneDNN costs more than it gains.
        rows: positions of each record where these are a record's rows, each of one position;
            public.
    """

    g: Tensor
    a: Tensor
    ghost_norms: bool = False
    most: int = 1
    alone: bool = False
    fused: Way | None = None
    short: bool = False
    rows: int | None = None
    _kept: Tensor | None = field(default=None, repr=False)
    _ghost: Tensor | None = field(default=None, repr=False)
    _longest: Tensor | None = field(default=None, repr=False)
    _block: int = NORM_BLOCK

    def longest(self) -> Tensor | None:
        """The squared norm of each record's longest ``g[i, t]``: Gram products overflow by it."""
        return self._longest

    @property
    def entries(self) -> int:
        return self.g.shape[2] * self.a.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the gradients."""
        return torch.float32 if self.g.dtype in NARROW else self.g.dtype

    def chosen(self, public: PublicSizes) -> Self:
        positions = self.rows or public.positions
        if all(map(fused_outer.serves, (self.g, self.a))):  # of two dtypes the wider is used
            p, d = self.g.shape[2], self.a.shape[2]
            way = way_there(public, positions, p, d, self.g.dtype)
            return replace(self, most=public.most, fused=way)
        kept = replace(self, most=public.most, alone=False, short=False, ghost_norms=False)
        return kept if positions is None else kept._by_positions(public, positions)

    def _by_positions(self, public: PublicSizes, positions: int) -> Self:
        p, d = self.g.shape[2], self.a.shape[2]
        here = self.g.device.type == "cpu" and self.dtype == torch.float32
        compiled = native.serves(self.g.new_empty(0, dtype=self.dtype))
        way = public.over_positions(positions, p, d, here=here, compiled=compiled)
        if way is None:
            return self
        short = positions % INNER > 0 and positions < SHORT and p * d <= FEW_ENTRIES
        return replace(self, alone=way.alone, short=short, ghost_norms=way.claimed)

    def in_turn(self) -> Self | None:
        return self if self.alone and not self.ghost_norms else None

    def bias(self) -> PerSampleGrad:
        """Gradients of the bias beside such a weight."""
        return over_positions(self.g)

    def sides(self, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """``g`` and ``a`` of some records, in the dtype of the gradients."""
        g, a = widened([self.g[part], self.a[part]])
        return g, a

    def materialise(self, records: slice) -> Tensor:
        return self.form(records) if self._kept is None else self._kept[records]

    def form(self, part: slice, out: Tensor | None = None) -> Tensor:
        """Gradients of some records, (b, entries), in ``out`` if given, on 64-byte boundaries."""
        room = None if out is None else self._as_matrices(out)
        both_narrow = self.g.dtype in NARROW and self.a.dtype == self.g.dtype
        as_they_are = both_narrow and multiplies_narrow(self.g.device, self.g.dtype)
        g, a = (self.g[part], self.a[part]) if as_they_are else self.sides(part)
        together = records_at_once(self.entries, most_at_once(self.g.device))
        return flat_view(record_products(g, a, room, together=together))

    def one_by_one(self) -> list[Chunk]:
        """Chunks of a few rows of the weight each."""
        (_, T, d), p = self.a.shape, self.g.shape[2]
        rows = max(WHOLE, CHUNK // d // WHOLE * WHOLE)
        ends = [(start, min(start + rows, p)) for start in range(0, p, rows)]
        like = self.g.new_empty(0, dtype=self.dtype)
        if native.serves(like) and plain(self.g) and plain(self.a):
            return [self._compiled(start, end) for start, end in ends]
        if rows >= p and not self._onednn_forms(p):
            return [Chunk(0, p * d, self.form_rows(0, p), self.form, positions=T)]
        return [
            Chunk(start * d, (end - start) * d, self.form_rows(start, end), positions=T)
            for start, end in ends
        ]

    def _compiled(self, start: int, stop: int) -> Chunk:
        """Chunk of these rows that compiled functions form and measure: see `native`."""
        g, a = self.g[:, :, start:stop], self.a
        (_, T, rows), d = g.shape, a.shape[2]

        def form(part: slice, room: Tensor, norms: Tensor, block: int) -> None:
            of_part = widened([g[part], a[part]])
            left, right = map(with_dense_rows, of_part)
            native.outer(left, right, room, norms, block)

        def add(part: slice, total: Tensor, weights: Sequence[float], pieces: slice) -> Tensor:
            some = slice(pieces.start * piece, min(pieces.stop * piece, rows))
            of_part = widened([g[part][:, :, some], a[part]])
            left, right = map(with_dense_rows, of_part)
            into = total[some.start * d : some.stop * d]
            return native.add_outer(left, right, into, weights, piece)

        entries, piece = rows * d, rows_of_piece(rows, d)
        return Chunk(
            *(start * d, entries, record_by(form, entries)),
            form_measured=form,
            form_added=add if T <= CLAIMED_POSITIONS else None,
            pieces=-(-rows // piece),
            positions=T,
        )

    def _onednn_forms(self, rows: int) -> bool:
        like = self.g.new_empty(0, dtype=self.dtype)
        return not self.short and onednn_forms_gradients(like, rows, self.a.shape[2])

    def form_rows(self, start: int, stop: int) -> Callable[[int], Tensor]:
        """Returns what forms these rows of one record's gradient: see `Chunk`."""
        (_, T, d), rows = self.a.shape, stop - start
        onednn = self._onednn_forms(rows)
        g = self.g[:, :, start:stop]
        if not onednn:
            left, right = (record_matrices(x) for x in (g, self.a))
            return lambda record: torch.mm(left(record).T, right(record)).view(-1)
        slopes, inputs = g.unbind(), self.a.unbind()
        if T % INNER or g.dtype in NARROW or self.a.dtype in NARROW:
            fill_left, fill_right = filled_up(T, rows, self.g), filled_up(T, d, self.g)
            return lambda record: transposed_product(
                fill_left(slopes[record]), fill_right(inputs[record])
            ).view(-1)
        of_inputs = record_matrices(self.a)
        return lambda record: transposed_product(slopes[record], of_inputs(record)).view(-1)

    def in_order(self, total: Tensor) -> Tensor:
        return total

    def _as_matrices(self, out: Tensor) -> Tensor:
        return out.unflatten(1, (self.g.shape[2], self.a.shape[2]))

    def _room(self, records: int) -> Tensor:
        return flat_view(
            matrices(
                records,
                self.g.shape[2],
                self.a.shape[2],
                like=self.g.new_empty(0, dtype=self.dtype),
            )
        )

    def squared_norms(self, groups: Groups, block: int = NORM_BLOCK) -> Tensor:
        self._block = block
        if self.ghost_norms:
            self._ghost, self._longest = self._ghost_norms(groups, block)
            # by what measuring reads too high, so that hardly anything is shortened
            if self.dtype == torch.float32:
                raised(self._ghost, self.entries, block).mul_(1 + GHOST_SLACK)
            return self._ghost
        records = len(self.g)
        if may_keep(self.most, self.entries):
            self._kept = self._room(records)
        squared = []
        for part in chain.from_iterable(self._parts(group) for group in all_groups(groups)):
            formed = self.form(part, None if self._kept is None else self._kept[part])
            squared.append(row_squared_norms(formed, block=block))
        return squared[0] if len(squared) == 1 else torch.cat(squared)

    def _parts(self, group: slice) -> Iterator[slice]:
        return parts_of(group, self.entries, most_at_once(self.g.device))

    def fused_layer(self) -> FusedLayer | None:
        if self.fused is None:
            return None
        return FusedLayer.of(Factors.of(self.g, self.a, self._lookups()), self.fused)

    def _lookups(self) -> Lookups | None:
        return None

    def _ghost_norms(self, groups: Groups, block: int) -> tuple[Tensor, Tensor]:
        """Squared ghost norms, and those of the longest ``g[i, t]``: float64, (B,) each."""
        return ghost_squared_norms(*self.sides())

    def add_weighted_sums(self, sums: Sums, weights: Tensor, groups: Groups) -> None:
        if self._kept is not None:
            add_weighted_rows(sums, self._kept, weights, groups)
            return
        form = self._in_one_room()
        for group in all_groups(groups):
            if self._ghost is None:
                add_group(
                    sums,
                    group,
                    self._parts(group),
                    lambda part: (form(part), weights[:, part]),
                )
            elif self.alone:
                add_claimed_in_turn(self, sums, group, weights, self._claims(self._ghost))
            else:
                add_claimed(form, sums, group, weights, self._claims(self._ghost))

    def _claims(self, ghost: Tensor) -> Claims:
        at_once = self.dtype == torch.float32 and self.g.is_cpu
        return Claims(ghost, self.entries, self._block, at_once=at_once)

    def _in_one_room(self) -> Callable[[slice], Tensor]:
        """`form` for one part after the other, in the same memory."""
        room: Tensor | None = None

        def form(part: slice) -> Tensor:
            nonlocal room
            if room is None or len(room) < part.stop - part.start:
                room = self._room(part.stop - part.start)
            return self.form(part, room[: part.stop - part.start])

        return form

    def without(self, keep: Tensor) -> Self:
        kept = None if self._kept is None else zero_outside(self._kept, keep)
        ghost = None if self._ghost is None else zero_outside(self._ghost, keep)
        return replace(
            self,
            g=zero_outside(self.g, keep),
            a=zero_outside(self.a, keep),
            _kept=kept,
            _ghost=ghost,
        )


def rows_of_piece(rows: int, columns: int) -> int:
    """Rows of a piece that is added by one thread: of 1, 2, 4, 8... equal ones."""
    pieces = 1 << max(0, math.ceil(math.log2(max(1, rows * columns) / PIECE)))
    return max(TILE, -(-rows // pieces // TILE) * TILE)


def positions(g: Tensor, a: Tensor) -> Outer | SequenceOuter:
    """Gradients ``sum_t outer(g[i, t], a[i, t])``: g of shape (B, ..., p), a of shape (B, ..., d).

    That there is one position is no reason for `Outer`, which rounds otherwise: how many there are
    may depend on the longest record of the batch. Only where there is no axis of positions it is.
    """
    return Outer(*widened([g, a])) if g.dim() == 2 else SequenceOuter(one_axis(g), one_axis(a))


def one_axis(x: Tensor) -> Tensor:
    """(B, ..., n) with one axis of positions, (B, T, n); axes with no entries give empty sums."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
