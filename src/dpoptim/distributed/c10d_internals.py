"""Every name of ``torch.distributed`` that is not public, but for those of FSDP."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def rendezvous_store() -> Any:
    """The store with which the processes met."""
    return dist.distributed_c10d._get_default_store()


def gloo_group(ranks: Sequence[int], name: str, time_out: timedelta) -> dist.ProcessGroup:
    """A group on the CPU, made by its own processes alone.

    ``new_group`` does so too, but names it by the number of groups that a process has, which need
    not be the same in all of them; then they would not meet.
    """
    c10d = dist.distributed_c10d
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend("gloo"),
        c10d._get_default_store(),
        c10d.GroupName(name),
        timeout=time_out,
        group_desc="dpoptim",
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def time_out_of(group: dist.ProcessGroup) -> timedelta:
    """How long a group lets its processes wait for each other."""
    backends = [group._get_backend(device) for device in group._device_types]
    return backends[0].options._timeout
