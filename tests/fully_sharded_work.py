"""What the ranks of tests/distributed/test_fully_sharded.py do. Every function takes its rank
first, and returns plain values.
"""

import fcntl
import gc
import itertools
import json
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import TensorDataset

import distributed_work
import dpoptim
from distributed_work import (
    FEATURES,
    METHODS,
    N,
    caught,
    ledger_of,
    noise_is_wrong,
    plan_for,
    records,
    whole,
)
from dpoptim.audit.two_worlds import (
    LENGTH,
    Attack,
    Canaries,
    canary_data,
    log_likelihood_ratio,
    sampled_gaussians,
)
from dpoptim.distributed import fsdp_internals
from dpoptim.distributed.process_group import ProcessGroup
from dpoptim.distributed.sharded import ShardedTotals
from dpoptim.errors import PrivacyError
from dpoptim.gate import Gate
from dpoptim.gradients.backward_pass import RuleFunction
from dpoptim.gradients.clipped_sum import ClippedSum, Norms
from dpoptim.gradients.hooks.hook_manager import HookManager
from dpoptim.noise.gaussian import add_normal
from dpoptim.noise.stream import KeyStream
from dpoptim.optim import AdamBC
from dpoptim.optimizers import optimizer as listed_optimizer
from dpoptim.plan import Plan
from dpoptim.runtime.torch_internals import pytree
from dpoptim.training.batches.microbatches import MicrobatchSampler
from dpoptim.training.checkpoints import checkpoint, rank_files
from tried_once import models_tried_once


class Blocks(nn.Module):
    """Two blocks between an embedding of features and a head; float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 8))
            for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class LowRank(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> Blocks:
    model = Blocks().requires_grad_(False)
    for block in model.blocks:
        block[1] = LowRank(block[1])
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "whole": Blocks,
    "per block": Blocks,
    "blocks alone": Blocks,
    "adapters": adapted,
    "narrow": Blocks,
}
NARROW = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def model_of(way: str) -> nn.Module:
    """The model, under fully_shard where there are ranks."""
    torch.manual_seed(3)
    model = MODELS[way]()
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = NARROW if way == "narrow" else MixedPrecisionPolicy()
        if way != "whole":
            for block in model.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
        if way != "blocks alone":
            fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def train(
    method: str,
    way: str,
    *,
    noise_multiplier: float = 0.0,
    physical_batch_size: int | None = None,
    autocast: bool = False,
    steps: int = 4,
    by: str = "adam",
    look: Callable[[Any, nn.Module], None] = lambda private, model: None,
    **options: Any,
) -> Tensor:
    """A whole run: the final parameters as one vector."""
    model = model_of(way)
    x, y = records()
    plan = plan_for(METHODS[method](), steps=steps, noise_multiplier=noise_multiplier)
    optimizer = listed_optimizer(by).make([p for p in model.parameters() if p.requires_grad], 0.05)
    data = TensorDataset(x.float(), y)
    with dpoptim.attach(plan, model, optimizer, data, noise_seed=5, **options) as private:
        for a, b in private.batches(physical_batch_size=physical_batch_size):
            with torch.autocast("cpu", enabled=autocast):
                losses = F.cross_entropy(model(a).float(), b, reduction="none")
            private.backward(losses)
            optimizer.step()
            look(private, model)
    if options.get("random_iterate"):
        private.swap_random_iterate()
    return whole(model)


def without_noise(rank: int, cases: list[tuple[str, str, dict[str, Any]]]) -> list[Tensor]:
    found, results = dict[Any, Any](), list[Tensor]()
    for method, way, options in cases:
        with models_tried_once(found, way):
            results.append(train(method, way, **options))
    return results


def by_adam_bc(rank: int) -> Tensor:
    """Steps along made-up gradients as noisy as is said: the final parameters as one vector."""
    model = model_of("per block")
    optimizer = AdamBC(model.parameters(), lr=0.05, noise_std=0.7)
    generator = torch.Generator().manual_seed(4)
    for _ in range(4):
        for p in model.parameters():
            gradient = torch.randn(p.shape, generator=generator)
            if isinstance(p, DTensor):
                gradient = distribute_tensor(gradient, p.device_mesh, p.placements)
            p.grad = gradient
        optimizer.step()
    return whole(model)


# ---- what would break the guarantee -------------------------------------------------------------


class Wide(nn.Module):
    """Many parameters whose gradients are zero, of sizes that do not divide: what is released is
    the noise.
    """

    def __init__(self, entries: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(entries // 4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(
            [part(x.expand(-1, part.in_features)).sum(1) for part in self.parts]
        ).sum(0)


def released_noise(entries: int = 7_000, steps: int = 3) -> Tensor:
    """Released noise in units of its standard deviation: (steps, entries)."""
    plan = plan_for(METHODS["flat"](), noise_multiplier=2.0, steps=steps)
    model = Wide(entries)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in model.parts:
        nn.init.zeros_(part.weight)
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    released = []
    with dpoptim.attach(plan, model, optimizer, TensorDataset(torch.zeros(N, 1))) as private:
        for (x,) in private.batches():
            private.backward(model(x))
            optimizer.step()
            # what rank 0 of two drew, and then what rank 1 did
            halves = [p.full_tensor().detach().chunk(2) for p in model.parameters()]
            ordered = torch.cat(
                [half.flatten() for pair in zip(*halves, strict=True) for half in pair]
            )
            released.append(-ordered.double() * plan.batch_size / (2.0 * 0.7))
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
    return torch.stack(released)


def largest_shift(attacks: Sequence[int] = (0, 1), way: str = "per block") -> float:
    """How far one record moves the released sum, in clip norms: whole gradients far beyond the
    bound, every record on the last rank, in several microbatches.
    """
    x, y = records(8)
    x, last = x.float(), dist.get_rank() == dist.get_world_size() - 1
    plan = plan_for(dpoptim.DPSGD(clip_norm=0.5), n=8, batch_size=8, steps=1)
    dealt = patch.object(
        ProcessGroup,
        "dealer",
        lambda self, coins: lambda batch: batch if last else batch[:0],
    )
    largest, found = 0.0, dict[Any, Any]()
    for attack in attacks:
        sums = []
        for records_there in (8, 7):
            model = model_of(way)
            before = whole(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            attacked = x.clone()
            attacked[7] *= 10.0**attack
            data = TensorDataset(attacked[:records_there], y[:records_there])
            with (
                dealt,
                models_tried_once(found, way),
                dpoptim.attach(plan, model, optimizer, data, noise_seed=5) as private,
            ):
                for a, b in private.batches(physical_batch_size=3):
                    losses = F.cross_entropy(model(a).float(), b, reduction="none")
                    private.backward(losses * 100.0**attack)
                    optimizer.step()
            sums.append((whole(model) - before) * plan.batch_size)
        largest = max(largest, float((sums[0] - sums[1]).double().norm()) / 0.5)
    return largest


def certified(rank: int, way: str, path: str) -> dict[str, bool]:
    """Whether whole weights, gathered in various ways, are known to be those that the run left."""
    held: list[Any] = []

    def look(private: Any, model: nn.Module) -> None:
        held[:] = [private, model]

    dist_options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    train("flat", way, steps=2, noise_multiplier=1.0, look=look)
    private, model = held
    weights = get_model_state_dict(model, options=dist_options)
    found = {}
    if rank == 0:
        last = next(name for name in weights if name.endswith("head.weight"))
        other = weights | {last: weights[last].clone()}
        other[last][-1, -1] += 1e-3  # on the last rank
        for name, each in {
            "gathered": weights,
            "wrapped": {f"module.{key}": value for key, value in weights.items()},
            "one number": other,
            "one less": {key: value for key, value in weights.items() if key != last},
            "one more": weights | {"more": torch.zeros(1)},
            "other kind": {key: value.double() for key, value in weights.items()},
        }.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                folder = dpoptim.certify(private, Path(path) / name, data="made up", weights=each)
            said = json.loads((folder / "certificate.json").read_text())
            found[name] = "weights" not in said["training"]
    dist.barrier()
    return found


def rounded_shift(rank: int) -> float:
    return largest_shift((0,), "narrow")


def reductions() -> int:
    """How often FSDP sends gradients of its own accord in a run."""
    sent: list[int] = []
    honest = _fsdp_param_group.foreach_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        sent.append(1)
        return honest(*args, **kwargs)

    with patch.object(_fsdp_param_group, "foreach_reduce", counted), suppress(PrivacyError):
        train("flat", "per block", steps=1)
    return len(sent)


def sums_are_wrong(expected: Tensor) -> bool:
    parameters = train("flat", "per block", physical_batch_size=8, steps=2)
    return float((parameters - expected).abs().max()) > 1e-5


def mutants(rank: int) -> dict[str, tuple[str, Any]]:
    """Bugs, by name: what would notice each, and the changes to the code."""
    honest_trade, honest_write = ProcessGroup.trade, ShardedTotals.write_means
    honest_clip, honest_backward = ClippedSum.clip, RuleFunction.backward
    honest_pieces = MicrobatchSampler.microbatches

    def noise_of_all(self: ProcessGroup, given: Tensor, sizes: Any, entries: int) -> Any:
        add_normal(KeyStream(), given, 2.0 * 0.7)
        return honest_trade(self, given, sizes, entries)

    def forgotten(self: ProcessGroup, given: Tensor, sizes: Any, entries: int) -> Any:
        return honest_trade(self, given.zero_() if rank == 1 else given, sizes, entries)

    def by_shard(self: ShardedTotals, released: list[Tensor], divisor: float) -> None:
        honest_write(self, released, divisor / self._ranks.size)

    def by_own_part(self: ClippedSum, norms: Norms) -> Any:
        """As if each rank measured its part of the parameters alone."""
        size = dist.get_world_size()
        squared = {unit: each / size for unit, each in norms.squared.items()}
        return honest_clip(self, replace(norms, squared=squared))

    def raw_as_well(ctx: Any, g: Tensor) -> Any:
        """Linear layers hand their weights' ordinary gradients to autograd as well."""
        found, linear = honest_backward(ctx, g), isinstance(ctx.module, nn.Linear)
        raw = [
            g.T @ ctx.saved_tensors[0] if linear and n == 0 else None for n in range(ctx.parameters)
        ]
        return (*found[:5], *raw)

    def again(self: MicrobatchSampler) -> Any:
        """Microbatches that only stand in for another rank's count."""
        for items in honest_pieces(self):
            self.drawn[-1] = replace(self.drawn[-1], null=False)
            yield items

    def silent(self: HookManager, name: str, place: int, g: Tensor | None) -> None:
        self.recorder.reached(place)

    raw = [
        patch.object(RuleFunction, "backward", staticmethod(raw_as_well)),
        patch.object(HookManager, "_reached", silent),
        patch.object(fsdp_internals, "let_send_gradients", lambda before: None),
    ]
    return {
        "none": ("", []),
        "noise by no rank": ("noise", [patch.object(Gate, "_add_noise", lambda self, sums: None)]),
        "noise by every rank": ("noise", [patch.object(ProcessGroup, "trade", noise_of_all)]),
        "one key for the noise of all ranks": (
            "noise",
            [
                patch.object(
                    ProcessGroup,
                    "own_stream",
                    lambda self, seed, purpose: self.common_stream(seed, purpose),
                )
            ],
        ),
        "a rank's sum left out": ("sums", [patch.object(ProcessGroup, "trade", forgotten)]),
        "divided by the shard's batch size": (
            "sums",
            [patch.object(ShardedTotals, "write_means", by_shard)],
        ),
        "microbatches that stand in for none count": (
            "sums",
            [patch.object(MicrobatchSampler, "microbatches", again)],
        ),
        "clipped by the norm of the rank's own part": (
            "shift",
            [patch.object(ClippedSum, "clip", by_own_part)],
        ),
        "raw gradients reduced by FSDP": ("reductions", raw),
    }


def caught_mutants(rank: int, detector: str, expected: Tensor) -> dict[str, bool]:
    """Which mutants are noticed by the detector made for them, and whether the code as it is is."""
    detectors: dict[str, Callable[[], bool]] = {
        "noise": lambda: noise_is_wrong(released_noise()),
        "sums": lambda: sums_are_wrong(expected),
        "shift": lambda: not 0.9 < largest_shift((1,)) <= 1.0,
        "reductions": lambda: reductions() > 0,
    }
    found = {}
    for name, (of, changes) in mutants(rank).items():
        if of in ("", detector):
            with ExitStack() as changed:
                for change in changes:
                    changed.enter_context(change)
                found[name] = detectors[detector]()
    return found


def canary_scores(
    plan: Plan, present: np.ndarray, *, noise_seed: int | None, dtype: torch.dtype
) -> np.ndarray:
    """`two_worlds.canary_scores` of a table that is cut: ranks have the rows of other canaries."""
    model = Canaries(len(present), dtype)
    nn.init.zeros_(model.table.weight)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = canary_data(plan.neighboring, torch.from_numpy(present))
    scores, bound = np.zeros(len(present)), plan.method.rule.norm
    with dpoptim.attach(plan, model, optimizer, data, noise_seed=noise_seed) as private:
        for index, sign in private.batches():
            private.backward(model(index) * sign.to(dtype) * LENGTH * bound)
            optimizer.step()
            moved = -model.table.weight.full_tensor().detach()[:, 0] * plan.batch_size / bound
            nn.init.zeros_(model.table.weight)
            scores += log_likelihood_ratio(
                moved.numpy(),
                noise_multiplier=plan.noise_multiplier,
                sample_rate=plan.batch_size / plan.n,
                neighboring=plan.neighboring,
            )
    return scores


def audited(rank: int) -> tuple[float, float, float]:
    return distributed_work.audited(
        rank, all_on_last=True, attack=Attack(canary_scores, sampled_gaussians)
    )


# ---- where parameters are -----------------------------------------------------------------------


def bytes_held(rank: int) -> dict[str, int]:
    """The most bytes of parameters between steps, those of all in one process, and whether
    gradients were ever anything but shards.
    """
    seen = {"held": 0, "gathered": 0, "odd gradients": 0, "left": 0, "in attach": 0}

    def look(private: Any, model: nn.Module) -> None:
        seen["held"] = max(seen["held"], sum(local(p) for p in model.parameters()))
        for whole_one in fsdp_internals.wholes(model):
            seen["gathered"] += whole_one.untyped_storage().nbytes()
            seen["odd gradients"] += whole_one.grad is not None
        # the last step's, which stays to be looked at, lies where its parameter does
        left = [(p, p.grad) for p in model.parameters() if p.grad is not None]
        seen["odd gradients"] += sum(
            type(g) is not type(p) or local(g) != local(p) for p, g in left
        )
        seen["left"] = max(seen["left"], len(left))

    honest = fsdp_internals.reshard

    def settled(model: nn.Module) -> None:
        with suppress(AttributeError):  # before the first pass there are none
            held = sum(each.untyped_storage().nbytes() for each in fsdp_internals.wholes(model))
            seen["in attach"] = max(seen["in attach"], held)
        honest(model)

    def begun(private: Any, model: nn.Module) -> None:
        fsdp_internals.reshard = honest
        look(private, model)

    fsdp_internals.reshard = settled
    train("flat", "per block", steps=2, look=begun)
    return seen | {"all": sum(p.numel() * p.element_size() for p in Blocks().parameters())}


class Words(nn.Module):
    """The embedding of a word, of which no record has most, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5_000, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.table(words))


def sums_held(rank: int) -> int:
    """The least bytes of float64 tensors between steps of a table, whatever holds them; it is
    sharded where there are ranks. (The least of three steps: after one of some hundred, a thread of
    gloo still holds the last message that it carried.)
    """
    torch.manual_seed(3)
    model = Words()
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    words, labels = torch.randint(0, 5_000, (N,)), torch.randint(0, 3, (N,))
    held = []
    plan = plan_for(METHODS["flat"](), steps=3)
    with dpoptim.attach(plan, model, optimizer, TensorDataset(words, labels)) as private:
        for a, b in private.batches():
            private.backward(F.cross_entropy(model(a), b, reduction="none"))
            optimizer.step()
            held.append(bytes_of(torch.float64))
    return min(held)


def bytes_of(dtype: torch.dtype) -> int:
    """Bytes of the memory of all tensors of this dtype in this process."""
    gc.collect()
    storages = [
        each.untyped_storage()
        for each in gc.get_objects()
        if type(each) is Tensor and each.dtype == dtype and each.layout == torch.strided
    ]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def local(p: Tensor) -> int:
    part = p.to_local() if isinstance(p, DTensor) else p
    return part.numel() * part.element_size()


# ---- what is refused ----------------------------------------------------------------------------


class Borrowing(nn.Module):
    """Uses a weight outside of its layer's forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ self.layer.weight


def refused(rank: int) -> dict[str, str]:
    """Errors of `attach`, one after the other in the same processes; of a loop in the last."""
    x, y = records()
    x = x.float()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def attach(model: nn.Module, method: str = "flat", **options: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = plan_for(METHODS[method](), steps=2)
        with dpoptim.attach(plan, model, optimizer, TensorDataset(x, y), **options) as private:
            for a, b in private.batches():
                losses = F.cross_entropy(model(a).float(), b, reduction="none")
                private.backward(losses.mean() if "loss_reduction" in options else losses)
                optimizer.step()

    def sharded(model: nn.Module, **options: Any) -> nn.Module:
        return fully_shard(model, mesh=mesh, **options)

    square = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("a", "b"))
    no_casts = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.bfloat16)
    rows = sharded(
        nn.Linear(FEATURES, 3), shard_placement_fn=lambda p: Shard(0), mp_policy=no_casts
    )
    parallel = parallelize_module(
        nn.Sequential(nn.Linear(FEATURES, 4)), mesh, {"0": ColwiseParallel()}
    )
    return {
        "mean in bfloat16": caught(
            lambda: attach(sharded(Blocks(), mp_policy=NARROW), loss_reduction="mean")
        ),
        "two axes": caught(lambda: attach(fully_shard(Blocks(), mesh=square))),
        "tensor parallel": caught(lambda: attach(parallel)),
        "value": caught(lambda: attach(sharded(nn.Sequential(nn.Linear(FEATURES, 3))), "value")),
        "partial": caught(lambda: attach(sharded(Blocks()), partial_backward=True)),
        "vmap": caught(lambda: attach(model_of("per block"), isolation="vmap")),
        "borrowed": caught(lambda: attach(sharded(Borrowing()), isolation="rules")),
        "rows are fine": "" if attach(rows) is None else "no",
    }


# ---- checkpoints --------------------------------------------------------------------------------


def part_of_run(
    rank: int,
    method: str,
    path: str,
    noise_multiplier: float,
    first: bool,
    again: str = "",
    key: bytes | None = None,
) -> dict[str, Any]:
    """The first three steps of a run, left at a checkpoint; or the rest of it, in shards where
    there are ranks. What is saved again, right after it was taken up, is what was there.
    """
    plan = plan_for(METHODS[method](), noise_multiplier=noise_multiplier, steps=6)
    model = model_of("adapters")
    if not first:
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    x, y = records()
    options: dict[str, Any] = ledger_of(rank, plan, path) | ({} if first else {"resume": path})
    options["checkpoint_key"] = key
    with dpoptim.attach(
        plan, model, optimizer, TensorDataset(x.float(), y), noise_seed=5, **options
    ) as private:
        if again:
            private.save(again)
        for a, b in private.batches(physical_batch_size=6):
            private.backward(F.cross_entropy(model(a), b, reduction="none"))
            optimizer.step()
            if first and private.steps_done == 3 and private.finished_step:
                private.save(path)
                break
        reservation = private.reservation
    return {"parameters": whole(model), "reservation": reservation}


def largest_handed_on(rank: int, path: str) -> int:
    """Entries of the largest tensor in any object that rank 0 hands on whole, in a run taken up."""
    honest, largest = dist.broadcast_object_list, [0]

    def watched(objects: list[Any], *arguments: Any, **options: Any) -> Any:
        found = honest(objects, *arguments, **options)
        held = [each[1] for each in objects if isinstance(each, tuple)]
        for leaf in pytree.tree_leaves(held):
            if isinstance(leaf, Tensor):
                largest[0] = max(largest[0], leaf.numel())
        return found

    with patch.object(dist, "broadcast_object_list", watched):
        part_of_run(rank, "ftrl", path, 0.0, False)
    return largest[0]


def seeded_runs(rank: int, path: str) -> list[float]:
    """How far a seeded run that was saved and taken up here ends from the same one in one go: under
    fully_shard, and with the whole model on each rank.
    """
    part_of_run(rank, "ftrl", path, 0.5, True)
    resumed = part_of_run(rank, "ftrl", path, 0.5, False)["parameters"]
    at_once = train("ftrl", "adapters", steps=6, noise_multiplier=0.5, physical_batch_size=6)
    far = [float((resumed - at_once).abs().max())]

    plan = plan_for(METHODS["flat"](), noise_multiplier=0.5, steps=8)
    model = distributed_work.model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    with dpoptim.attach(plan, model, optimizer, TensorDataset(*records()), noise_seed=5) as private:
        for x, y in private.batches():
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
    distributed_work.saved_part(rank, "flat", path + "2", 0.5)
    again = distributed_work.resumed_part(rank, "flat", path + "2", 0.5, path + "3")["parameters"]
    at_once = torch.cat([p.detach().flatten() for p in model.parameters()])
    return [*far, float((again - at_once).abs().max())]


def parts_of_runs(rank: int, path: str, secret: str, key: bytes) -> None:
    """The same, in files of anybody's and sealed."""
    part_of_run(rank, "flat", path, 0.0, True)
    part_of_run(rank, "flat", secret, 0.0, True, key=key)


def saving(path: str, steps: int, again: Callable[[Any], None]) -> Any:
    """Some steps, a checkpoint, and what else is tried then."""
    plan = plan_for(METHODS["flat"](), steps=6)
    model = model_of("adapters")
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    x, y = records()
    with dpoptim.attach(
        plan, model, optimizer, TensorDataset(x.float(), y), noise_seed=5
    ) as private:
        for a, b in private.batches():
            private.backward(F.cross_entropy(model(a), b, reduction="none"))
            optimizer.step()
            if private.steps_done == steps:
                private.save(path)
            if private.steps_done == steps + 1:
                return again(private)


def full_disk(*arguments: Any, **options: Any) -> None:
    raise OSError(28, "No space left on device")


def saves_that_fail(rank: int, path: str) -> dict[str, Any]:
    """Errors of three saves after a good one, and how many ranks' files lie there after each."""
    found: dict[str, Any] = {"parts": []}

    def again(private: Any) -> None:
        for case, module, victim in (
            ("rank 0's file", rank_files, 0),
            ("rank 1's file", rank_files, 1),
            ("the checkpoint", checkpoint, 0),
        ):
            with (
                patch.object(module, "write_atomically", full_disk)
                if rank == victim
                else (nullcontext())
            ):
                found[case] = caught(lambda: private.save(path))
            dist.barrier()
            found["parts"].append(len(list(Path(path).parent.glob("run.*.part"))))
            dist.barrier()

    saving(path, 2, again)
    return found


def killed_in_save(rank: int, path: str, moment: str) -> str:
    """Rank 1 is killed while it writes its file; or rank 0 when the checkpoint is in its place, of
    which the other has not heard.
    """
    die = partial(os.kill, os.getpid(), signal.SIGKILL)
    write = checkpoint.write_atomically

    def again(private: Any) -> None:
        kill = {
            ("writing", 1): patch.object(rank_files, "write_atomically", lambda *a, **b: die()),
            ("written", 0): patch.object(
                checkpoint, "write_atomically", lambda *a, **b: (write(*a, **b), die())
            ),
        }
        with kill.get((moment, rank), nullcontext()):
            private.save(path)

    return caught(lambda: saving(path, 2, again))


def seen_while_saving(rank: int, path: str, folder: str) -> None:
    """Copies of the files right before and after each time that a rank touches one in a save: what
    is there if all are killed at that moment.
    """
    count = itertools.count()

    def copied(touch: Callable[..., Any]) -> Callable[..., Any]:
        def touched(*arguments: Any, **options: Any) -> Any:
            if not Path(arguments[-1]).name.startswith("run"):
                return touch(*arguments, **options)
            with open(f"{folder}/lock", "w") as lock:  # one rank at a time
                fcntl.flock(lock, fcntl.LOCK_EX)
                for moment in (nullcontext, partial(touch, *arguments, **options)):
                    moment()
                    copy = Path(folder) / f"{rank}-{next(count)}"
                    copy.mkdir()
                    for file in Path(path).parent.glob("run*"):
                        shutil.copy(file, copy)

        return touched

    def again(private: Any) -> None:
        with (
            patch.object(os, "replace", copied(os.replace)),
            patch.object(Path, "unlink", copied(Path.unlink)),
        ):
            private.save(path)

    saving(path, 2, again)


def goes_on_from(rank: int, path: str, key: bytes | None = None) -> dict[str, Any]:
    """What a resumed run begins with."""
    plan = plan_for(METHODS["flat"](), steps=6)
    model = model_of("adapters")
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    x, y = records()
    with dpoptim.attach(
        plan, model, optimizer, TensorDataset(x.float(), y), resume=path, checkpoint_key=key
    ) as private:
        averages = [
            p.full_tensor() if isinstance(p, DTensor) else p
            for state in optimizer.state.values()
            for p in state.values()
        ]
        flat = torch.cat([whole(model), *(each.flatten() for each in averages)])
        return {"steps": private.steps_done, "parameters": flat}


# ---- failures -----------------------------------------------------------------------------------


def one_fails(rank: int, where: str) -> str:
    """Rank 1 fails in its third step; what each rank hears."""
    plan = plan_for(METHODS["flat"](), noise_multiplier=1.0)
    model = model_of("per block")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = records()

    def run() -> None:
        with dpoptim.attach(plan, model, optimizer, TensorDataset(x.float(), y)) as private:

            def fail(*args: Any) -> None:
                if rank == 1 and private.steps_done == 2:
                    if where.startswith("killed"):
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise KeyError("of rank 1 alone")

            for a, b in private.batches():
                losses = F.cross_entropy(model(a), b, reduction="none")
                if private.steps_done == 2 and where != "between steps":
                    fail()
                private.backward(losses)
                optimizer.step()
                fail()

    return caught(run)


class Raising(nn.Module):
    """A block that raises on some ranks."""

    def __init__(self, failing: Sequence[int]) -> None:
        super().__init__()
        self.layer, self.failing = nn.Linear(8, 8), failing

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() in self.failing:
            raise KeyError("of these ranks alone")
        return self.layer(x)


def raises_in_trial(rank: int, failing: Sequence[int]) -> str:
    """What attach says of a model under fully_shard between whose blocks these ranks raise."""
    model = Blocks()
    model.blocks.insert(1, Raising(failing))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    x, y = records()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(x.float(), y)
    try:
        dpoptim.attach(plan_for(METHODS["flat"]()), model, optimizer, data)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ---- ways of training ---------------------------------------------------------------------------


def language(rank: int, way: str) -> Tensor:
    """A tiny GPT-2, with PEFT's adapters on a frozen base, or whole, where its embedding is tied
    to its head; per block.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.randint(0, 16, (N, 6), generator=torch.Generator().manual_seed(0))
    size = {"n_positions": 6, "n_embd": 8, "n_layer": 2, "n_head": 2, "use_cache": False}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    torch.manual_seed(3)
    model: nn.Module = GPT2LMHeadModel(
        GPT2Config(vocab_size=16, bos_token_id=0, eos_token_id=0, **size, **dropout)
    )
    blocks = model.transformer.h
    if way == "adapters":
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
        model = get_peft_model(model, adapters)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    plan = plan_for(METHODS["flat"](), batch_size=10, steps=2)
    with dpoptim.attach(plan, model, optimizer, TensorDataset(tokens), noise_seed=5) as private:
        for (a,) in private.batches(physical_batch_size=4):
            logits = model(input_ids=a).logits[:, :-1].transpose(1, 2)
            private.backward(F.cross_entropy(logits, a[:, 1:], reduction="none").mean(1))
            optimizer.step()
    return whole(model)


def other_ways(rank: int) -> dict[str, Tensor]:
    """Compiled, persons of several rows, and two optimizers."""
    x, y = records()
    data = TensorDataset(x.float(), y)
    results = {}
    for way in ("compiled", "persons", "several"):
        model = model_of("per block")
        called = torch.compile(model, backend="eager") if way == "compiled" else model
        held = list(model.parameters())
        halves = [held[:4], held[4:]] if way == "several" else [held]
        optimizers = [torch.optim.Adam(half, lr=0.01) for half in halves]
        persons: dict[str, Any] = (
            {"persons": [i // 2 for i in range(N)], "rows_per_record": 2}
            if way == "persons"
            else {}
        )
        plan = plan_for(METHODS["flat"](), n=N // 2 if persons else N, batch_size=10, steps=3)
        with dpoptim.attach(plan, model, optimizers, data, noise_seed=5, **persons) as private:
            for a, b in private.batches(physical_batch_size=6):
                private.backward(F.cross_entropy(called(a), b, reduction="none"))
                for optimizer in optimizers:
                    optimizer.step()
        results[way] = whole(model)
    return results


def order_of_events(rank: int) -> list[str]:
    """Of one step with noise: what was asked of the ledger, and when sums left this rank."""
    seen: list[str] = []
    honest_open, honest_trade = Gate.open, ProcessGroup.trade

    def opened(self: Gate) -> None:
        honest_open(self)
        seen.append("reserved" if self.reservation is not None else "not reserved")

    def sent(self: ProcessGroup, given: Tensor, sizes: Any, entries: int) -> Any:
        seen.append("sum")
        return honest_trade(self, given, sizes, entries)

    with patch.object(Gate, "open", opened), patch.object(ProcessGroup, "trade", sent):
        train("flat", "whole", noise_multiplier=1.0, steps=1, physical_batch_size=8)
    return seen
