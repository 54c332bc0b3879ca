"""Every name of FSDP2 (``fully_shard``) that is not public, in one place.

Its modules hold a DTensor for each parameter, of which this process has a part, and put the whole
parameter in its place for forward and backward passes. PyTorch has public names for the former
alone. `require` tests what is needed here on the model itself, before a record is touched.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from dpoptim.distributed.ranks import part_sizes
from dpoptim.errors import PrivacyError
from dpoptim.gradients.accumulation.boxes import Boxes, Stored


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules under ``fully_shard``, outer ones first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def states(model: nn.Module) -> list[Any]:
    """FSDP's own states; one may belong to several modules."""
    found = [module._get_fsdp_state() for module in sharded_modules(model)]
    return list({id(state): state for state in found}.values())


def groups(model: nn.Module) -> list[Any]:
    """Groups of parameters that are gathered together."""
    return [group for state in states(model) for group in groups_of(state)]


def groups_of(state: Any) -> list[Any]:
    """The same of one state, which has at most one before PyTorch 2.13, under another name."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def used_in_forward(model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """From the whole parameters that forward passes use to the DTensors that modules hold.

    Each group is gathered once, and given back before the next one: FSDP makes the whole
    parameters then, and keeps them, without their memory.
    """
    found: dict[nn.Parameter, nn.Parameter] = {}
    for module in sharded_modules(model):
        module.unshard()
        seen = {id(p) for p in model.parameters()}
        for group in groups_of(module._get_fsdp_state()):
            own = {each._unsharded_param: each.sharded_param for each in group.fsdp_params}
            found |= {whole: p for whole, p in own.items() if id(whole) in seen}
        reshard(model)
    require(model, found)
    return found


def wholes(model: nn.Module) -> list[nn.Parameter]:
    """The whole parameters that FSDP keeps, with or without their memory."""
    return [each._unsharded_param for group in groups(model) for each in group.fsdp_params]


def require(model: nn.Module, used: dict[nn.Parameter, nn.Parameter]) -> None:
    """Refuse a PyTorch whose FSDP does something else than what is relied upon here."""
    held = [p for p in model.parameters() if isinstance(p, DTensor)]
    right = (
        {id(p) for p in used.values()} == {id(p) for p in held}
        and all(type(whole) is nn.Parameter for whole in used)
        and all(whole.shape == p.shape for whole, p in used.items())
        and all(whole.requires_grad == p.requires_grad for whole, p in used.items())
    )
    if not right:
        raise PrivacyError(
            f"PyTorch {torch.__version__} has changed inside, so models under fully_shard cannot "
            "be trained. Fix: a PyTorch within the bounds of dpoptim's requirements, a newer "
            "dpoptim, or DistributedDataParallel."
        )


@contextmanager
def holding(model: nn.Module, others: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """Let modules hold other parameters than they do."""
    places = [
        (module, name, p)
        for module in model.modules()
        for name, p in module._parameters.items()
        if p is not None and p in others
    ]
    try:
        for module, name, p in places:
            module._parameters[name] = others[p]
        yield
    finally:
        for module, name, p in places:
            module._parameters[name] = p


def reshard(model: nn.Module) -> None:
    """Let modules hold the DTensors again, also where a forward pass has raised.

    After that ``module.reshard`` does nothing. Harmless when repeated.
    """
    for group in groups(model):
        group._to_sharded()


def sends_gradients(model: nn.Module) -> list[tuple[Any, bool]]:
    """Which groups would send gradients by themselves."""
    return [(group, group.reduce_grads) for group in groups(model)]


def let_send_gradients(before: list[tuple[Any, bool]]) -> None:
    """Put back what `sends_gradients` found."""
    for group, reduces in before:
        group.reduce_grads = reduces


def unsupported(model: nn.Module) -> str:
    """Name what about the sharding cannot be trained privately; empty if all can."""
    checks = (placed_otherwise, not_managed, offloaded, over_other_processes)
    return next((found for check in checks if (found := check(model))), "")


def sharded_parameters(model: nn.Module) -> dict[str, DTensor]:
    return {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}


def placed_otherwise(model: nn.Module) -> str:
    for name, p in sharded_parameters(model).items():
        (*others, last) = p.placements
        if others or type(last) is not Shard:
            return f"parameter {name!r} is placed as {p.placements}, not as one shard a process"
    return ""


def not_managed(model: nn.Module) -> str:
    managed = {id(each.sharded_param) for group in groups(model) for each in group.fsdp_params}
    for name, p in sharded_parameters(model).items():
        if id(p) not in managed:
            return f"parameter {name!r} is a DTensor, but not one of fully_shard's"
    return ""


def offloaded(model: nn.Module) -> str:
    for group in groups(model):
        if any(each.offload_to_cpu for each in group.fsdp_params):
            return "fully_shard has a CPUOffloadPolicy"
    return ""


def over_other_processes(model: nn.Module) -> str:
    meshes = [p.device_mesh for p in sharded_parameters(model).values()]
    if len({tuple(mesh.mesh.flatten().tolist()) for mesh in meshes}) > 1:
        return "its parameters are spread over different processes"
    return ""


def group_of_shards(model: nn.Module) -> dist.ProcessGroup | None:
    """The processes that hold the parts of the first sharded parameter.

    None of a mesh of several dimensions, which `unsupported` names.
    """
    mesh = next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    return mesh.get_group() if mesh.ndim == 1 else None


def place_of_shards(model: nn.Module) -> tuple[int, int]:
    """Which of the processes that hold the parts this is, and how many there are."""
    mesh = next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    return mesh.get_local_rank(), mesh.size()


def boxes_of(t: DTensor) -> Boxes:
    """This process's part."""
    (placement,) = t.placements
    assert isinstance(placement, Shard)
    sizes = part_sizes(t.shape[placement.dim], t.device_mesh.size())
    start = sum(sizes[: t.device_mesh.get_local_rank()])
    return Boxes.of_part(tuple(t.shape), placement.dim, start, t.to_local().detach())


def part_like(like: DTensor, saved: Tensor | Stored) -> Tensor:
    """This process's part of a tensor in a checkpoint, placed like a parameter."""
    found = dtensor_of(like, torch.empty_like(like.to_local(), dtype=saved.dtype))
    boxes_of(found).fill(saved)
    return found


def dtensor_of(like: Tensor, part: Tensor) -> DTensor:
    """This process's part of a tensor that is placed like another one."""
    assert isinstance(like, DTensor)
    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
