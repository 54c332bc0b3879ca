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


@dataclass(frozen=True)
class FusedOuter:
    """Gradients ``sum_t outer(g[i, t], a[i, t])`` of each record, on an accelerator.

    Attributes:
        g, a: (B, T, p) and (B, T, d), both of one dtype: float32, or narrower; dense, on 64-byte
            boundaries.
        lookups: that are added.
    """

    g: Tensor
    a: Tensor
    lookups: Lookups | None = None

    @classmethod
    def of(cls, g: Tensor, a: Tensor, lookups: Lookups | None = None) -> "FusedOuter":
        if g.dtype != a.dtype:
            g, a = g.float(), a.float()
        g, a = (aligned(x.contiguous()) for x in (g, a))
        return cls(g, a, lookups)

    def squared_norms(self) -> Tensor:
        """Each record's squared norm, not read low: float64, (B,)."""
        B = len(self.g)
        squares = self.g.new_empty(B, self._tiles, dtype=torch.float64)
        if not squares.numel():
            return squares.sum(1)
        some = self.g.new_empty(LEAST, dtype=torch.float32)
        self._run(B, some, squares, some, measuring=1, begin=0, end=B, share=1)
        return squares.sum(1).mul_(RAISED_IN_FLOAT64)

    def weighted_sum(self, weights: Tensor, group: slice) -> Tensor:
        """``sum_i weights[i] * gradient_i`` over a group of records: float32, (p d,).

        Args:
            weights: float32, (B,).
        """
        # as many shares as keep the device at work
        shares = max(1, PROGRAMS // max(1, self._tiles))
        terms = self._terms(weights, group, -(-(group.stop - group.start) // shares))
        return terms[0] if len(terms) == 1 else terms.sum(0)

    def _terms(self, weights: Tensor, group: slice, share: int) -> Tensor:
        """The sums of so many records each: float32, (shares, p d)."""
        entries = self.g.shape[2] * self.a.shape[2]
        shares = 0 if group.stop == group.start else -(-(group.stop - group.start) // share)
        terms = self.g.new_empty(shares, entries, dtype=torch.float32)
        if terms.numel():
            some = self.g.new_empty(LEAST, dtype=torch.float64)
            records = {"begin": group.start, "end": group.stop, "share": share}
            self._run(shares, aligned(weights), some, terms, measuring=0, **records)
        return terms

    def add_weighted_sums(self, sums: Sums, weights: Tensor, groups: Groups) -> None:
        """As of `PerSampleGrad`; records of weight zero need not be finite."""
        narrow = weights.float()
        for group in all_groups(groups):
            many = group.stop - group.start > GROUP_ROWS
            of_group = self._exact_sum if many else self.weighted_sum
            terms = [of_group(each, group) for each in narrow]
            sums.add(terms[0] if len(terms) == 1 else torch.cat(terms))

    def _exact_sum(self, weights: Tensor, group: slice) -> Tensor:
        """`weighted_sum` in float64, of any number of records."""
        entries = self.g.shape[2] * self.a.shape[2]
        total = self.g.new_zeros(entries, dtype=torch.float64)
        for part in parts_of(group, entries, MEMORY_CAP):
            total += self._terms(weights, part, share=1).sum(0, dtype=torch.float64)
        return total

    @property
    def _blocks(self) -> tuple[int, int, int]:
        """Positions, rows and columns that are multiplied at a time."""
        wide = WIDE if self.g.dtype in NARROW else WIDE // 2
        rows, columns = (
            min(wide, max(LEAST, 1 << (x.shape[2] - 1).bit_length())) for x in (self.g, self.a)
        )
        return (64 if self.g.dtype in NARROW else 32), rows, columns

    @property
    def _tiles(self) -> int:
        _, rows, columns = self._blocks
        return -(-self.g.shape[2] // rows) * -(-self.a.shape[2] // columns)

    def _edges(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """Lookups, and where each row of tiles begins among a record's."""
        if self.lookups is None:
            none = self.g.new_empty(LEAST, dtype=torch.float32)
            return none.int(), none, none.int(), 0
        index, (_, rows, _) = self.lookups.index, self._blocks
        ends = torch.arange(-(-self.g.shape[2] // rows) + 1, device=index.device) * rows
        ends = ends.int().expand(len(index), -1).contiguous()
        edges = torch.searchsorted(index, ends, out_int32=True)
        return index, self.lookups.values, edges, index.shape[1]

    def _run(
        self, turns: int, weights: Tensor, squares: Tensor, total: Tensor, **settings: int
    ) -> None:
        positions, rows, columns = self._blocks
        index, values, edges, lookups = self._edges()
        narrow = self.g.dtype in NARROW
        with on_device_of(self.g):
            kernel()[(self._tiles * turns,)](
                *(self.g, self.a, weights, squares, total, index, values, edges),
                **settings,
                T=self.g.shape[1],
                p=self.g.shape[2],
                d=self.a.shape[2],
                lookups=lookups,
                LOOKED_UP=self.lookups is not None,
                BLOCK_T=positions,
                BLOCK_P=rows,
                BLOCK_D=columns,
                PRECISION="ieee" if narrow else "tf32x3",
                num_warps=8 if rows * columns > 64 * 64 else 4,
            )


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
        found = FusedOuter.of(g, a).weighted_sum(torch.ones(2, device=device), slice(0, 2))
    except torch.OutOfMemoryError:
        raise  # says nothing of what the device can do
    except Exception:  # whatever a compiler says of a device that it does not know
        return False
    return torch.equal(found.view(4, 5), g.sum((0, 1))[:, None].expand(4, 5))
