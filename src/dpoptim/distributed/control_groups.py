"""Groups of the ranks on the CPU, for agreement: beside each group of the caller's."""

import atexit
from contextlib import suppress
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

from dpoptim.distributed.c10d_internals import gloo_group, time_out_of

# held here alone, so that they can be closed here
control_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
lost_groups: WeakSet[dist.ProcessGroup] = WeakSet()  # whose threads may wait for a lost rank


def control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make a group of the same processes on the CPU, once."""
    if group not in control_groups:
        ranks = dist.get_process_group_ranks(group)
        name = f"dpoptim/{group.group_name}"
        control_groups[group] = gloo_group(ranks, name, time_out_of(group))
    return control_groups[group]


@atexit.register
def close_control_groups() -> None:
    """End the threads of the groups made here while Python still runs.

    A thread of gloo lets go of a tensor a moment after it has woken who waits for it, and needs
    Python for it: where Python is gone by then, the process aborts though all had gone well.
    """
    for callers in [*control_groups]:
        if callers not in lost_groups:
            group = control_groups.pop(callers)
            with suppress(ValueError):  # the caller has destroyed all of them
                dist.destroy_process_group(group)
