"""A layer's part in `fused_outer`, in the form that its kernels read."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dpoptim.gradients.arithmetic.batch_invariant import ALIGNMENT, aligned
from dpoptim.gradients.arithmetic.multiplication import IN_A_READ
from dpoptim.gradients.arithmetic.precision import NARROW
from dpoptim.gradients.choose_formula import PublicSizes, worth_keeping_there

# Whether a layer's gradients are written once and kept for the sum; or their norms are claimed
# from Gram products, and they are formed for the sum; or they are formed for both.
Way = Literal["kept", "claimed", "twice"]

WIDE, LEAST = 128, 16  # rows or columns of a tile, at most and at least


def way_there(
    public: PublicSizes, positions: int | None, p: int, d: int, dtype: torch.dtype
) -> Way:
    """How gradients (p, d) that are sums over so many positions, if that is public, are measured.

    Args:
        dtype: of what they are made of.
    """
    if positions is None:
        return "twice"
    if worth_keeping_there(positions, p, d, dtype.itemsize):
        return "kept"
    return "claimed" if public.worth_claiming_there(positions, p, d) else "twice"


class Sizes(NamedTuple):
    """Sizes of a layer's gradients (p, d), and what the sums that they are are made of."""

    records: int
    p: int
    d: int
    dtype: torch.dtype
    device: torch.device

    @property
    def entries(self) -> int:
        return self.p * self.d

    @property
    def narrow(self) -> bool:
        return self.dtype in NARROW

    def tile(self, way: Way) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return tile_of(self.p, self.d, narrow=self.narrow, added=way != "kept")

    def tiles(self, way: Way) -> int:
        rows, columns = self.tile(way)
        return -(-self.p // rows) * -(-self.d // columns)

    @property
    def divisor(self) -> int:
        """A divisor of the columns; kernels write more at a time where it is sixteen."""
        return LEAST if self.d % LEAST == 0 else 1


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


@dataclass(frozen=True)
class Factors:
    """Both sides of a layer's gradients ``sum_t outer(g[i, t], a[i, t])``.

    Attributes:
        g, a: (B, T, p) and (B, T, d), of one dtype, float32 or narrower, as `in_rows` has them;
            maybe with zeros at the end of rows.
        p, d: the gradients' rows and columns.
        lookups: that are added.
    """

    g: Tensor
    a: Tensor
    p: int
    d: int
    lookups: Lookups | None = None

    @classmethod
    def of(cls, g: Tensor, a: Tensor, lookups: Lookups | None = None) -> "Factors":
        if g.dtype != a.dtype:
            g, a = g.float(), a.float()
        p, d = g.shape[2], a.shape[2]
        if not g.shape[1]:  # nothing would be written
            g, a = (x.new_zeros(len(x), 1, x.shape[2]) for x in (g, a))
        return cls(in_rows(g), in_rows(a), p, d, lookups)

    @cached_property
    def sizes(self) -> Sizes:
        return Sizes(len(self.g), self.p, self.d, self.g.dtype, self.g.device)

    def row(self, out: int, first: int, tiles: int) -> list[int]:
        """The layer's row of a table of `outer_kernels`.

        Args:
            out: address of what is written.
            first: the first of its tiles. tiles: how many it has.
        """
        g, a = self.g, self.a
        sizes = [g.shape[1], self.p, self.d, g.stride(1), a.stride(1)]
        return [g.data_ptr(), a.data_ptr(), out, *sizes, first, tiles]


@dataclass(frozen=True)
class FusedLayer:
    """A layer whose gradients `fused_outer` measures and adds.

    Attributes:
        way: to measure them.
        form: makes their factors, of these sizes, when they are needed.
        numbers: that are new in memory then.
        looked_up: whether the factors have lookups.
    """

    way: Way
    sizes: Sizes
    form: Callable[[], Factors]
    numbers: int = 0
    looked_up: bool = False

    @classmethod
    def of(cls, factors: Factors, way: Way) -> "FusedLayer":
        """From factors that are there."""
        looked_up = factors.lookups is not None
        return cls(way, factors.sizes, lambda: factors, looked_up=looked_up)


def in_rows(x: Tensor) -> Tensor:
    """``x`` (B, T, n) with records one after the other, in rows that begin as `IN_A_READ` asks.

    Odd rows are filled up with zeros to a multiple of that. Kernels read memory, whose signs those
    of a negated view are not.
    """
    x, size = x.resolve_neg(), x.element_size()
    if x.shape[2] * size % IN_A_READ:
        return F.pad(x, (0, -x.shape[2] % (IN_A_READ // size)))
    if x.data_ptr() % ALIGNMENT == 0 and one_after_the_other(x):
        return x
    return aligned(x.contiguous())


def one_after_the_other(x: Tensor) -> bool:
    """Whether rows are dense, begin as `IN_A_READ` asks, and do not overlap."""
    (_, T, n), (of_record, of_row, of_number) = x.shape, x.stride()
    return (
        of_number == 1
        and of_row >= n
        and of_row * x.element_size() % IN_A_READ == 0
        and (of_record == T * of_row or len(x) == 1)
    )


@lru_cache(maxsize=4096)
def tile_of(p: int, d: int, *, narrow: bool, added: bool) -> tuple[int, int]:
    """See `Sizes`.

    Args:
        added: whether registers hold a tile's sum beside the tile. Then half as many columns let
            two programs share a core, of which one multiplies while the other measures and adds.
    """
    rows = WIDE if narrow else WIDE // 2
    columns = WIDE // 2 if added else rows
    return min(rows, power_of_two(p)), min(columns, power_of_two(d))


def power_of_two(size: int) -> int:
    """The smallest one that is no less, `LEAST` at least: for the sides of a tile."""
    return max(LEAST, 1 << (size - 1).bit_length())
