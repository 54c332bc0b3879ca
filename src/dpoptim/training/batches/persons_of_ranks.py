"""Persons in several processes: all rows of each are one process' to bring."""

import numpy as np

from dpoptim.distributed.ranks import Ranks
from dpoptim.errors import RankError
from dpoptim.training.batches.privacy_units import Persons


def one_rank_a_person(ranks: Ranks, persons: Persons | None, *, sharded: bool) -> None:
    """Refuse persons who would count in two processes.

    Args:
        persons: owners of this rank's rows; None: rows are records of their own.
        sharded: whether the rows are this rank's alone; else all ranks have the same, and deal the
            persons out among them.

    Raises:
        RankError: on all ranks, which stay as they were: they disagree on whose rows are whose, or
            a person has rows in two shards. No message names one.

    **Guarantee.** After it, a person is sampled, brings rows and is clipped in one process alone,
    so that adding up what the processes have moves by what one of them does. Names travel between
    the ranks, which are on the side of the data.
    """
    if persons is None:
        ranks.agree({"persons": "None"})
        return
    of_all = f"{persons.names.dtype.kind}, shards" if sharded else persons.digest
    ranks.agree({"persons": of_all})
    if not sharded:
        return
    names = np.concatenate(ranks.all_gather(persons.names))
    if len(np.unique(names)) < len(names):
        raise RankError(
            "persons: somebody has rows in the shards of two ranks, and would count in both. Fix: "
            "give all rows of a person to one rank, such as by zlib.crc32(name) % world_size; or "
            "all rows to every rank, without sharded=True."
        )
