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

import importlib.util
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dpoptim.gradients.arithmetic import NARROW
from dpoptim.gradients.batch_invariant import aligned
from dpoptim.gradients.choose_formula import MEMORY_CAP
from dpoptim.gradients.norms import RAISED_IN_FLOAT64
from dpoptim.gradients.parts import all_groups, parts_of
from dpoptim.gradients.products import GROUP_ROWS, Groups
from dpoptim.gradients.sums import Sums

WIDE, LEAST = 128, 16  # rows or columns of a tile, at most and at least
PROGRAMS = 512  # that keep a large GPU at work
OTHERS = ("xpu",)  # kinds of accelerator that Triton compiles for, beside "cuda" (and ROCm's)


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
    """

    def __init__(self, g: Tensor, a: Tensor, lookups: Lookups | None = None) -> None:
        if g.dtype != a.dtype:
            g, a = g.float(), a.float()
        if not g.shape[1]:  # nothing would be written
            g, a = (x.new_zeros(len(x), 1, x.shape[2]) for x in (g, a))
        # both passes get the same addresses and strides, and so the same compiled function
        self._g, self._a = (aligned(x.contiguous()) for x in (g, a))
        self._records, self._shape = len(g), (g.shape[2], a.shape[2])
        narrow = g.dtype in NARROW
        rows, columns = (
            min(WIDE if narrow else WIDE // 2, max(LEAST, 1 << (size - 1).bit_length()))
            for size in self._shape
        )
        down, wide = -(-g.shape[2] // rows), -(-a.shape[2] // columns)
        self.tiles = down * wide if min(self._shape) else 0
        self._nothing = placeholders(g.device)
        self._tables, each = self._nothing[1:], 0
        if lookups is not None:
            self._tables = lookups.index, lookups.values, lookups.edges(rows, down)
            each = lookups.index.shape[1]
        self._constants = {
            **{"T": self._g.shape[1], "p": g.shape[2], "d": a.shape[2], "lookups": each},
            **{"LOOKED_UP": lookups is not None, "BLOCK_T": 64 if narrow else 32},
            **{"BLOCK_P": rows, "BLOCK_D": columns, "PRECISION": "ieee" if narrow else "tf32x3"},
            **{"num_warps": 8 if rows * columns > 64 * 64 else 4},
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
            share = self._share(self._records)
            part = slice(0, self._records)
            weights, total = self._nothing[0], self._nothing[2]
            self._run(part, share, (weights, squares, total), 1, column, squares.shape[1], 0)

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
        terms = self._terms(weights, way, group, self._share(group.stop - group.start))
        return terms[0] if len(terms) == 1 else terms.sum(0)

    def _exact_sum(self, weights: Tensor, way: int, group: slice) -> Tensor:
        """The same in float64, of any number of records."""
        total = self._g.new_zeros(math.prod(self._shape), dtype=torch.float64)
        for part in parts_of(group, len(total), MEMORY_CAP):
            total += self._terms(weights, way, part, 1).sum(0, dtype=torch.float64)
        return total

    def _terms(self, weights: Tensor, way: int, group: slice, share: int) -> Tensor:
        """The sums of so many records each: float32, (shares, p d)."""
        shares = -(-(group.stop - group.start) // share)
        terms = self._g.new_empty(shares, math.prod(self._shape), dtype=torch.float32)
        if terms.numel():
            self._run(group, share, (weights, self._nothing[0], terms), 0, 0, 0, way)
        return terms

    def _share(self, records: int) -> int:
        """Records that a program takes in turn: by the layer's shape, and how many there are."""
        return max(1, -(-records // max(1, PROGRAMS // max(1, self.tiles))))

    def _run(
        self,
        group: slice,
        share: int,
        tensors: tuple[Tensor, Tensor, Tensor],
        *numbers: int,
    ) -> None:
        """Run `measure_or_add` on some records, ``share`` of them for each program."""
        measuring, column, across, way = numbers
        turns = -(-(group.stop - group.start) // share)
        with on_device_of(self._g):
            kernel()[(self.tiles * turns,)](
                *(self._g, self._a, *tensors, *self._tables),
                *(measuring, group.start, group.stop, share, column, across, way, self._records),
                **self._constants,
            )


def squared_norms_together(several: Sequence[FusedOuter]) -> Tensor:
    """Squared norms of the gradients of several layers together, not read low: float64, (B,)."""
    first = several[0]
    squares = first._g.new_empty(
        first._records, sum(each.tiles for each in several), dtype=torch.float64
    )
    column = 0
    for each in several:
        each.measure(squares, column)
        column += each.tiles
    return squares.sum(1).mul_(RAISED_IN_FLOAT64)


@cache
def placeholders(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For arguments that are not used: float64, int32, float32 and int32."""
    dtypes = torch.float64, torch.int32, torch.float32, torch.int32
    some = [torch.zeros(LEAST, dtype=dtype, device=device) for dtype in dtypes]
    return some[0], some[1], some[2], some[3]


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """A kernel runs on the current device, whatever its tensors lie on."""
    return torch.get_device_module(x.device).device(x.device)


@cache
def kernel() -> Any:
    """The compiled kernel; Triton takes a moment to import."""
    from dpoptim.gradients.outer_kernels import measure_or_add

    return measure_or_add


def serves(x: Tensor) -> bool:
    """Whether gradients made of such numbers are formed by the kernel."""
    narrow = x.dtype in NARROW or x.dtype == torch.float32
    return not x.is_cpu and narrow and compiles_on(x.device)


@cache
def compiles_on(device: torch.device) -> bool:
    """Whether Triton is there, compiles the kernel for the device, and it multiplies there."""
    if device.type not in ("cuda", *OTHERS) or importlib.util.find_spec("triton") is None:
        return False
    g = torch.arange(24.0, device=device).view(2, 3, 4)
    a = torch.ones(2, 3, 5, device=device)
    try:
        sums = Sums([20], device)
        ones = torch.ones(1, 2, dtype=torch.float64, device=device)
        FusedOuter(g, a).add_weighted_sums(sums, ones, [[2]])
    except torch.OutOfMemoryError:
        raise  # says nothing of what the device can do
    except Exception:  # whatever a compiler says of a device that it does not know
        return False
    expected = g.sum((0, 1), dtype=torch.float64)[:, None].expand(4, 5)
    return torch.equal(sums.settle()[0].view(4, 5), expected)
