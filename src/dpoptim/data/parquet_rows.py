"""Rows of Parquet files larger than memory: an array read by row groups, one at a time."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dpoptim.data.arrow_files import FIX, column_values, import_arrow, names_and_kinds
from dpoptim.data.column_names import shown_names
from dpoptim.data.opened_files import decoding

WHAT = "a Parquet file"


class ParquetRows:
    """Columns of numbers as a matrix of shape (rows, columns), for the estimators' ``fit``.

    Slices of rows are read when they are asked for; the row group that was read last stays in
    memory.

    Args:
        paths: one Parquet file, or several, one after the other.
        columns: names of columns of numbers, in the matrix's order. Nulls become NaN, and a row
            with one counts as zero where rows are clipped.
        part: ``(rank, size)``: only each size-th row group of all files, from the rank-th on: one
            process's shard. The row groups of parts are disjoint, and together they are all.
        dtype: float32 or float64.

    Raises:
        FileNotFoundError, ValueError: a file or column that is not there or holds no numbers, or a
            part without a row group.
    """

    ndim = 2

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        columns: Sequence[str],
        *,
        part: tuple[int, int] = (0, 1),
        dtype: DTypeLike = np.float32,
    ) -> None:
        self._pa = import_arrow()
        self.dtype, self.columns = np.dtype(dtype), tuple(columns)
        if self.dtype not in (np.float32, np.float64):
            raise ValueError(f"dtype must be float32 or float64, got {dtype!r}.")
        rank, size = part
        if not 0 <= rank < size:
            raise ValueError(f"part must be (rank, size) with 0 <= rank < size, got {part!r}.")
        files = [paths] if isinstance(paths, str | Path) else list(paths)
        groups = [(Path(path), group) for path in files for group in self._groups(Path(path))]
        self._own = groups[rank::size]
        if not self._own:
            raise ValueError(
                f"part={part!r} has no row group. Fix: fewer processes, or files that are written "
                "with smaller row groups."
            )
        self._ends = list(accumulate(self._rows(*each) for each in self._own))
        self._range = range(self._ends[-1])
        self._kept: tuple[int, NDArray[Any]] | None = None

    def __len__(self) -> int:
        return len(self._range)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), len(self.columns)

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        """Rows ``start:stop``; no other step."""
        wanted = self._range[rows]
        if wanted.step != 1:
            raise ValueError("rows are read in their order: slices have no step but 1.")
        out = np.empty((len(wanted), len(self.columns)), self.dtype)
        at = wanted.start
        while at < wanted.stop:
            number = bisect_right(self._ends, at)
            start, end = self._ends[number - 1] if number else 0, self._ends[number]
            stop = min(end, wanted.stop)
            out[at - wanted.start : stop - wanted.start] = self._read(number)[
                at - start : stop - start
            ]
            at = stop
        return out

    def rows(self, start: int, stop: int) -> "ParquetRows":
        """A part of the rows, not read yet."""
        part = object.__new__(type(self))
        part.__dict__.update(self.__dict__)
        part._range = self._range[start:stop]
        return part

    def column(self, name: str) -> NDArray[Any]:
        """One column (labels, targets) of the same rows, all of it in memory: numbers, or text."""
        first, last = bisect_right(self._ends, self._range.start), len(self._own)
        parts = []
        for path, group in self._own[first:last]:
            refuse_missing(path, [name], [known for known, _ in names_and_kinds(path)])
            with decoding(path, WHAT, FIX), self._pa.parquet.ParquetFile(path) as file:
                table = file.read_row_group(group, columns=[name])
                parts.append(np.asarray(column_values(self._pa, table.column(0))))
        before = self._ends[first - 1] if first else 0
        whole = np.concatenate(parts)
        return whole[self._range.start - before : self._range.stop - before]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return self[:].astype(dtype or self.dtype, copy=False)

    def _groups(self, path: Path) -> range:
        kinds = dict(names_and_kinds(path))
        refuse_missing(path, self.columns, list(kinds))
        for name in self.columns:
            if kinds[name] != "number":
                raise ValueError(f"column {name!r} of {path} holds no numbers. Fix: leave it out.")
        with decoding(path, WHAT, FIX), self._pa.parquet.ParquetFile(path) as file:
            return range(file.num_row_groups)

    def _rows(self, path: Path, group: int) -> int:
        with decoding(path, WHAT, FIX), self._pa.parquet.ParquetFile(path) as file:
            return int(file.metadata.row_group(group).num_rows)

    def _read(self, number: int) -> NDArray[Any]:
        if self._kept is None or self._kept[0] != number:
            self._kept = None  # one at a time
            path, group = self._own[number]
            with decoding(path, WHAT, FIX), self._pa.parquet.ParquetFile(path) as file:
                table = file.read_row_group(group, columns=list(self.columns))
                matrix = np.empty((table.num_rows, len(self.columns)), self.dtype)
                for j, name in enumerate(self.columns):
                    column = table.column(name).cast(self._pa.float64())
                    matrix[:, j] = column.to_numpy(zero_copy_only=False)
            self._kept = number, matrix
        return self._kept[1]


def refuse_missing(path: Path, wanted: Sequence[str], known: list[str]) -> None:
    for name in wanted:
        if name not in known:
            raise ValueError(f"{path} has no column {name!r}; it has {shown_names(known)}.")
