"""Estimators fitted in several processes: what they agree on, and whose rows are whose."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator

from dpoptim.data.parquet_rows import ParquetRows
from dpoptim.distributed.agreement import LEAST_RECORDS, refuse_equal_shards
from dpoptim.distributed.ranks import Ranks, part_sizes
from dpoptim.distributed.wrapping import ranks_of
from dpoptim.training.persons_of_ranks import one_rank_a_person
from dpoptim.training.units import Persons
from dpoptim.version import __version__

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
    estimator: BaseEstimator, x: Any, y: NDArray[Any], owners: Persons | None, ranks: Ranks
) -> tuple[Any, NDArray[Any]]:
    """This rank's rows of a good table: all of it if ranks have shards, else an equal part.

    All of it, too, where it is divided up later, by the persons who own rows (``owners``).

    Raises:
        RankError: on all ranks: one has refused its table, or differs in its settings, number of
            columns or (without shards) data, or has another one's shard; named. Or somebody has
            rows in two shards.
    """
    if ranks.size == 1:
        return x, y
    ranks.arrive("fit")
    settings = estimator.get_params(deep=False)
    settings.pop("ledger")  # rank 0's is used
    facts = {
        "version": f"dpoptim {__version__}",
        **{name: without_addresses(value) for name, value in settings.items()},
        "number of columns": str(x.shape[1]),
        "weights to start from": without_addresses(getattr(estimator, "_weights", None)),
    }
    if not settings["sharded"]:
        facts["data set"] = sample_of(x, y)
    ranks.agree(facts)
    one_rank_a_person(ranks, owners, sharded=settings["sharded"])
    if settings["sharded"]:
        refuse_equal_shards(ranks, sample_of(x, y) if len(y) >= LEAST_RECORDS else "")
    if settings["sharded"] or owners is not None:
        return x, y
    return equal_part(x, ranks), equal_part(y, ranks)


def equal_part(rows: Any, ranks: Ranks) -> Any:
    """This rank's part of what all ranks have."""
    sizes = part_sizes(len(rows), ranks.size)
    start = sum(sizes[: ranks.rank])
    stop = start + sizes[ranks.rank]
    return rows.rows(start, stop) if isinstance(rows, ParquetRows) else rows[start:stop]


def classes_of_all(y: NDArray[Any], ranks: Ranks) -> NDArray[Any]:
    """The labels that occur on any rank."""
    return np.unique(np.concatenate(ranks.gathered(np.unique(y))))


def notes_of_ranks(ranks: Ranks, owners: Persons | None, *, sharded: bool) -> tuple[str, ...]:
    """Notes on a fit in several processes."""
    if ranks.size == 1:
        return ()
    if sharded and owners is not None:
        how = "no person has rows in two of their tables, which was checked"
    elif sharded:
        how = "on trust: no record is in the tables of two processes"
    else:
        how = "on trust: all processes have the same table"
    return (f"fitted in {ranks.size} processes, with one release of every number; {how}",)


def without_addresses(value: object) -> str:
    """A text that is equal in two processes if the values are."""
    if isinstance(value, np.ndarray):
        return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def sample_of(x: Any, y: NDArray[Any]) -> str:
    """The number of rows, and a digest of some; it stays among the ranks."""
    rows = np.linspace(0, len(x) - 1, min(len(x), SAMPLED)).astype(np.int64)
    whole = hashlib.sha256(np.ascontiguousarray(y[rows]).tobytes())
    if isinstance(x, np.ndarray):
        whole.update(np.ascontiguousarray(x[rows]).tobytes())
    return f"{len(x)} rows, {whole.hexdigest()[:16]}"
