"""Who is missing where communication has failed."""

from datetime import timedelta

import torch.distributed as dist

from dpoptim.distributed.c10d_internals import rendezvous_store
from dpoptim.distributed.signs import named

ROLL_CALL = timedelta(seconds=5)  # how long ranks that are asked whether they live may take


def missing(group: dist.ProcessGroup) -> str:
    """Name who does not answer a roll-call through the store, with which the processes met."""
    calls = f"dpoptim/{group.group_name}/alive"
    try:
        store = rendezvous_store()
        store.set(f"{calls}/{dist.get_rank(group)}", "1")
    except Exception:  # stores raise what they like
        return "the process that held the rendezvous (rank 0, unless torchrun does) is gone"
    gone: list[int] = []
    for rank in range(dist.get_world_size(group)):
        try:
            store.wait([f"{calls}/{rank}"], ROLL_CALL if not gone else timedelta(milliseconds=100))
        except Exception:
            gone.append(rank)
    if not gone:
        return "all ranks live, but one was late"
    return (
        f"{named(gone)} gave no sign of life for {ROLL_CALL.seconds} s (dead, or waiting for one "
        "that is)"
    )
