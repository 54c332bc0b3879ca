"""Tables of which few rows hold a sum, in memory for these rows: noise writes the others out."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class Rows(ctypes.Structure):
    """As in `ziggurat.c`."""

    _fields_ = (
        ("first", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("row", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class FewRows:
    """A stretch of a table's entries, which are 0 but for some rows, and where noise writes it.

    Attributes:
        out: for the stretch with noise on every entry, or without: flat, contiguous, float32 or
            float64. Nothing is read from it.
        first: the entry of the table that the stretch begins with.
        row: the rows that hold a sum: different ones, ascending, int64, (m,).
        value: what they hold, float64, (m, columns), contiguous.

    **Guarantee.** What `gaussian` writes is, to the last bit, what it makes of `dense`, rounded
    to the dtype of ``out``: every entry gets noise, whether or not a record looked its row up, so
    nothing but the noisy sum tells which rows were.
    """

    out: Tensor
    first: int
    row: Tensor
    value: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.out.dtype

    @property
    def device(self) -> torch.device:
        return self.out.device

    @property
    def is_cpu(self) -> bool:
        return self.out.is_cpu

    def __len__(self) -> int:
        return len(self.out)

    def numel(self) -> int:
        return len(self.out)

    def __getitem__(self, part: slice) -> "FewRows":
        start, stop, _ = part.indices(len(self))
        columns = self.value.shape[1]
        begin, end = self.first + start, self.first + stop
        edges = torch.tensor([begin // columns, -(-end // columns)], device=self.row.device)
        low, high = torch.searchsorted(self.row, edges).tolist()
        return FewRows(self.out[part], begin, self.row[low:high], self.value[low:high])

    def dense(self) -> Tensor:
        """The stretch in float64, (n,)."""
        columns = self.value.shape[1]
        before = self.first % columns
        total = self.value.new_zeros(-(-(before + len(self)) // columns), columns)
        whole = self[:]  # without rows that other stretches hold
        total.index_copy_(0, whole.row - self.first // columns, whole.value)
        return total.view(-1)[before : before + len(self)]

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Some entries of the stretch, in float64, as of a tensor."""
        columns = self.value.shape[1]
        at = index + self.first
        row, column = at // columns, at % columns
        found = torch.zeros(len(index), dtype=torch.float64, device=index.device)
        if len(self.row):
            place = torch.searchsorted(self.row, row).clamp_(max=len(self.row) - 1)
            there = self.row[place] == row
            found[there] = self.value[place[there], column[there]]
        return found

    def index_copy_(self, dim: int, index: Tensor, values: Tensor) -> None:
        """Write some entries, as of a tensor."""
        self.out.index_copy_(0, index, values.to(self.dtype))

    def rows(self) -> Rows:
        """The structure that a compiled function reads, while this is there."""
        return Rows(
            self.first,
            self.value.shape[1],
            len(self.row),
            self.row.data_ptr(),
            self.value.data_ptr(),
        )

    def write(self) -> None:
        """Write a whole table out without noise."""
        table = self.out.zero_().view(-1, self.value.shape[1])
        table.index_copy_(0, self.row, self.value.to(self.dtype))


Vector = Tensor | FewRows


def memory_of(vectors: Sequence[Vector]) -> list[Tensor]:
    """The memory that they are in, or that noise writes them out in."""
    return [each.out if isinstance(each, FewRows) else each for each in vectors]


def write_out(vectors: Sequence[Vector]) -> list[Tensor]:
    """Write them out without noise."""
    for each in vectors:
        if isinstance(each, FewRows):
            each.write()
    return memory_of(vectors)
