"""Find out how a model is spread over processes, and keep wrappers from sending gradients around
the gate.
"""

from typing import Any, Self

import torch.distributed as dist
from torch import nn

from dpoptim.distributed.process_group import ProcessGroup
from dpoptim.distributed.ranks import OneProcess, Ranks
from dpoptim.errors import PrivacyError


def ranks_of(model: nn.Module | None, group: dist.ProcessGroup | None) -> Ranks:
    """The processes that train ``model``, or fit something else, together: those of ``group``, of
    the model's wrapper, or all there are.

    Raises:
        ValueError: ``group`` was given without `torch.distributed`, or this process is not in it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ValueError(
                "process_group was given, but torch.distributed.init_process_group was not called."
            )
        return OneProcess()
    if group is None:
        own: Any = (
            model.process_group if isinstance(model, nn.parallel.DistributedDataParallel) else None
        )
        group = own or dist.group.WORLD
    if group is None or dist.get_rank(group) < 0:
        raise ValueError(
            "process_group: this process is not in it. Fix: attach in the group's processes alone."
        )
    return OneProcess() if dist.get_world_size(group) == 1 else ProcessGroup(group)


def refuse_sharded_parameters(model: nn.Module) -> None:
    """Parameters of which each process has a part: their forward pass uses others, which no hook
    of ours reaches.
    """
    if not dist.is_available():
        return
    from torch.distributed.tensor import DTensor

    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            raise PrivacyError(
                f"parameter {name!r} is sharded over processes (fully_shard, or tensor "
                "parallelism), which is not supported "
                "yet. Fix: keep the model whole on each process: bare, or in "
                "DistributedDataParallel."
            )


class OwnSynchronisation:
    """What `DistributedDataParallel` would send by itself: off while attached, as it was
    afterwards.

    Args:
        model: wrapped or bare.

    Attributes:
        module: the bare model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._wrapper = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
        self.module: nn.Module = model if self._wrapper is None else self._wrapper.module
        self._before: tuple[bool, bool] | None = None

    def switch_off(self) -> Self:
        if (wrapper := self._wrapper) is None:
            return self
        if getattr(wrapper, "_delay_all_reduce_params", None):
            raise PrivacyError(
                "the DistributedDataParallel wrapper delays gradients of some parameters "
                "(delay_all_reduce_named_params), "
                "which it sends whatever attach says. Fix: wrap the model without it."
            )
        self._before = wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync
        wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = False
        return self

    def restore(self) -> None:
        """Harmless when repeated."""
        if self._wrapper is not None and self._before is not None:
            self._wrapper.require_backward_grad_sync, self._wrapper.require_forward_param_sync = (
                self._before
            )
        self._before = None
