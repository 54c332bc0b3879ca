"""The steps that benchmarks/distributed.py compares: plain, private and Opacus', of one process, of
DDP and of FSDP2 (``fully_shard``, each block and the rest); and what a private one sends.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import dpoptim
from workloads import WORKLOADS, Workload

STEPS = 100_000  # of the plan, more than are taken
Step = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """A workload, of whose batch each rank has a part: communication weighs more then.

    Attributes:
        part: what the batch is divided by. optimizer: of `torch.optim`, by name.
    """

    work: Workload
    part: int
    optimizer: str = "SGD"

    def data(self) -> tuple[Tensor, Tensor]:
        x, y = self.work.data()
        return x[: len(x) // self.part].clone(), y[: len(y) // self.part].clone()

    def optimizing(self, model: nn.Module) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, self.optimizer)(
            model.parameters(), lr=1e-4
        )
        return made


CASES = {
    title: Case(WORKLOADS[title], part)
    for title, part in (("MLP 784-256-10", 1), ("GPT", 4), ("ViT", 4), ("softmax 785-10", 1))
}


def sharded(model: nn.Module, group: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(group),))
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


WRAPPERS: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "one": lambda model, group: model,
    "DDP": lambda model, group: DistributedDataParallel(model, process_group=group),
    "FSDP2": sharded,
}


def plain(case: Case, kind: str, group: Any) -> Step:
    model = WRAPPERS[kind](case.work.build(), group)
    (x, y), optimizer = case.data(), case.optimizing(model)

    def step() -> None:
        optimizer.zero_grad()
        case.work.loss(model(x), y, "mean").backward()
        optimizer.step()

    return step


def private(case: Case, kind: str, group: Any) -> Step:
    """A whole step of `dpoptim.attach`, in which this rank's part is always the same batch."""
    model = WRAPPERS[kind](case.work.build(), group)
    (x, y), optimizer = case.data(), case.optimizing(model)
    x = x.roll(dist.get_rank(group), -1)  # a shard of its own: the same one twice is refused
    n = len(x) * dist.get_world_size(group)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=n, batch_size=n, steps=STEPS, noise_multiplier=1.0, delta=1e-5
    )
    attached = dpoptim.attach(
        plan, model, optimizer, TensorDataset(x, y), process_group=group, sharded=kind != "one"
    )
    batches = attached.batches()

    def step() -> None:
        a, b = next(batches)
        attached.backward(case.work.loss(model(a), b, "none"))
        optimizer.step()
        optimizer.zero_grad()

    return step


def opacus(case: Case, kind: str, group: Any) -> Step:
    """Opacus: per-sample gradients by hooks, alone and in its DPDDP; under FSDP2 its own wrapper
    and ghost clipping, which is all that it has there.
    """
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClippingFSDP
    from opacus.optimizers import DPOptimizer
    from opacus.optimizers.ddpoptimizer import DistributedDPOptimizer
    from opacus.optimizers.fsdpoptimizer_fast_gradient_clipping import (
        FSDPOptimizerFastGradientClipping,
    )
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
    from opacus.utils.fsdp_utils import FSDP2Wrapper
    from opacus.validators import ModuleValidator

    model = ModuleValidator.fix(case.work.build())
    x, y = case.data()
    common = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": len(x)}
    if kind == "FSDP2":
        wrapped = GradSampleModuleFastGradientClippingFSDP(FSDP2Wrapper(model), max_grad_norm=1.0)
        ghost = FSDPOptimizerFastGradientClipping(case.optimizing(model), **common)

        def step_by_ghosts() -> None:
            ghost.zero_grad()
            losses = case.work.loss(wrapped(x), y, "none")
            DPTensorFastGradientClipping(wrapped, ghost, losses, "mean").backward()
            ghost.step()

        return step_by_ghosts
    hooked = GradSampleModule(
        model if kind == "one" else DifferentiallyPrivateDistributedDataParallel(model)
    )
    make = DPOptimizer if kind == "one" else DistributedDPOptimizer
    optimizer = make(case.optimizing(model), **common)

    def step() -> None:
        optimizer.zero_grad()
        case.work.loss(hooked(x), y, "mean").backward()
        optimizer.step()

    return step


MAKERS: dict[str, Callable[[Case, str, Any], Step]] = {
    "plain": plain,
    "private": private,
    "Opacus": opacus,
}
VARIANTS = [(who, kind) for kind in WRAPPERS for who in MAKERS]

# ---- what is sent -------------------------------------------------------------------------------

Sent = Counter[str]  # "bytes" that this rank sends; collectives of "vectors", and "small" ones


@contextmanager
def counted() -> Iterator[Sent]:
    """Count collectives as dpoptim calls them: what this rank sends of a tensor."""
    sent: Sent = Counter()
    size = dist.get_world_size()
    share = (size - 1) / size
    # per collective: which argument travels, and how much of it this rank sends
    rules = {
        "all_to_all_single": (1, 1),
        "all_gather_single": (1, size - 1),
        "all_reduce": (0, 2 * share),
        "broadcast": (0, share),
        "reduce": (0, share),
    }

    def counting(name: str, place: int, part: float) -> Any:
        honest = getattr(dist, name)

        def call(*arguments: Any, **options: Any) -> Any:
            tensor = arguments[place]
            large = tensor.numel() > 1000
            sent["bytes"] += round(tensor.numel() * tensor.element_size() * part)
            sent["vectors" if large else "small"] += 1
            return honest(*arguments, **options)

        # as if PyTorch made the call, which is not refused as a user's would be
        named = {**globals(), "__name__": "torch._counted"}
        return patch.object(
            dist, name, FunctionType(call.__code__, named, closure=call.__closure__)
        )

    patches = [counting(name, *rule) for name, rule in rules.items()]
    for each in patches:
        each.start()
    try:
        yield sent
    finally:
        for each in patches:
            each.stop()
