"""How time and memory of one private step grow with batch, sequence length, width, vocabulary and
rows of a table.

Each axis is doubled with the others held. The exponent is the slope of the logarithm over the
larger half of the sizes. Time is CPU time of forward, backward and the clipped sum, plain and ours
in turns; memory counts tensors at the peak, beyond the model.
Run: ``python benchmarks/growth.py --out benchmarks/results``.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.engine import Engine
from dpoptim.training.trials.memory import LiveTensors
from saving import save_csv

BASE = {"batch": 16, "length": 64, "width": 128, "vocabulary": 1024}
DOUBLINGS = 5
COLUMNS = ("plain_cpu_s", "ours_cpu_s", "plain_mib", "ours_mib")
TABLE_ROWS = [20_000 * 2**i for i in range(DOUBLINGS)]
Job = tuple[nn.Module, Tensor, Tensor, int]  # model, inputs, targets, positions


class Language(nn.Module):
    """Embedding, two hidden layers, and a head: (B, T) -> (B, V, T)."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        h = self.token(x)
        return self.head(h + self.down(torch.relu(self.up(h)))).transpose(1, 2)


def language(batch: int, length: int, width: int, vocabulary: int) -> Job:
    x, y = torch.randint(0, vocabulary, (2, batch, length))
    return Language(width, vocabulary), x, y, length


def table(rows: int) -> Job:
    """Bags of 20 words for 512 records: time should not know how many rows nobody looked up, but
    for the dense sum.
    """
    model = nn.Sequential(nn.EmbeddingBag(rows, 16), nn.Linear(16, 2))
    return model, torch.randint(0, rows, (512, 20)), torch.randint(0, 2, (512,)), 1


def step_of(job: Job, *, private: bool) -> Callable[[], None]:
    model, x, y, positions = job
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    engine = Engine(
        model, Clipping(1.0), capacity=len(x), positions=dict.fromkeys(names, positions)
    )

    def ours() -> None:
        engine.begin_microbatch(len(x))
        F.cross_entropy(model(x), y).backward()
        engine.take()

    def plain() -> None:
        F.cross_entropy(model(x), y).backward()
        model.zero_grad()

    if private:
        engine.attach()
    return ours if private else plain


def measured(make: Callable[[], Job], steps: int) -> tuple[float, float, float, float]:
    """CPU seconds plain and ours, MiB at the peak plain and ours."""
    runs, memory = {}, {}
    for private in (False, True):
        job = make()
        with LiveTensors() as live:
            run = step_of(job, private=private)
            run()
        runs[private], memory[private] = run, live.peak / 2**20
    taken: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(steps):
        for private, run in runs.items():
            started = time.process_time()
            run()
            taken[private].append(time.process_time() - started)
    return (
        statistics.median(taken[False]),
        statistics.median(taken[True]),
        memory[False],
        memory[True],
    )


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    half = slice(len(sizes) // 2, None)
    return float(np.polyfit(np.log(sizes[half]), np.log(values[half]), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for growth.csv")
    parser.add_argument("--steps", type=int, default=9)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    axes = {axis: [first * 2**i for i in range(DOUBLINGS)] for axis, first in BASE.items()} | {
        "rows of a table": TABLE_ROWS
    }
    for axis, sizes in axes.items():
        found = []
        for size in sizes:

            def make(axis: str = axis, size: int = size) -> Job:
                return table(size) if axis not in BASE else language(**{**BASE, axis: size})

            found.append(measured(make, options.steps))
        plain, ours, plain_memory, our_memory = zip(*found, strict=True)
        print(
            f"{axis:<16} time ^{exponent(sizes, ours):.2f} (plain "
            f"^{exponent(sizes, plain):.2f}), "
            f"memory ^{exponent(sizes, our_memory):.2f} (plain "
            f"^{exponent(sizes, plain_memory):.2f}); at {sizes[-1]}: "
            f"{ours[-1] / plain[-1]:.2f} times the time, {our_memory[-1] / plain_memory[-1]:.2f} "
            "times the memory",
            flush=True,
        )
        for size, each in zip(sizes, found, strict=True):
            values = (f"{value:.5g}" for value in each)
            rows.append({"axis": axis, "size": size, **dict(zip(COLUMNS, values, strict=True))})
    if options.out is not None:
        save_csv(rows, options.out / "growth.csv")


if __name__ == "__main__":
    main()
