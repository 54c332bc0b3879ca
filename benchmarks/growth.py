"""How the process CPU time of one private step grows with batch, sequence length, width and vocabulary.

Each axis is doubled with the others held; the exponent is the slope of log time over the larger half of the sizes.
Run: ``python benchmarks/growth.py --out growth.csv``.
"""

import argparse
import csv
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.engine import Engine

BASE = {"batch": 16, "length": 32, "width": 64, "vocabulary": 512}
DOUBLINGS = 4


class Language(nn.Module):
    """Embedding, one hidden layer, and a head: (B, T) -> (B, V, T)."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.hidden, self.head = nn.Linear(width, width), nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(self.token(x)))).transpose(1, 2)


def cpu_seconds(sizes: dict[str, int], *, private: bool, steps: int) -> float:
    """Median CPU time of forward and backward pass, with clipping and summing if private."""
    model = Language(sizes["width"], sizes["vocabulary"])
    x, y = torch.randint(0, sizes["vocabulary"], (2, sizes["batch"], sizes["length"]))
    engine = Engine(model, Clipping(1.0), capacity=sizes["batch"])
    if private:
        engine.attach()
    taken = []
    for _ in range(steps + 1):
        started = time.process_time()
        model.zero_grad()
        engine.deliver(len(x)) if private else None
        F.cross_entropy(model(x), y).backward()
        engine.take() if private else None
        taken.append(time.process_time() - started)
    engine.detach()
    return statistics.median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="save the figures here (CSV)")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    rows = []
    for axis, first in BASE.items():
        sizes = [first << i for i in range(DOUBLINGS)]
        times = {p: [cpu_seconds({**BASE, axis: s}, private=p, steps=options.steps) for s in sizes] for p in (False, True)}
        half = slice(DOUBLINGS // 2 - 1, None)
        slopes = {p: float(np.polyfit(np.log(sizes[half]), np.log(times[p][half]), 1)[0]) for p in times}
        print(f"{axis:<11} time grows as size^{slopes[True]:.2f} (plain: {slopes[False]:.2f})")
        rows += [(axis, s, f"{a:.6f}", f"{b:.6f}") for s, a, b in zip(sizes, times[False], times[True], strict=True)]
    if options.out is not None:
        with options.out.open("w", newline="") as file:
            csv.writer(file).writerows([("axis", "size", "plain, CPU s", "ours, CPU s"), *rows])


if __name__ == "__main__":
    main()
