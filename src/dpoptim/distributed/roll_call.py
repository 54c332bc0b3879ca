"""Who is missing where communication has failed."""

from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from dpoptim.distributed.c10d_internals import rendezvous_store
from dpoptim.distributed.rank_signals import rank_names

ROLL_CALL = timedelta(seconds=5)  # how long ranks that are asked whether they live may take


def tell_failure(group: dist.ProcessGroup, *, failed: bool) -> None:
    """Leave word for `missing_ranks` that this process failed, or take it back."""
    word = word_of(group, dist.get_rank(group))
    with suppress(Exception):  # stores raise what they like; the others then hear less
        if failed:
            rendezvous_store().set(word, "1")
        else:
            rendezvous_store().delete_key(word)


def word_of(group: dist.ProcessGroup, rank: int) -> str:
    """The key under which a rank leaves word that it failed."""
    return f"dpoptim/{group.group_name}/failed/{rank}"


def missing_ranks(group: dist.ProcessGroup) -> str:
    """Name who does not answer a roll-call through the store, with which the processes met."""
    calls = f"dpoptim/{group.group_name}/alive"
    ranks = range(dist.get_world_size(group))
    try:
        store = rendezvous_store()
        store.set(f"{calls}/{dist.get_rank(group)}", "1")
        failed = [rank for rank in ranks if store.check([word_of(group, rank)])]
    except Exception:  # stores raise what they like
        return "the process that held the rendezvous (rank 0, unless torchrun does) is gone"
    if failed:
        return f"{rank_names(failed)} failed, and says why itself"
    gone: list[int] = []
    for rank in ranks:
        try:
            store.wait([f"{calls}/{rank}"], ROLL_CALL if not gone else timedelta(milliseconds=100))
        except Exception:
            gone.append(rank)
    if not gone:
        return "all ranks live, but one was late"
    return (
        f"{rank_names(gone)} gave no sign of life for {ROLL_CALL.seconds} s (dead, or waiting for "
        "one that is)"
    )
