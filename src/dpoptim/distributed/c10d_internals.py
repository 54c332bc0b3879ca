"""Names of ``torch.distributed``, but FSDP's, that are not public or differ by its version."""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor

# modules through which user code gets to a group, and those that call it for themselves
CALLED_THROUGH = (
    "torch.distributed.distributed_c10d",
    "torch.distributed.c10d_logger",
    "torch.distributed._functional_collectives",
    "torch.distributed.tensor",
    "torch.utils.",
    "torch.autograd.",
    "torch._",
)
WRAPPERS = (
    "dpoptim.",
    "torch.distributed.fsdp.",
    "torch.distributed._composable.",
    "torch.nn.parallel.distributed",
)
SENDING = (
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("all_gather_single", "all_gather_single_coalesced", "allreduce", "allreduce_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single", "broadcast", "gather", "recv"),
    *("recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single", "scatter", "send"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base"),
)


def sending_calls() -> Iterator[tuple[Any, str]]:
    """Calls that send something: methods of groups, and what all functional collectives go through.

    As far as this PyTorch has them.
    """
    for name in SENDING:
        if name in vars(dist.ProcessGroup):
            yield dist.ProcessGroup, name
    for name in ("_resolve_group", "_resolve_group_name"):
        if name in vars(functional_collectives):
            yield functional_collectives, name


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
