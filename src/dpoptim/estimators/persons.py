"""Tables in which a person owns several rows: whose rows are whose, and what a row adds."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpoptim.accounting.guarantee import Guarantee
from dpoptim.arguments import whole_number
from dpoptim.data.parquet_rows import ParquetRows
from dpoptim.data.sparse_rows import count_rows
from dpoptim.distributed.ranks import Ranks
from dpoptim.estimators.shards import equal_part
from dpoptim.noise.stream import KeyStream, key_stream
from dpoptim.privacy_unit import RECORD, Unit
from dpoptim.solvers.objective import held_in_memory
from dpoptim.training.batches.privacy_units import Persons, present_rows

CHOSEN = (
    "a person's rows, at most {} of them, chosen once by coins, are clipped one by one and averaged"
)


def owners_of(x: Any, persons: Any, most: object) -> Persons | None:
    """Who owns the rows of ``x``; None where each is a record of its own.

    Raises:
        ValueError: not one owner for each row, or a table that is read from its beginning to its
            end alone.
    """
    most = whole_number("rows_per_person", most, least=1)
    if persons is None:
        return None
    if isinstance(x, ParquetRows):
        raise ValueError(
            "persons: a person's rows may lie anywhere in a Parquet file, which is read in order. "
            "Fix: an array or a memory map."
        )
    return Persons.of(persons, count_rows(x), most)


def units_in(x: Any, owners: Persons | None) -> tuple[Unit, int]:
    """Whom the guarantee protects, and how many of them there are."""
    return (RECORD, count_rows(x)) if owners is None else (Unit("person", owners.most), len(owners))


def of_persons(
    owners: Persons,
    data: tuple[Any, NDArray[Any], NDArray[np.float64] | None, NDArray[np.float64] | None],
    ranks: Ranks,
    *,
    sharded: bool,
    noise_seed: int | None,
    in_order: bool,
    neighboring: str,
) -> tuple[Any, NDArray[Any], NDArray[np.float64], NDArray[np.float64] | None]:
    """The part of this rank's persons.

    Args:
        data: x of shape (rows, features); y, shares in [0, 1] and weights of losses, of shape
            (rows,) or None.
        sharded: whether the table is this rank's alone; else the ranks divide up its persons.
        in_order: whether the solver cuts batches in the persons' order.

    Returns:
        x of shape (persons, K, features); y, shares and weights of shape (persons, K).

    Raises:
        ValueError: batches would follow from how many persons each rank has, and who replaces one
            may be on another rank.

    **Guarantee.** Which rows a person brings, at most K, depends on coins and on that person's own
    rows, not on what they hold; their shares add up to at most 1. With ``in_order``, persons are in
    a uniformly random, secret order: with who replaces a person in that person's place, wherever
    the rows of either stand, everybody else's places are as likely, so a mixture over the order
    distinguishes neighbours no better than batches of which one record is replaced.
    """
    if in_order and sharded and ranks.size > 1 and neighboring == "replace-one":
        raise ValueError(
            "neighboring='replace-one' is not offered for persons in shards with a single-pass "
            "solver: who replaces a person may be on another rank, and batches would change on "
            "both. Fix: neighboring='zero-out', or another solver."
        )
    x, y, of_rows, weights = data
    coins = key_stream(noise_seed, "rows of persons")
    mine = np.arange(len(owners))
    if in_order:
        words = np.empty(len(owners), np.uint64)
        ranks.common_stream(noise_seed, "order of persons").words(words)
        mine = np.argsort(words, kind="stable")
    index, shares = rows_brought(owners, mine if sharded else equal_part(mine, ranks), coins)
    if of_rows is not None:
        shares = shares * of_rows[index]
    rows = x[index] if held_in_memory(x) else RowsOfPersons(x, index)
    return rows, y[index], shares, None if weights is None else weights[index]


def rows_brought(
    owners: Persons, persons: NDArray[np.int64], coins: KeyStream
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Row numbers of persons, (persons, K), and their shares; as above."""
    brought = owners.bring(coins, persons)
    items, there = present_rows(brought)
    present = np.ones(brought.shape) if there is None else there.numpy().astype(np.float64)
    return items.reshape(brought.shape), present / present.sum(1, keepdims=True)


class RowsOfPersons:
    """Rows of a table that is not in memory, read as slices of persons are asked for.

    Args:
        x: shape (rows, features).
        index: rows of each person, shape (persons, K).
    """

    def __init__(self, x: Any, index: NDArray[np.int64]) -> None:
        self._x, self._index = x, index
        self.shape = (*index.shape, x.shape[1])

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, persons: slice) -> NDArray[Any]:
        return np.asarray(self._x[self._index[persons]])


def per_person(guarantee: Guarantee, owners: Persons | None) -> Guarantee:
    """The guarantee, with its unit and how that is bounded."""
    if owners is None:
        return guarantee
    notes = (*guarantee.notes, CHOSEN.format(owners.most))
    return replace(guarantee, unit="person", notes=notes)
