"""Estimators fitted in several processes: what they agree on, and whose rows are whose."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import issparse
from sklearn.base import BaseEstimator

from dpoptim.data.parquet_rows import ParquetRows
from dpoptim.data.sparse_rows import SparseRows, with_rows
from dpoptim.distributed.agreement import LEAST_RECORDS, refuse_equal_shards
from dpoptim.distributed.ranks import Ranks, part_sizes
from dpoptim.distributed.wrapping import ranks_of
from dpoptim.estimators.table import classes_in
from dpoptim.training.batches.persons_of_ranks import one_rank_a_person
from dpoptim.training.batches.privacy_units import Persons
from dpoptim.version import __version__

SAME_TABLE = "on trust: all processes have the same table"
SAMPLED = 256  # rows that are compared where all ranks should have the same


@contextmanager
def all_ranks() -> Iterator[Ranks]:
    """Ranks of ``torch.distributed`` through one fit that all of them make.

    An error in one of them ends the fit in all.
    """
    ranks = ranks_of(None, None)
    try:
        yield ranks
    except BaseException:
        ranks.leave(0, failed=True)
        raise
    ranks.leave(0, failed=False)


def own_part(
    estimator: BaseEstimator,
    x: Any,
    y: NDArray[Any],
    weights: NDArray[np.float64] | None,
    owners: Persons | None,
    ranks: Ranks,
) -> tuple[Any, NDArray[Any], NDArray[np.float64] | None]:
    """This rank's rows of a good table: all of it if ranks have shards, else an equal part.

    All of it, too, where it is divided up later, by the persons who own rows (``owners``).

    Raises:
        RankError: on all ranks: one has refused its table, or differs in its settings, number of
            columns or (without shards) data, or has another one's shard; named. Or somebody has
            rows in two shards.
    """
    if ranks.size == 1:
        return x, y, weights
    ranks.arrive("fit")
    settings = estimator.get_params(deep=False)
    settings.pop("ledger")  # rank 0's is used
    facts = {
        "version": f"dpoptim {__version__}",
        **{name: without_addresses(value) for name, value in settings.items()},
        "number of columns": str(x.shape[1]),
        "weights to start from": without_addresses(getattr(estimator, "_weights", None)),
        "kind of sample_weight (given or None)": str(weights is not None),
    }
    if not settings["sharded"]:
        facts["data set"] = sample_of(x, y)
        facts["sample_weight"] = without_addresses(weights)
    ranks.agree(facts)
    one_rank_a_person(ranks, owners, sharded=settings["sharded"])
    if settings["sharded"]:
        refuse_equal_shards(ranks, sample_of(x, y) if len(y) >= LEAST_RECORDS else "")
    if settings["sharded"] or owners is not None:
        return x, y, weights
    own = None if weights is None else equal_part(weights, ranks)
    return equal_part(x, ranks), equal_part(y, ranks), own


def agree_on_all(
    estimator: BaseEstimator, x: Any, y: Any, ranks: Ranks, *, weights: Any = None
) -> None:
    """Compare settings and table of what several ranks fit together, each with the whole table.

    Raises:
        ValueError: it asks for shards. RankError: on all ranks: one differs, or has failed.
    """
    if ranks.size == 1:
        return
    settings = estimator.get_params(deep=True)
    if any(name.endswith("sharded") and value is True for name, value in settings.items()):
        raise ValueError(
            f"sharded=True: {type(estimator).__name__} trains more than once on one table, which "
            "every rank must have whole. Fix: the same table on all ranks, without sharded; or fit "
            "the estimator by itself on shards, with the settings found."
        )
    ranks.arrive("fit")
    plain = {
        name: without_addresses(value)
        for name, value in settings.items()
        if not (name.endswith("ledger") or name == "steps" or hasattr(value, "get_params"))
    }
    table = with_rows(x)
    facts = sample_of(SparseRows(table) if issparse(table) else table, np.asarray(y))
    ranks.agree({**plain, "data set": facts, "sample_weight": without_addresses(weights)})


def equal_part(rows: Any, ranks: Ranks) -> Any:
    """This rank's part of what all ranks have."""
    sizes = part_sizes(len(rows), ranks.size)
    start = sum(sizes[: ranks.rank])
    stop = start + sizes[ranks.rank]
    return rows.rows(start, stop) if hasattr(rows, "rows") else rows[start:stop]


def classes_of_all(y: NDArray[Any], ranks: Ranks) -> NDArray[Any]:
    """The labels that occur on any rank."""
    return np.unique(np.concatenate(ranks.all_gather(classes_in(y, stacklevel=6))))


def notes_of_ranks(ranks: Ranks, owners: Persons | None, *, sharded: bool) -> tuple[str, ...]:
    """Notes on a fit in several processes."""
    if ranks.size == 1:
        return ()
    if sharded and owners is not None:
        how = "no person has rows in two of their tables, which was checked"
    elif sharded:
        how = "on trust: no record is in the tables of two processes"
    else:
        how = SAME_TABLE
    return (f"fitted in {ranks.size} processes, with one release of every number; {how}",)


def without_addresses(value: object) -> str:
    """A text that is equal in two processes if the values are."""
    if isinstance(value, np.ndarray):
        return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def sample_of(x: Any, y: NDArray[Any]) -> str:
    """The number of rows, and a digest of some; it stays among the ranks."""
    rows = np.linspace(0, len(x) - 1, min(len(x), SAMPLED)).astype(np.int64)
    whole = hashlib.sha256(in_bytes(y[rows]))
    if not isinstance(x, ParquetRows):
        whole.update(in_bytes(np.asarray(x[rows])))
    return f"{len(x)} rows, {whole.hexdigest()[:16]}"


def in_bytes(rows: NDArray[Any]) -> bytes:
    """Bytes of rows; of objects those of their text, since their own are addresses."""
    return np.ascontiguousarray(rows.astype(str) if rows.dtype == object else rows).tobytes()
