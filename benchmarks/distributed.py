"""Private steps in two processes: their time over plain ones, the bytes they send, and a model of
both for a thousand ranks.

All variants take turns in the same two processes (gloo, one thread each, the workload's batch on
each): plain and private training of one process (each rank for itself, at the same time, so that
both have the same neighbours), plain DDP and private DDP, Opacus' DPDDP where it is installed, and
fully_shard, plain and private. Medians are compared. Private steps are whole: delivery by a plan of
sampling rate 1, clipping, noise, agreement, charge.

Bytes and collectives of a private step are counted as they are called, as what this rank sends.
Plain DDP's all-reduce happens in C++ and is taken to be of 4 bytes a parameter. The model of many
ranks is alpha-beta: a collective of b bytes costs alpha for each message in a row, and beta b; with
a fixed batch on each rank, so compute stays and communication grows.

Run: ``python benchmarks/distributed.py [--workload GPT ...] [--out benchmarks/results]``; the
model alone, from saved counts: ``--model-only``.
"""

import argparse
import csv
import math
import os
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import dpoptim
from saving import save_csv
from workloads import WORKLOADS, Workload

CHOSEN = ("MLP 784-256-10", "GPT", "ViT")
STEPS = 100_000  # of the plan, more than are taken
Step = Callable[[], None]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4)


def sharded(model: nn.Module, group: Any) -> nn.Module:
    """By fully_shard, the whole model as one group."""
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(group),)))
    return model


WRAPPERS: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "one": lambda model, group: model,
    "DDP": lambda model, group: DistributedDataParallel(model, process_group=group),
    "FSDP2": sharded,
}


def plain(work: Workload, kind: str, group: Any) -> Step:
    model = WRAPPERS[kind](work.build(), group)
    (x, y), optimizer = work.data(), sgd(model)

    def step() -> None:
        optimizer.zero_grad()
        work.loss(model(x), y, "mean").backward()
        optimizer.step()

    return step


def private(work: Workload, kind: str, group: Any) -> Step:
    """A whole step of `dpoptim.attach`, in which this rank's part is always the same batch."""
    model = WRAPPERS[kind](work.build(), group)
    (x, y), optimizer = work.data(), sgd(model)
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
        attached.backward(work.loss(model(a), b, "none"))
        optimizer.step()
        optimizer.zero_grad()

    return step


def opacus(work: Workload, kind: str, group: Any) -> Step:
    """Opacus' DPDDP with per-sample gradients by hooks."""
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer
    from opacus.optimizers.ddpoptimizer import DistributedDPOptimizer
    from opacus.validators import ModuleValidator

    model = ModuleValidator.fix(work.build())
    x, y = work.data()
    common = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": len(x)}
    wrapped = GradSampleModule(
        model if kind == "one" else DifferentiallyPrivateDistributedDataParallel(model)
    )
    optimizer = (DPOptimizer if kind == "one" else DistributedDPOptimizer)(sgd(model), **common)

    def step() -> None:
        optimizer.zero_grad()
        work.loss(wrapped(x), y, "mean").backward()
        optimizer.step()

    return step


MAKERS: dict[str, Callable[[Workload, str, Any], Step]] = {
    "plain": plain,
    "private": private,
    "Opacus": opacus,
}
VARIANTS = [
    (who, kind)
    for kind in ("one", "DDP", "FSDP2")
    for who in MAKERS
    if (who, kind) != ("Opacus", "FSDP2")
]

# ---- what is sent -------------------------------------------------------------------------------

Sent = Counter[str]  # "bytes" that this rank sends; collectives of "vectors", and "small" ones


@contextmanager
def counted() -> Iterator[Sent]:
    """Count collectives as they are called from Python: what this rank sends of a tensor."""
    sent: Sent = Counter()
    size = dist.get_world_size()
    share = (size - 1) / size
    # per collective: which argument travels, and how much of it this rank sends
    rules = {
        "all_to_all_single": (1, share),
        "all_gather_single": (1, size - 1),
        "all_reduce": (0, 2 * share),
        "broadcast": (0, share),
        "reduce": (0, share),
    }

    def counting(name: str, place: int, part: float) -> Callable[..., Any]:
        honest = getattr(dist, name)

        def call(*arguments: Any, **options: Any) -> Any:
            tensor = arguments[place]
            large = tensor.numel() > 1000
            sent["bytes"] += round(tensor.numel() * tensor.element_size() * part)
            sent["vectors" if large else "small"] += 1
            return honest(*arguments, **options)

        return patch.object(dist, name, call)

    patches = [counting(name, *rule) for name, rule in rules.items()]
    for each in patches:
        each.start()
    try:
        yield sent
    finally:
        for each in patches:
            each.stop()


# ---- two processes ------------------------------------------------------------------------------


def seconds(step: Step, repeats: int) -> float:
    dist.barrier()
    started = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - started) / repeats


def rank_main(rank: int, size: int, store: str, title: str, rounds: int, answer: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    alone = [dist.new_group([each]) for each in range(size)][rank]
    work = WORKLOADS[title]
    steps: dict[tuple[str, str], Step] = {}
    missing: dict[tuple[str, str], str] = {}
    for who, kind in VARIANTS:
        torch.manual_seed(0)
        try:
            step = MAKERS[who](work, kind, alone if kind == "one" else dist.group.WORLD)
            step()
            step()
            steps[who, kind] = step
        except Exception as error:  # the same on both ranks
            missing[who, kind] = f"{type(error).__name__}: {str(error).splitlines()[0]}"[:120]
    sent: dict[str, float] = {}
    if ("private", "DDP") in steps:
        with counted() as found:
            for _ in range(10):
                steps["private", "DDP"]()
        sent = {key: value / 10 for key, value in found.items()}
    # as often as both ranks do it in a tenth of a second
    often = torch.tensor([0.1 / seconds(step, 2) for step in steps.values()])
    dist.all_reduce(often, dist.ReduceOp.MIN)
    repeats = dict(zip(steps, often.int().clamp(1, 20).tolist(), strict=True))
    times: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for _ in range(rounds):
        for key, step in steps.items():
            times[key].append(seconds(step, repeats[key]))
    if rank == 0:
        medians = {key: statistics.median(each) for key, each in times.items()}
        parameters = sum(p.numel() for p in work.build().parameters())
        answer.put((medians, missing, sent, parameters))
    dist.barrier()
    os._exit(0)  # attached trainings are left as they are


def measure(title: str, rounds: int) -> tuple[Any, Any, Any, int]:
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answer = context.Queue()
        arguments = (2, f"{folder}/store", title, rounds, answer)
        ranks = [
            context.Process(target=rank_main, args=(rank, *arguments), daemon=True)
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        found = None
        while found is None:
            try:
                found = answer.get(timeout=2)
            except Empty:
                if any(rank.exitcode for rank in ranks):
                    raise RuntimeError("a rank ended without an answer; see above") from None
        for rank in ranks:
            rank.join()
    return found


def row_of(title: str, found: tuple[Any, Any, Any, int]) -> dict[str, object]:
    """Milliseconds of all variants, and the ratios; "beyond one process": private DDP over plain
    DDP, as a multiple of the same ratio in one process.
    """
    medians, missing, sent, parameters = found
    row: dict[str, object] = {"workload": title, "parameters": parameters}
    for who, kind in VARIANTS:
        taken = medians.get((who, kind))
        row[f"{who}, {kind} ms"] = "" if taken is None else f"{taken * 1e3:.4g}"
    for who in ("private", "Opacus"):
        for kind in ("one", "DDP", "FSDP2"):
            taken, base = medians.get((who, kind)), medians.get(("plain", kind))
            row[f"{who} over plain, {kind}"] = f"{taken / base:.3g}" if taken and base else ""
    shares = [row[f"private over plain, {kind}"] for kind in ("one", "DDP")]
    row["beyond one process"] = (
        f"{float(str(shares[1])) / float(str(shares[0])):.3g}" if all(shares) else ""
    )
    row |= {key: f"{sent.get(key, math.nan):.6g}" for key in ("bytes", "vectors", "small")}
    row["missing"] = "; ".join(f"{' '.join(key)}: {why}" for key, why in missing.items())
    return row


# ---- a thousand ranks ---------------------------------------------------------------------------

NETWORKS = {  # seconds a message, seconds a byte
    "Ethernet 10 Gbit/s": (50e-6, 8 / 10e9),
    "InfiniBand 200 Gbit/s": (5e-6, 8 / 200e9),
}
RANKS = (2, 8, 32, 128, 512, 1000)
NOISE = 4e-9  # seconds a number; see docs/speed.md


def communication(
    size: int, parameters: int, network: tuple[float, float], small: float | None
) -> float:
    """Seconds a step beyond computing.

    Args:
        small: collectives of a few bytes in a private step, as counted; None: plain DDP, one ring
            all-reduce in float32. Private: each rank sends every other one its part in float64
            (pairwise), then a ring all-gather in float32. Small ones take a message of each rank
            in a row where all gather, which is taken for all.
    """
    alpha, beta = network
    share = (size - 1) / size
    if small is None:
        return 2 * (size - 1) * alpha + 2 * share * 4 * parameters * beta
    vectors = 2 * (size - 1) * alpha + share * (8 + 4) * parameters * beta
    return vectors + small * (size - 1) * alpha


def modelled(row: dict[str, str]) -> list[dict[str, object]]:
    """Efficiency (computing over the whole step) of plain and private for one workload: its batch
    on each rank, its computing time as measured in one process.
    """
    parameters, small = int(row["parameters"]), float(row["small"])
    computing = {who: float(row[f"{who}, one ms"]) / 1e3 for who in ("plain", "private")}
    rows: list[dict[str, object]] = []
    for network, figures in NETWORKS.items():
        for size in RANKS:
            wait = {
                "plain": communication(size, parameters, figures, None),
                "private": communication(size, parameters, figures, small),
            }
            # what a rank no longer draws
            busy = computing | {
                "private": computing["private"] - NOISE * parameters * (1 - 1 / size)
            }
            step = {who: busy[who] + wait[who] for who in wait}
            rows.append(
                {
                    "workload": row["workload"],
                    "network": network,
                    "ranks": size,
                    **{f"{who} waits ms": f"{wait[who] * 1e3:.4g}" for who in wait},
                    **{f"{who} efficiency": f"{busy[who] / step[who]:.3f}" for who in wait},
                    "private over plain": f"{step['private'] / step['plain']:.3g}",
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", nargs="*", default=list(CHOSEN), choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="folder of distributed.csv, distributed_model.csv")
    parser.add_argument("--model-only", action="store_true", help="from the CSV in --out")
    options = parser.parse_args()
    console, rows = Console(width=150), []
    if options.model_only:
        with (options.out / "distributed.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
    else:
        for title in options.workload:
            row = row_of(title, measure(title, options.rounds))
            rows.append({key: str(value) for key, value in row.items()})
            console.print(table_of(f"{title}, two processes", rows[-1:]))
    models = [line for row in rows for line in modelled(row)]
    console.print(table_of("many ranks, by the model", models))
    if options.out is not None:
        if not options.model_only:
            save_csv(rows, options.out / "distributed.csv")
        save_csv(models, options.out / "distributed_model.csv")


def table_of(title: str, rows: list[dict[str, Any]]) -> Table:
    """One row as a column of names and values, several as a table."""
    table = Table(title=title)
    if len(rows) == 1:
        table.add_column("")
        table.add_column("", justify="right")
        for name, value in rows[0].items():
            table.add_row(name, str(value))
        return table
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    return table


if __name__ == "__main__":
    main()
