"""Every name of ``torch.distributed`` that is not public, but for those of FSDP."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist


def rendezvous_store() -> Any:
    """The store with which the processes met."""
    return dist.distributed_c10d._get_default_store()


def time_out_of(group: dist.ProcessGroup) -> timedelta:
    """How long a group lets its processes wait for each other."""
    backends = [group._get_backend(device) for device in group._device_types]
    return backends[0].options._timeout
