"""Names of ``torch.distributed``, but FSDP's, that are not public or differ by its version."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor


def all_gather_single(
    everyone: Tensor, mine: Tensor, group: dist.ProcessGroup | None, *, async_op: bool = False
) -> Any:
    """``dist.all_gather_single``, which PyTorch 2.11 has under its older name alone."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(everyone, mine, group=group, async_op=async_op)


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
