"""Sparse tables: a few of their rows are dense at a time, and the table never."""

from collections.abc import Callable, Iterator
from copy import copy
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array, csr_matrix, issparse, sparray

Floats = NDArray[np.float64]
Places = NDArray[np.intp]
# maps entries, and the columns that they are in, to others
EntryMap = Callable[[Floats, Any], Floats]
TWO_AXES = (
    "Expected 2D array: X must have one row a record and one column a feature. Reshape your data. "
    "Fix: X[:, None] for a single feature, X[None, :] for a single record."
)
BLOCK = 1 << 13  # rows at a time, at most
CELLS = 1 << 24  # at a time: numbers, those that are zero included
WIDE = CELLS // BLOCK  # columns beyond which linear models go through entries, and not through rows


def rows_at_once(features: int, most: int = BLOCK) -> int:
    """Rows that are made dense at a time. Args: features: columns, public."""
    return max(1, min(most, CELLS // max(features, 1)))


def count_rows(x: Any) -> int:
    """Rows of any table; SciPy's have no length, nor has everything that becomes an array."""
    if hasattr(x, "__len__") and not issparse(x):
        return len(x)
    shape = shape_of(x)
    if not shape:
        raise ValueError(TWO_AXES)
    return shape[0]


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of any table, sparse or a list of rows, too."""
    return tuple(x.shape) if hasattr(x, "shape") else np.asarray(x).shape


def with_rows(x: Any) -> Any:
    """A table whose rows can be taken by their places: an array, or a `canonical` table."""
    return canonical(x) if issparse(x) else np.asarray(x)


def canonical(x: Any) -> Any:
    """A CSR table of what ``x.toarray()`` holds: each entry once, in order, and none of them 0.

    So what is stored explicitly, how often and in which order decides nothing, but for the last
    bit of an entry in three pieces or more: these are added in their order, as SciPy adds them. It
    is the record's own order, and moves no other record's entries. SciPy's own marks of a canonical
    form are not relied on, since whoever writes into a table does not update them.

    Args:
        x: any of SciPy's sparse arrays or matrices, with two axes. It is not changed.

    Raises:
        ValueError: entries do not fit the shape.
    """
    entries = entries_of(x)
    order = np.lexsort((entries.col, entries.row))  # stable: repeated ones stay in their order
    row, column, values = entries.row[order], entries.col[order], entries.data[order]
    new = np.ones(len(values), dtype=bool)
    new[1:] = (np.diff(row) != 0) | (np.diff(column) != 0)
    if not new.all():
        added = np.zeros(int(new.sum()), values.dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # a warning would tell
            np.add.at(added, np.cumsum(new) - 1, values)  # one after the other, as toarray does
        row, column, values = row[new], column[new], added
    there = values != 0
    kind = csr_array if isinstance(x, sparray) else csr_matrix
    return kind((values[there], (row[there], column[there])), shape=x.shape)


def entries_of(x: Any) -> coo_array:
    """The entries of a sparse table, as stored.

    Raises:
        ValueError: they do not fit its shape. SciPy's own errors quote an entry's place, and it
            writes beyond its arrays where rows end beyond them.
    """
    try:
        if hasattr(x, "check_format"):
            copy(x).check_format()  # which changes what it looks at
        return coo_array(x)
    except ValueError:
        pass
    raise ValueError(
        "X is a damaged sparse table: what it stores does not fit its shape. Fix: make it anew; "
        "SciPy's X.check_format() says what is wrong, and may quote an entry's place."
    )


class SparseRows:
    """A canonical CSR table, whose slices are dense: (rows, features), in the table's dtype.

    Args:
        table: as `canonical` makes it.
    """

    ndim = 2

    def __init__(self, table: Any) -> None:
        self.table = table
        self.shape: tuple[int, int] = table.shape
        self.dtype = table.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | Places) -> NDArray[Any]:
        """Dense rows; for places of any shape, shape (*places.shape, features)."""
        if isinstance(rows, slice):
            return self.table[rows].toarray()
        return self.table[rows.ravel()].toarray().reshape(*rows.shape, self.shape[1])

    @property
    def wide(self) -> bool:
        """Whether it has so many columns that linear models go through its entries alone."""
        return self.shape[1] > WIDE

    def rows(self, start: int, stop: int) -> "SparseRows":
        """A part of the rows."""
        return SparseRows(self.table[start:stop])

    def entries(self) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """All entries, and the columns that they are in, (k,) each, some at a time."""
        for start in range(0, len(self.table.data), CELLS):
            here = slice(start, start + CELLS)
            yield self.table.data[here], self.table.indices[here]

    def entries_of_columns(self) -> Iterator[NDArray[Any]]:
        """The entries of each column, (k,), one column after the other; its other values are 0."""
        by_column = self.table.tocsc()
        for start, stop in pairwise(by_column.indptr.tolist()):
            yield by_column.data[start:stop]

    def mapped(self, change: EntryMap) -> Any:
        """Every entry changed: a sparse table where 0 stays 0 in all columns, else a dense one.

        Args:
            change: of entries and their columns, (k,) each or (rows, features) and ``...``.

        **Guarantee.** None: private. Whether it is sparse depends on ``change`` alone.
        """
        if change(np.zeros(self.shape[1]), ...).any():
            whole = np.empty(self.shape)
            step = rows_at_once(self.shape[1])
            for start in range(0, len(self), step):
                here = slice(start, start + step)
                whole[here] = change(self[here], ...)
            return whole
        found = self.table.astype(np.float64)
        found.data = change(found.data, found.indices)
        return found


class EntriesOfRows:
    """Rows of a CSR table, whose slices are CSR tables again."""

    def __init__(self, table: Any) -> None:
        self.table = table
        self.shape: tuple[int, int] = table.shape

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Any:
        return self.table[rows]


def row_of_entries(table: Any) -> Places:
    """The row of each entry of a CSR table, shape (entries,)."""
    return np.repeat(np.arange(table.shape[0]), np.diff(table.indptr))


def clip_entries(table: Any, norm: float) -> Any:
    """`estimators.table.clip_rows` of a canonical CSR table, by its entries; float64.

    **Guarantee.** Rows are at most ``norm (1 + 2^-40)`` long; one that holds what is not finite is
    zero. Each depends on its own entries alone.
    """
    row, n = row_of_entries(table), table.shape[0]
    values = table.data.astype(np.float64)
    odd = np.bincount(row, ~np.isfinite(values), minlength=n) > 0
    values[odd[row]] = 0.0
    largest = np.zeros(n)
    np.maximum.at(largest, row, np.abs(values))
    largest[largest == 0] = 1.0
    squares = np.bincount(row, np.square(values / largest[row]), minlength=n)
    with np.errstate(over="ignore"):  # infinite: the row is scaled to zero
        length = largest * np.sqrt(squares)
    values *= (norm / np.maximum(length, norm))[row]
    return csr_array((values, table.indices, table.indptr), shape=table.shape)
