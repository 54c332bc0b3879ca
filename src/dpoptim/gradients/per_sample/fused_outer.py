"""Sums of outer products on accelerators: measured, and added up, without ever being written.

A GPU forms gradients much faster than its memory takes them: those of 64 records of a ViT-B are 22
GB. So one Triton kernel forms a tile of a record's gradient in registers. In a first pass over the
layer it measures the tile and forgets it; in a second, when the clip factors are known, it forms
it again, the same instructions on the same numbers, and adds it, weighted, to the tiles of the
records before. Memory sees the factors and the sum alone.

**Guarantee.** As of `products`: what is measured of a record is what is added of it, to the last
bit, and a function of its own rows, whoever else is in the batch. A sum over a group is one of
float32, in an order that is fixed by the layer's shape and the group's size. Squares are added up
in float64. (tests/gradients/test_fused_outer.py tries to falsify it, in Triton's interpreter and on
a GPU where there is one: compilers and processors are the vendor's.)
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpoptim.gradients.adding.sums import Sums
from dpoptim.gradients.arithmetic.batch_invariant import aligned
from dpoptim.gradients.arithmetic.norms import RAISED_IN_FLOAT64
from dpoptim.gradients.arithmetic.precision import NARROW
from dpoptim.gradients.arithmetic.products import GROUP_ROWS, Groups
from dpoptim.gradients.choose_formula import MEMORY_CAP
from dpoptim.gradients.per_sample.parts import all_groups, parts_of

WIDE, LEAST = 128, 16  # rows or columns of a tile, at most and at least
PROGRAMS = 256  # that run at a time on accelerators that do not say
MOST_SHARES = 32
# what a program takes to begin, or to write a sum that others are added to, in records
MEASURED, ADDED = 0.25, 1.5
ADD, MEASURE, BOTH = 0, 1, 2  # kinds of work, as in `outer_kernels`


@dataclass(frozen=True)
class Lookups:
    """Rows of a table, looked up by each record, that are added to the gradients of the table.

    Attributes:
        index: which, ascending in each record: int32, (B, L).
        values: their gradients, float32, (B, L, d).
    """

    index: Tensor
    values: Tensor

    @classmethod
    def of(cls, index: Tensor, values: Tensor) -> "Lookups":
        """From lookups in any order; of the same row, the first comes first."""
        ordered, order = index.sort(dim=1, stable=True)
        rows = values.float().gather(1, order[:, :, None].expand_as(values))
        return cls(ordered.int(), rows)

    def edges(self, rows: int, tiles: int) -> Tensor:
        """Where each of so many tiles of ``rows`` begins and ends in `index`: (B, tiles + 1)."""
        ends = torch.arange(tiles + 1, dtype=torch.int32, device=self.index.device) * rows
        ends = ends.expand(len(self.index), -1).contiguous()
        return torch.searchsorted(self.index, ends, out_int32=True)


class FusedOuter:
    """Gradients ``sum_t outer(g[i, t], a[i, t])`` of each record, on an accelerator.

    Args:
        g, a: (B, T, p) and (B, T, d): float32, or narrower.
        lookups: that are added.
        ghost_norms: whether squared norms are claimed from Gram products, which takes less time
            where there are few positions. What is added is measured then, and added once more,
            shortened, where it is longer than was claimed. Not with lookups.
    """

    def __init__(
        self, g: Tensor, a: Tensor, lookups: Lookups | None = None, *, ghost_norms: bool = False
    ) -> None:
        if g.dtype != a.dtype:
            g, a = g.float(), a.float()
        if not g.shape[1]:  # nothing would be written
            g, a = (x.new_zeros(len(x), 1, x.shape[2]) for x in (g, a))
        # all passes get the same addresses and strides, and so the same compiled function
        self._g, self._a = map(in_rows, (g, a))
        self._records, self._entries = len(g), g.shape[2] * a.shape[2]
        self.ghost_norms = ghost_norms and lookups is None
        self._claims: Tensor | None = None
        narrow = g.dtype in NARROW
        rows, columns = (
            min(WIDE if narrow else WIDE // 2, power_of_two(x.shape[2])) for x in (g, a)
        )
        down, wide = -(-g.shape[2] // rows), -(-a.shape[2] // columns)
        self.tiles = down * wide if self._entries else 0
        self._nothing = placeholders(g.device)
        self._tables, each = (self._nothing.whole, self._nothing.single, self._nothing.whole), 0
        if lookups is not None:
            self._tables = lookups.index, lookups.values, lookups.edges(rows, down)
            each = lookups.index.shape[1]
        self._sizes = {
            **{"T": self._g.shape[1], "p": g.shape[2], "d": a.shape[2]},
            **{"row_of_g": self._g.shape[2], "row_of_a": self._a.shape[2]},
        }
        self._precision = "ieee" if narrow else "tf32x3"
        self._constants = {
            **{"lookups": each, "LOOKED_UP": lookups is not None},
            **{"BLOCK_T": 64 if narrow else 32, "BLOCK_P": rows, "BLOCK_D": columns},
            **{"PRECISION": self._precision, "num_warps": 8 if rows * columns > 64 * 64 else 4},
        }

    def squared_norms(self) -> Tensor:
        """Each record's squared norm, not read low: float64, (B,)."""
        return squared_norms_together([self])

    def measure(self, squares: Tensor, column: int) -> None:
        """Write squared norms of each record's tiles, (B, tiles), to columns of ``squares``.

        Args:
            squares: float64, (B, more).
        """
        if self.tiles and self._records:
            share = self._share(self._records, MEASURED)
            work = Work(MEASURE, squares=squares, column=column)
            self._run(work, slice(0, self._records), share)

    def claim(self) -> Tensor:
        """Squared ghost norms, raised by about their rounding: float64, (B,)."""
        self._claims = self._g.new_zeros(self._records, dtype=torch.float64)
        if not self.tiles or not self._records:
            return self._claims
        positions = self._sizes["T"]
        block = min(WIDE if self._precision == "ieee" else WIDE // 2, power_of_two(positions))
        parts = (-(-positions // block)) ** 2
        squares = self._g.new_empty(2, self._records, parts, dtype=torch.float64)
        warps = 8 if block > 64 else 4
        with on_device_of(self._g):
            kernels().gram_products[(self._records * parts,)](
                *(self._g, self._a, *squares.unbind()),
                **self._sizes,
                **{"BLOCK_T": block, "BLOCK_K": 64, "PRECISION": self._precision},
                num_warps=warps,
            )
            kernels().claim[(self._records,)](*squares.unbind(), self._claims, parts, BLOCK=LEAST)
        return self._claims

    def add_weighted_sums(self, sums: Sums, weights: Tensor, groups: Groups) -> None:
        """As of `PerSampleGrad`; records of weight zero need not be finite."""
        weights = weights.contiguous()
        for group in all_groups(groups):
            many = group.stop - group.start > GROUP_ROWS
            of_group = self._exact_sum if many else self._sum
            terms = [of_group(weights, way, group) for way in range(len(weights))]
            sums.add(terms[0] if len(terms) == 1 else torch.cat(terms))

    def _sum(self, weights: Tensor, way: int, group: slice) -> Tensor:
        """``sum_i weights[way, i] * gradient_i`` over a group of records: float32, (p d,)."""
        terms = self._terms(weights, way, group, self._share(group.stop - group.start, ADDED))
        return terms[0] if len(terms) == 1 else terms.sum(0)

    def _exact_sum(self, weights: Tensor, way: int, group: slice) -> Tensor:
        """The same in float64, of any number of records."""
        total = self._g.new_zeros(self._entries, dtype=torch.float64)
        for part in parts_of(group, self._entries, MEMORY_CAP):
            total += self._terms(weights, way, part, 1).sum(0, dtype=torch.float64)
        return total

    def _terms(self, weights: Tensor, way: int, group: slice, share: int) -> Tensor:
        """The sums of so many records each: float32, (shares, p d)."""
        shares = -(-(group.stop - group.start) // share)
        terms = self._g.new_empty(shares, self._entries, dtype=torch.float32)
        if not terms.numel():
            return terms
        work = Work(ADD, weights=weights, way=way, total=terms)
        if self._claims is None:
            self._run(work, group, share)
            return terms
        squares = self._g.new_empty(self._records, self.tiles, dtype=torch.float64)
        shorter = torch.empty_like(weights)
        exceeded = self._nothing.whole.new_zeros(LEAST)
        self._run(replace(work, kind=BOTH, squares=squares), group, share)
        with on_device_of(self._g):
            kernels().hold[(group.stop - group.start,)](
                *(squares, self._claims, weights, shorter, exceeded),
                *(group.start, way, self._records, self.tiles),
                BLOCK=WIDE,
            )
        self._run(replace(work, weights=shorter, wanted=exceeded), group, share)
        return terms

    def _share(self, records: int, overhead: float) -> int:
        """Records that a program takes in turn: by the layer's shape, and how many there are."""
        return shared(max(1, records), max(1, self.tiles), self._nothing.programs, overhead)

    def _run(self, work: "Work", group: slice, share: int) -> None:
        """Run `measure_or_add` on some records, ``share`` of them for each program."""
        turns, none = -(-(group.stop - group.start) // share), self._nothing
        squares = none.double if work.squares is None else work.squares
        across = 0 if work.squares is None else work.squares.shape[1]
        with on_device_of(self._g):
            kernels().measure_or_add[(self.tiles * turns,)](
                *(self._g, self._a, none.double if work.weights is None else work.weights),
                *(squares, none.single if work.total is None else work.total, *self._tables),
                *(none.ones if work.wanted is None else work.wanted, work.kind),
                *(group.start, group.stop, share),
                *(work.column, across, work.way, self._records),
                **self._sizes,
                **self._constants,
            )


@dataclass(frozen=True)
class Work:
    """A task of `measure_or_add`; see there."""

    kind: int
    squares: Tensor | None = None
    column: int = 0
    weights: Tensor | None = None
    way: int = 0
    total: Tensor | None = None
    wanted: Tensor | None = None


def squared_norms_together(several: Sequence[FusedOuter]) -> Tensor:
    """Squared norms of the gradients of several layers together, not read low: float64, (B,)."""
    first, column = several[0]._g, 0
    measured = [each for each in several if not each.ghost_norms]
    squares = first.new_empty(len(first), sum(each.tiles for each in measured), dtype=torch.float64)
    for each in measured:
        each.measure(squares, column)
        column += each.tiles
    claims = [each.claim() for each in several if each.ghost_norms]
    return torch.stack([squares.sum(1).mul_(RAISED_IN_FLOAT64), *claims]).sum(0)


@lru_cache(maxsize=4096)
def shared(records: int, tiles: int, programs: int, overhead: float) -> int:
    """Records that a program takes so that all end soonest, where so many run at a time.

    Args:
        overhead: what a program takes beside them, in records.
    """

    def time(shares: int) -> float:
        return -(-tiles * shares // programs) * (-(-records // shares) + overhead)

    return -(-records // min(range(1, min(records, MOST_SHARES) + 1), key=time))


@dataclass(frozen=True)
class Placeholders:
    """For arguments that are not used, on a device, and how many programs run there at a time."""

    double: Tensor
    single: Tensor
    whole: Tensor
    ones: Tensor
    programs: int


@cache
def placeholders(device: torch.device) -> Placeholders:
    dtypes = torch.float64, torch.float32, torch.int32
    double, single, whole = (torch.zeros(LEAST, dtype=dtype, device=device) for dtype in dtypes)
    cores = PROGRAMS // 2
    if device.type == "cuda":
        cores = torch.cuda.get_device_properties(device).multi_processor_count
    return Placeholders(double, single, whole, torch.ones_like(whole), 2 * cores)


def in_rows(x: Tensor) -> Tensor:
    """``x`` (B, T, n) dense, from a 64-byte boundary on; wide rows with zeros at the end.

    So each row begins where sixteen bytes can be read at a time: odd vocabularies take half the
    time. The kernel reads memory, whose signs those of a negated view are not.
    """
    x = x.resolve_neg()
    numbers = 16 // x.element_size()
    if x.shape[2] % numbers and x.shape[2] > WIDE:
        return F.pad(x, (0, -x.shape[2] % LEAST))
    return aligned(x.contiguous())


def power_of_two(size: int) -> int:
    """The smallest one that is no less, `LEAST` at least: for the sides of a tile."""
    return max(LEAST, 1 << (size - 1).bit_length())


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """A kernel runs on the current device, whatever its tensors lie on."""
    return torch.get_device_module(x.device).device(x.device)


@cache
def kernels() -> Any:
    """The compiled kernels; Triton takes a moment to import."""
    from dpoptim.gradients.per_sample import outer_kernels

    return outer_kernels
