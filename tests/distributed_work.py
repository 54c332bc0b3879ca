"""What the ranks of the tests in tests/distributed do. Every function takes its rank first, and
returns plain values.
"""

import itertools
import math
import os
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler, Subset, TensorDataset

import dpoptim
import dpoptim.distributed.checkpoint_planner  # slow, and the first save would wait for it
from dpoptim import files
from dpoptim.audit.two_worlds import Attack, audit_two_worlds
from dpoptim.clipping import Clipping
from dpoptim.distributed import control_groups, exchange
from dpoptim.distributed.process_group import ProcessGroup
from dpoptim.distributed.ranks import part_sizes
from dpoptim.distributed.replicated import ReplicatedTotals
from dpoptim.gate import Gate, planned
from dpoptim.gradients.accumulation import boxes
from dpoptim.noise.gaussian import add_normal
from dpoptim.noise.stream import KeyStream
from dpoptim.plan import Plan
from dpoptim.sampling import PoissonSampling
from dpoptim.training.batches.microbatches import Microbatch
from dpoptim.training.checkpoints import rank_files
from dpoptim.training.checkpoints.checkpoint import read_checkpoint
from dpoptim.training.checkpoints.rank_files import with_parts
from dpoptim.training.steps import Steps
from tried_once import models_tried_once

N, FEATURES = 60, 5
# the first optimizer imports half of torch: before ranks are forked
torch.optim.SGD([torch.zeros(1)], lr=0.1)


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def records(n: int = N) -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    return torch.randn(n, FEATURES, dtype=torch.float64) * 3, torch.randint(0, 3, (n,))


def spread(model: nn.Module, way: str) -> nn.Module:
    """The model, spread over the ranks in this way, as it is called; else as it is."""
    if way == "fully_shard":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return DistributedDataParallel(model) if way == "DistributedDataParallel" else model


def whole(model: nn.Module) -> Tensor:
    """All parameters as one vector, those of all ranks."""
    parts = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return torch.cat([part.detach().flatten() for part in parts])


def plan_for(
    method: Any, *, noise_multiplier: float = 0.0, steps: int = 6, n: int = N, batch_size: int = 20
) -> Plan:
    return method.plan(
        n=n, batch_size=batch_size, steps=steps, noise_multiplier=noise_multiplier, delta=1e-5
    )


def train(
    plan: Plan,
    *,
    wrapped: bool = False,
    data: Dataset[Any] | None = None,
    physical_batch_size: int | None = None,
    several: bool = False,
    look: Callable[[Any], None] = lambda private: None,
    **options: Any,
) -> dict[str, Any]:
    """A whole run: the final parameters as one vector, and public numbers of the run."""
    model = model_of()
    called = DistributedDataParallel(model) if wrapped else model
    halves = (
        [list(model.parameters())[:2], list(model.parameters())[2:]]
        if several
        else [list(model.parameters())]
    )
    optimizers = [torch.optim.SGD(half, lr=0.3, momentum=0.5) for half in halves]
    data = TensorDataset(*records(plan.n)) if data is None else data
    with dpoptim.attach(plan, called, optimizers, data, **options) as private:
        for x, y in private.batches(physical_batch_size=physical_batch_size):
            private.backward(F.cross_entropy(called(x), y, reduction="none"))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            look(private)
        reservation, clip_norm = private.reservation, private.clip_norm
    return {
        "parameters": whole(model),
        "reservation": reservation,
        "clip_norm": clip_norm,
        "entries": len(options["ledger"].entries()) if "ledger" in options else None,
    }


METHODS: dict[str, Callable[[], Any]] = {
    "flat": lambda: dpoptim.DPSGD(clip_norm=0.7),
    "automatic": lambda: dpoptim.DPSGD(clip_norm=0.7, clipping="automatic"),
    "per-layer": lambda: dpoptim.DPSGD(clip_norm=0.7, clipping="per-layer"),
    "scaled": lambda: dpoptim.DPSGD(dpoptim.ScaledClipNorm(0.7, every=2, power=0.5)),
    "quantile first": lambda: dpoptim.DPSGD(clip_norm=dpoptim.PrivateQuantile(0.5, share=0.3)),
    "quantile along": lambda: dpoptim.DPSGD(
        clip_norm=dpoptim.PrivateQuantile(0.5, when="all along")
    ),
    "dice": lambda: dpoptim.DiceSGD(clip_norm=0.5, reset_each_epoch=False),
    "ftrl": lambda: dpoptim.DPFTRL(clip_norm=0.7),
    "ftrl, drawn again": lambda: dpoptim.DPFTRL(clip_norm=0.7, buffers=0),
    "ftrl, b-min-sep": lambda: dpoptim.DPFTRL(0.7, sampling="b-min-sep", bands=2),
    "value": lambda: dpoptim.ValueClippedSGD(clip_norm=2.0),
}
WAYS: dict[str, dict[str, Any]] = {
    "bare": {},
    "wrapped": {"wrapped": True},
    "microbatches": {"physical_batch_size": 4, "wrapped": True},
    "several": {"several": True},
    "in a ball": {"projection": 0.3},
}


def without_noise(
    rank: int, methods: list[str], ways: list[str]
) -> dict[tuple[str, str], dict[str, Any]]:
    found, results = dict[Any, Any](), dict[tuple[str, str], dict[str, Any]]()
    for method, way in itertools.product(methods, ways):
        with models_tried_once(found, WAYS[way].get("wrapped")):
            plan = plan_for(METHODS[method]())
            results[method, way] = train(plan, noise_seed=5, **WAYS[way])
    return results


# ---- what goes wrong ----------------------------------------------------------------------------


def caught(what: Callable[[], Any]) -> str:
    """The error's class and message; raises AssertionError if there is none."""
    try:
        what()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def differing(rank: int) -> dict[str, str]:
    """Errors of `attach` on ranks that do not agree, one after the other in the same processes."""
    plan = plan_for(METHODS["flat"](), noise_multiplier=1.0)
    other = plan_for(METHODS["flat"](), noise_multiplier=1.0 + rank)
    x, y = records()
    nominal = dpoptim.DPSGD(1.0).plan(  # n is public, and compared with nothing
        n=3 * len(x), batch_size=8, steps=2, noise_multiplier=1.0, delta=1e-5
    )

    def attach(
        plan: Plan = plan,
        model: nn.Module | None = None,
        *,
        data: Any = None,
        kind: Any = torch.optim.SGD,
        **more: Any,
    ) -> None:
        model = model_of() if model is None else model
        optimizer = kind(model.parameters(), lr=more.pop("lr", 0.1))
        with dpoptim.attach(
            plan, model, optimizer, TensorDataset(x, y) if data is None else data, **more
        ):
            pass

    def other_values() -> nn.Module:
        model = model_of()
        with torch.no_grad():
            model[0].bias[0] += rank * 1e-9
        return model

    frozen = model_of()
    frozen[0].requires_grad_(rank == 0)
    broken = (
        model_of()
        if rank == 0
        else nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4)).double()
    )
    return {
        "plan": caught(lambda: attach(other)),
        "values": caught(lambda: attach(model=other_values())),
        "optimizer": caught(
            lambda: attach(kind=torch.optim.SGD if rank == 0 else torch.optim.Adagrad)
        ),
        "settings": caught(lambda: attach(lr=0.1 * (1 + rank))),
        "reduction": caught(lambda: attach(loss_reduction="mean" if rank == 0 else "sum")),
        "data": caught(lambda: attach(data=TensorDataset(x + rank, y))),
        "order": caught(lambda: attach(data=TensorDataset(x.roll(rank, 0), y.roll(rank, 0)))),
        "frozen": caught(lambda: attach(model=frozen)),
        "refused": caught(lambda: attach(model=broken)),
        "number of records": caught(
            lambda: attach(plan_for(METHODS["ftrl"](), noise_multiplier=1.0), sharded=True)
        ),
        "same tensors as shards": caught(lambda: attach(nominal, sharded=True)),
        "same items as shards": caught(
            lambda: attach(nominal, data=[(x[i], y[i]) for i in range(len(x))], sharded=True)
        ),
        "shards filled up": caught(
            lambda: attach(
                nominal,
                data=Subset(TensorDataset(x, y), [*DistributedSampler(x[:59], shuffle=False)]),  # type: ignore[arg-type]
                sharded=True,
            )
        ),
        "works after all that": "" if attach() is None else "no",
    }


def budget(rank: int, path: str) -> dict[str, Any]:
    """Rank 0's ledger admits one run; only rank 0 has the file."""
    plan = plan_for(METHODS["flat"](), noise_multiplier=3.0)
    ledger = (
        dpoptim.Ledger(path, epsilon=plan.epsilon(1e-5) * 1.3, delta=1e-5) if rank == 0 else None
    )
    options = {"ledger": ledger} if rank == 0 else {}
    first = train(plan, **options)["reservation"]
    second = caught(lambda: train(plan, **options))
    left = "" if ledger is None else [(entry.state, entry.id) for entry in ledger.entries()]
    return {"first": first, "second": second, "entries": left}


def one_raises(rank: int, where: str, wrapped: bool) -> str:
    """Rank 1 fails in its loop, or leaves it early, or steps once more; what each rank hears."""
    plan = plan_for(METHODS["flat"](), noise_multiplier=1.0)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        with dpoptim.attach(
            plan,
            DistributedDataParallel(model) if wrapped else model,
            optimizer,
            TensorDataset(*records()),
        ) as private:
            for x, y in private.batches():
                if rank == 1 and private.steps_done == 2 and where == "raises":
                    raise KeyError("of rank 1 alone")
                private.backward(F.cross_entropy(model(x), y, reduction="none"))
                optimizer.step()
                if where == "leaves" and rank == 1 and private.steps_done == 2:
                    break
                if where == "ahead" and rank == 1 and private.steps_done == 2:
                    private._steps.done += 1  # a step that it did not share

    return caught(run)


def static_graph(rank: int, attached: str) -> tuple[str, int]:
    """What a rank hears whose wrapper has a static graph, and how much was charged.

    The wrapper is attached itself, or around what is.
    """
    wrapper = DistributedDataParallel(model_of(), static_graph=True)
    ledger, plan = dpoptim.Ledger(), plan_for(METHODS["flat"](), noise_multiplier=1.0)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    of = wrapper if attached == "wrapper" else wrapper.module

    def run() -> None:
        dpoptim.attach(plan, of, optimizer, TensorDataset(*records()), ledger=ledger)

    return caught(run), len(ledger.entries())


def on_one_rank(rank: int, path: str) -> dict[str, str]:
    """Rank 0 alone saves, ends the run, or asks what one rank may ask alone; what each hears."""
    plan = plan_for(METHODS["flat"](), noise_multiplier=1.0)
    asked: dict[str, Callable[[Any], Any]] = {
        "save": lambda private: private.save(path),
        "finish": lambda private: private.finish(),
        "no refund": lambda private: private.why_no_refund,
    }

    def look(private: Any, ask: Callable[[Any], Any]) -> None:
        if rank == 0 and private.steps_done == 2:
            ask(private)

    def run(ask: Callable[[Any], Any]) -> None:
        train(plan, look=lambda private: look(private, ask), ledger=dpoptim.Ledger())

    return {
        name: caught(lambda ask=ask: run(ask)) if name != "no refund" else str(run(ask))
        for name, ask in asked.items()
    }


def in_another_order(rank: int) -> str:
    """Two runs in the same processes, alternately; rank 1 begins with the second one."""
    plan = plan_for(METHODS["flat"](), noise_multiplier=1.0, steps=2)

    def run() -> None:
        models = [model_of(), model_of()]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        data = TensorDataset(*records())
        attached = [
            dpoptim.attach(plan, *each, data) for each in zip(models, optimizers, strict=True)
        ]
        with attached[0] as first, attached[1] as second:
            turns = [
                (private, iter(private.batches()), *each)
                for private, *each in zip((first, second), models, optimizers, strict=True)
            ]
            for private, batches, model, optimizer in turns[:: -1 if rank else 1]:
                x, y = next(batches)
                private.backward(F.cross_entropy(model(x), y, reduction="none"))
                optimizer.step()

    return caught(run)


def groups_that_overlap(rank: int) -> list[Tensor]:
    """Runs of some ranks, then of all: these belong to other numbers of groups before."""
    some = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    plan = plan_for(METHODS["flat"](), steps=2)
    for place, group in enumerate(some):
        if rank in (place, place + 1):
            train(plan, process_group=group, noise_seed=5)
    return train(plan, noise_seed=5)["parameters"]


def otherwise_on_a_rank(rank: int, path: str) -> dict[str, str]:
    """Errors where a rank gives another path, key or ledger, and what is there afterwards."""
    plan = plan_for(METHODS["flat"](), noise_multiplier=1.0, steps=4)
    found: dict[str, str] = {}

    def run(name: str = path, **options: Any) -> None:
        def look(private: Any) -> None:
            if private.steps_done == 2:
                private.save(name)

        train(plan, look=look, **options)

    ledger = {"ledger": dpoptim.Ledger(path + ".ledger")} if rank else {}
    found["path"] = caught(lambda: run(f"{path}-{rank}"))
    found["key"] = caught(lambda: run(checkpoint_key=bytes([rank]) * 32))
    found["ledger"] = caught(lambda: run(**ledger))
    for name, own in (("resume on rank 0", rank == 0), ("resume on rank 1", rank == 1)):
        found[name] = caught(lambda own=own: run(resume=path if own else None))
    return found


def refused_by_one(rank: int, sharded: bool) -> str:
    """Rank 1 is refused before the ranks compare anything, while others wait for it."""
    model = model_of()
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    kind = torch.optim.LBFGS if rank == 1 else torch.optim.SGD
    data = TensorDataset(*records())
    plan = plan_for(METHODS["flat"](), noise_multiplier=1.0)
    return caught(lambda: dpoptim.attach(plan, model, kind(model.parameters(), lr=0.1), data))


def ends(rank: int, destroys: bool) -> tuple[bool, bool]:
    """Whether the group for agreement is there after a run, and once the process has ended."""
    train(plan_for(dpoptim.DPSGD(clip_norm=1.0)), wrapped=True)
    (control,) = (weakref.ref(group) for group in control_groups.control_groups.values())
    there = control() is not None
    if destroys:
        dist.destroy_process_group()
    control_groups.close_control_groups()
    return there, control() is not None


def dies(rank: int) -> str:
    """The last rank is killed after its second step."""
    plan = plan_for(METHODS["flat"](), noise_multiplier=1.0)

    def look(private: Any) -> None:
        if rank == dist.get_world_size() - 1 and private.steps_done == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    return caught(lambda: train(plan, look=look))


# ---- what would break the guarantee -------------------------------------------------------------


class Wide(nn.Module):
    """Many parameters whose gradients are zero: what is released is the noise."""

    def __init__(self, entries: int) -> None:
        super().__init__()
        self.layer = nn.Linear(entries, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.expand(-1, self.layer.in_features))[:, 0]


def released_noise(entries: int, steps: int, **options: Any) -> Tensor:
    """Released noise in units of its standard deviation: (steps, entries)."""
    plan = plan_for(METHODS["flat"](), noise_multiplier=2.0, steps=steps)
    model = Wide(entries)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    released = []
    with dpoptim.attach(
        plan, model, optimizer, TensorDataset(torch.zeros(N, 1)), **options
    ) as private:
        for (x,) in private.batches():
            private.backward(model(x))
            optimizer.step()
            released.append(
                -model.layer.weight.detach()[0].double() * plan.batch_size / (2.0 * 0.7)
            )
            nn.init.zeros_(model.layer.weight)
    return torch.stack(released)


def noise_is_wrong(noise: Tensor) -> bool:
    """Whether it is not standard normal and independent: between coordinates, the ranks' parts,
    and steps; at 5 sigma.
    """
    total = noise.numel()
    if abs(float(noise.square().sum()) - total) > 5 * math.sqrt(2 * total):
        return True
    half = noise.shape[1] // 2
    pairs = [
        (noise[:, :half], noise[:, -half:]),
        (noise[:, 1:], noise[:, :-1]),
        (noise[1:], noise[:-1]),
    ]
    return any(abs(float((a * b).sum())) > 5 * math.sqrt(a.numel()) for a, b in pairs)


def sums_are_wrong(expected: Tensor) -> bool:
    return (
        float(
            (train(plan_for(METHODS["flat"]()), noise_seed=5)["parameters"] - expected).abs().max()
        )
        > 1e-9
    )


def charged_wrongly(path: str) -> bool:
    """Whether a run is not one charge, or a sum leaves a rank before the charge is written."""
    honest, early = ProcessGroup.sum_parts, []
    with dpoptim.Ledger(path) as ledger:
        before = len(ledger.entries())
        dist.barrier()

        def watched(self: ProcessGroup, vector: Tensor) -> Tensor:
            early.append(len(dpoptim.Ledger(path).entries()) == before)
            return honest(self, vector)

        with patch.object(ProcessGroup, "sum_parts", watched):
            train(plan_for(METHODS["flat"](), noise_multiplier=2.0), ledger=ledger)
        dist.barrier()
        return any(early) or len(dpoptim.Ledger(path).entries()) != before + 1


def runs_are_mixed(rank: int) -> bool:
    """Whether sums of one run are added to another's, without an error."""
    try:
        return not in_another_order(rank).startswith("RankError: ")
    except AssertionError:
        return True


def mutants(rank: int) -> dict[str, tuple[str, Any]]:
    """Bugs, by name: what would notice each, and the change to the code."""
    honest_sum, honest_begin, honest_write = (
        ProcessGroup.sum_parts,
        Steps.begin,
        ReplicatedTotals.write_means,
    )
    honest_draw = PoissonSampling.draw

    def forgotten(self: ProcessGroup, vector: Tensor) -> Tensor:
        return honest_sum(self, vector.zero_() if rank == 1 else vector)

    arrived: list[bool] = []
    honest_open = Gate.open

    def then_open(self: ProcessGroup, vector: Tensor) -> Tensor:
        total = honest_sum(self, vector)
        arrived.append(True)
        return total

    @contextmanager
    def reserved_late() -> Iterator[None]:
        def put_off(self: Gate) -> None:
            if arrived:
                honest_open(self)

        with (
            patch.object(ProcessGroup, "sum_parts", then_open),
            patch.object(Gate, "open", put_off),
        ):
            yield

    def unclipped(self: Steps, microbatch: Microbatch) -> None:
        self._engine.clipping = Clipping(1e6) if rank == 1 else self._engine.clipping
        honest_begin(self, microbatch)

    def by_shard(self: ReplicatedTotals, released: list[Tensor], divisor: float) -> None:
        honest_write(self, released, divisor / self._ranks.size)

    def noise_of_all(self: ProcessGroup, vector: Tensor) -> Tensor:
        add_normal(KeyStream(), vector, 2.0 * 0.7)
        return honest_sum(self, vector)

    def more_often(self: PoissonSampling, coins: KeyStream, records: int) -> Any:
        return honest_draw(PoissonSampling(min(1.0, self.sample_rate * 2)), coins, records)

    return {
        "none": ("", nullcontext()),
        "noise by no rank": ("noise", patch.object(Gate, "_add_noise", lambda self, sums: None)),
        "noise by every rank": ("noise", patch.object(ProcessGroup, "sum_parts", noise_of_all)),
        "one key for the noise of all ranks": (
            "noise",
            patch.object(
                ProcessGroup,
                "own_stream",
                lambda self, seed, purpose: self.common_stream(seed, purpose),
            ),
        ),
        "noise of standard deviation sigma / sqrt(W)": (
            "noise",
            patch.object(
                planned,
                "add_normal",
                lambda stream, out, std: add_normal(stream, out, std / math.sqrt(2)),
            ),
        ),
        "a rank's sum left out": ("sums", patch.object(ProcessGroup, "sum_parts", forgotten)),
        "a rank not clipped": ("sums", patch.object(Steps, "begin", unclipped)),
        "divided by the shard's batch size": (
            "sums",
            patch.object(ReplicatedTotals, "write_means", by_shard),
        ),
        "sampling rate of the shard": ("sums", patch.object(PoissonSampling, "draw", more_often)),
        "records on all ranks": (
            "sums",
            patch.object(ProcessGroup, "dealer", lambda self, coins: lambda batch: batch),
        ),
        "reserved after the sum": ("charge", reserved_late()),
        "signs that do not tell runs apart": (
            "runs",
            patch.object(
                ProcessGroup,
                "_run",
                property(lambda self: 0, lambda self, run: None),
                create=True,
            ),
        ),
        "each rank reserves": (
            "charge",
            patch.object(ProcessGroup, "ledger", lambda self, ledger: ledger),
        ),
    }


def caught_mutants(rank: int, expected: Tensor, path: str) -> dict[str, bool]:
    """Which mutants are noticed, each by its detector; the code as it is, by any."""
    detectors = {
        "noise": lambda: noise_is_wrong(released_noise(20_000, 3)),
        "sums": lambda: sums_are_wrong(expected),
        "charge": lambda: charged_wrongly(path),
        "runs": lambda: runs_are_mixed(rank),
    }
    found = {}
    for name, (detector, change) in mutants(rank).items():
        with change:
            found[name] = any(
                detect() for key, detect in detectors.items() if detector in ("", key)
            )
    return found


def a_million_draws(rank: int) -> tuple[bool, float]:
    noise = released_noise(200_000, 5)
    return noise_is_wrong(noise), float(noise.sum())


def audited(
    rank: int, all_on_last: bool, attack: Attack | None = None
) -> tuple[float, float, float]:
    """The two-world audit, as every rank sees it; with all canaries on the last rank, or dealt
    out.
    """
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=40_000, batch_size=10_000, steps=4, noise_multiplier=1.0, delta=1e-5
    )
    last = dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1
    dealt = patch.object(
        ProcessGroup,
        "dealer",
        lambda self, coins: lambda batch: batch if last else batch[:0],
    )
    with dealt if all_on_last else nullcontext():
        result = audit_two_worlds(plan, seed=1, noise_seed=2, attack=attack)
    return result.lower_bound, result.claimed, result.limit


# ---- unequal shares -----------------------------------------------------------------------------


def shards(rank: int, sizes: list[int], method: str) -> dict[str, Any]:
    """Records of its own on every rank: trains with noise off at a sampling rate of 1, or on fixed
    batches.
    """
    x, y = records(sum(sizes))
    start = sum(sizes[:rank])
    own = TensorDataset(x[start : start + sizes[rank]], y[start : start + sizes[rank]])
    plan = plan_for(
        METHODS[method](), n=sum(sizes), batch_size=sum(sizes) if method == "flat" else 6, steps=4
    )
    return train(plan, data=own, noise_seed=5, sharded=True)


def few_records(rank: int, n: int) -> Tensor:
    """Fewer records than ranks, and batches that are empty on most ranks or on all."""
    plan = plan_for(METHODS["flat"](), n=n, batch_size=1, steps=12)
    return train(plan, noise_seed=7)["parameters"]


# ---- checkpoints --------------------------------------------------------------------------------


def ledger_of(rank: int, plan: Plan, path: str) -> dict[str, Any]:
    if rank or not plan.noise_multiplier:
        return {}
    return {"ledger": dpoptim.Ledger(path + ".ledger", neighboring=plan.neighboring)}


def saved_part(rank: int, method: str, path: str, noise_multiplier: float) -> str | None:
    """The first three steps of a run, left at a checkpoint."""
    plan = plan_for(METHODS[method](), noise_multiplier=noise_multiplier, steps=8)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    options = ledger_of(rank, plan, path)
    with dpoptim.attach(
        plan, model, optimizer, TensorDataset(*records()), noise_seed=5, **options
    ) as private:
        for x, y in private.batches():
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
            if private.steps_done == 3:
                if rank == 0:  # as if workers had run ahead on this rank alone
                    private._loader.queue.draw_ahead(3)
                private.save(path)
                return private.reservation
    return None


def resumed_part(
    rank: int, method: str, path: str, noise_multiplier: float, again: str
) -> dict[str, Any]:
    """The rest of it. What is saved again, right after it was taken up, is what was there."""
    plan = plan_for(METHODS[method](), noise_multiplier=noise_multiplier, steps=8)
    torch.manual_seed(9)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    options = ledger_of(rank, plan, path)
    data = TensorDataset(*records())
    with dpoptim.attach(
        plan, model, optimizer, data, noise_seed=5, resume=path, **options
    ) as private:
        private.save(again)
        for x, y in private.batches():
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
        reservation = private.reservation
    parameters = whole(model)
    return {"parameters": parameters, "steps": private.steps_done, "reservation": reservation}


def part_in_shards(
    rank: int, sizes: list[int], method: str, path: str, first: bool, ahead: int = 0
) -> Tensor:
    """The first two steps of a run on records of each rank's own, left at a checkpoint; or the
    rest. Noise off.
    """
    x, y = records(sum(sizes))
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    every = sum(sizes) if method == "flat" else 6
    plan = plan_for(METHODS[method](), n=sum(sizes), batch_size=every, steps=5)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    options = {"sharded": True} if len(sizes) > 1 else {}
    options |= {} if first else {"resume": path}
    with dpoptim.attach(
        plan, model, optimizer, TensorDataset(x[own], y[own]), **options
    ) as private:
        for a, b in private.batches():
            private.backward(F.cross_entropy(model(a), b, reduction="none"))
            optimizer.step()
            if first and private.steps_done == 2:
                if rank == 0:  # as if workers had run ahead on this rank alone
                    private._loader.queue.draw_ahead(ahead)
                private.save(path)
                break
    return whole(model)


def shards_go_on(rank: int, sizes: list[int], method: str, path: str) -> Tensor | str:
    """The rest, or why not."""
    try:
        return part_in_shards(rank, sizes, method, path, False)
    except ValueError as error:
        return str(error)


def with_whole_tensors(path: str) -> dict[str, Any]:
    """What a checkpoint holds, the ranks' files included."""
    contents = with_parts(read_checkpoint(Path(path))[0], Path(path), None)
    return {key: boxes.whole(value) for key, value in contents.items() if key != "parts"}


def as_lists(state: Any) -> Any:
    """Tensors as lists, batches in any order."""
    if isinstance(state, Tensor):
        return state.tolist()
    if isinstance(state, dict):
        return {
            key: [sorted(as_lists(b)) for b in value] if key == "waiting" else as_lists(value)
            for key, value in state.items()
        }
    if isinstance(state, float):
        return repr(state)  # nan is not itself
    return [as_lists(each) for each in state] if isinstance(state, list | tuple) else state


def turns_of_a_save(rank: int, path: str) -> list[bool]:
    """Whether another program has to wait: before a save, when ranks' files are there, when the
    checkpoint names them, and after.
    """
    seen: list[bool] = []

    def look_first(act: Callable[..., Any]) -> Callable[..., Any]:
        def looked(*arguments: Any, **options: Any) -> Any:
            with patch.object(files, "TURN", -1.0):
                try:
                    with files.turn_in(Path(path).parent):
                        seen.append(False)
                except OSError:
                    seen.append(True)
            return act(*arguments, **options)

        return looked

    def in_turn() -> None:
        for turn in range(dist.get_world_size()):  # or each would find the other looking
            if turn == rank:
                look_first(dist.barrier)()
            else:
                dist.barrier()

    def save(private: Any) -> None:
        if private.steps_done == 2:
            in_turn()
            with (
                patch.object(
                    rank_files, "write_checkpoint", look_first(rank_files.write_checkpoint)
                ),
                patch.object(
                    rank_files,
                    "remove_other_rank_files",
                    look_first(rank_files.remove_other_rank_files),
                ),
            ):
                private.save(path)
            dist.barrier()
            in_turn()

    train(plan_for(METHODS["flat"](), steps=3), look=save)
    return seen


# ---- killed -------------------------------------------------------------------------------------


def until_killed(rank: int, path: str, victim: int, step: int, seconds: float) -> str:
    """A run that saves every third step and writes down what it released; one rank is killed so
    long after a step, or after it began.
    """
    plan = plan_for(METHODS["dice"](), noise_multiplier=1.0, steps=500)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = ledger_of(rank, plan, path)
    dist.barrier()

    def begin_to_die(steps_done: int) -> None:
        if rank == victim and steps_done == step:
            threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()

    begin_to_die(0)

    def run() -> None:
        with dpoptim.attach(
            plan, model, optimizer, TensorDataset(*records()), **options
        ) as private:
            for x, y in private.batches():
                private.backward(F.cross_entropy(model(x), y, reduction="none"))
                optimizer.step()
                with open(f"{path}.released.{rank}", "a") as log:
                    log.write(f"{private.reservation}\n")
                begin_to_die(private.steps_done)
                if private.steps_done % 3 == 0:
                    private.save(path)

    return caught(run)


def goes_on(rank: int, path: str) -> tuple[int, str | None]:
    """Three more steps from the checkpoint."""
    plan = plan_for(METHODS["dice"](), noise_multiplier=1.0, steps=500)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = ledger_of(rank, plan, path)
    with dpoptim.attach(
        plan, model, optimizer, TensorDataset(*records()), resume=path, **options
    ) as private:
        started = private.steps_done
        for x, y in private.batches():
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
            if private.steps_done == started + 3:
                break
        return private.steps_done - started, private.reservation


# ---- ways of training ---------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(FEATURES, 8)
        self.down, self.up = nn.Linear(FEATURES, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.head = nn.Linear(8, 3)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(x) + self.up(self.down(x))))


def other_ways(rank: int) -> dict[str, Tensor]:
    """Adapters on a frozen base, under autocast, compiled, and persons of several rows: final
    parameters, float32.
    """
    x, y = records()
    data = TensorDataset(x.float(), y)
    results = {}
    for name in ("adapters", "autocast", "compiled", "persons"):
        torch.manual_seed(3)
        model = Adapted()
        ran = DistributedDataParallel(model) if dist.is_initialized() else model
        called = torch.compile(ran, backend="eager") if name == "compiled" else ran
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
        persons = (
            {"persons": [i // 2 for i in range(N)], "rows_per_record": 2}
            if name == "persons"
            else {}
        )
        plan = plan_for(METHODS["flat"](), n=N // 2 if persons else N, batch_size=10, steps=4)
        # the wrapper is called either way
        attached = model if name == "adapters" else ran
        with dpoptim.attach(plan, attached, optimizer, data, noise_seed=5, **persons) as private:
            for a, b in private.batches(physical_batch_size=6):
                with torch.autocast("cpu", enabled=name == "autocast"):
                    losses = F.cross_entropy(called(a).float(), b, reduction="none")
                private.backward(losses)
                optimizer.step()
        results[name] = whole(model)
    return results


# ---- vectors that travel ------------------------------------------------------------------------


def exchanged(rank: int, sizes: list[int], stretch: int) -> tuple[Tensor, list[Tensor], int]:
    """A vector added up over the ranks and handed out in float32 to tensors of other lengths, so
    many entries of a part at a time: the sum, what was written, and how often something travelled.
    """
    size, entries = dist.get_world_size(), sum(sizes)
    vector = torch.arange(entries, dtype=torch.float64) * (rank + 1)
    ranks, calls = ProcessGroup(dist.group.WORLD), Counter[str]()

    def counted(*arguments: Any, **options: Any) -> Any:
        calls["exchanges"] += 1
        return honest(*arguments, **options)

    honest = dist.all_to_all_single
    with (
        patch.object(exchange, "STRETCH", size * stretch),
        patch.object(exchange, "LEAST", 1),
        patch.object(dist, "all_to_all_single", counted),
    ):
        own = ranks.sum_parts(vector, sizes)
        total = torch.cat(ranks.all_gather(own))
        part = total.split(part_sizes(entries, size))[rank]
        into = [torch.empty(entries // 3), torch.empty(0), torch.empty(entries - entries // 3)]
        ranks.join_parts(part, into, lambda each: each.float().div_(2.0))
    return total, into, calls["exchanges"]
