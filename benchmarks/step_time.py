"""Time of one private step as a multiple of the plain PyTorch step on the same model and batch.

Variants run interleaved, and medians are compared, because machines are noisy. "gradients" is forward, backward,
clipping and summing; "step" adds the noise and the optimizer. Run: ``python benchmarks/step_time.py``.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.engine import Engine
from dpoptim.noise.gaussian import add_normal
from dpoptim.noise.stream import KeyStream
from dpoptim.runs.models import build_model


@dataclass(frozen=True)
class Workload:
    """A model, its batch and what it predicts."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    batch: int

    def data(self) -> tuple[Tensor, Tensor]:
        return torch.randn(self.batch, *self.shape), torch.randint(0, self.classes, (self.batch,))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


WORKLOADS = [
    Workload("softmax 784-10, B=500", lambda: nn.Linear(784, 10), (784,), 10, 500),
    Workload("softmax 512-257, B=500", lambda: nn.Linear(512, 257), (512,), 257, 500),
    Workload("MLP 784-256-10, B=256", mlp, (784,), 10, 256),
    Workload("small CNN, 1x28x28, B=256", lambda: build_model("cnn", (1, 28, 28), 10), (1, 28, 28), 10, 256),
]


def plain(work: Workload) -> Callable[[], None]:
    model, (x, y) = work.build(), work.data()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def private(work: Workload, *, noise: bool) -> Callable[[], None]:
    model, (x, y) = work.build(), work.data()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine = Engine(model, Clipping(1.0), capacity=work.batch)
    engine.attach()
    stream = KeyStream()

    def step() -> None:
        engine.deliver(work.batch)
        F.cross_entropy(model(x), y).backward()
        sums = engine.take()
        if noise:
            for buffer in sums:
                add_normal(stream, buffer, 1.0)
        for p, total in zip(engine.parameters, engine.split(sums), strict=True):
            p.grad = (total / work.batch).to(p.dtype)
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step: Callable[[], None], repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - started) / repeats


def measure(work: Workload, rounds: int) -> dict[str, float]:
    """Median seconds of a step, by variant."""
    variants = {
        "plain": plain(work),
        "ours, no noise": private(work, noise=False),
        "ours": private(work, noise=True),
    }
    for step in variants.values():
        seconds(step, 3)
    repeats = max(1, int(0.05 / seconds(variants["plain"], 5)))
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, step in variants.items():
            times[name].append(seconds(step, repeats))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="save the figures here")
    options = parser.parse_args()
    table = Table(title=f"one step, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for column in ("workload", "plain, ms", "ours without noise / plain", "ours / plain"):
        table.add_column(column, justify="left" if column == "workload" else "right")
    results = {}
    for work in WORKLOADS:
        figures = measure(work, options.rounds)
        results[work.name] = figures
        base = figures["plain"]
        table.add_row(
            work.name,
            f"{base * 1e3:.3f}",
            f"{figures['ours, no noise'] / base:.2f}",
            f"{figures['ours'] / base:.2f}",
        )
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
