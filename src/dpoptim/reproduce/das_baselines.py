"""Softmax regression without privacy, as the last lines of Das et al. 2023, Tables 4 to 6, have it.

Plain SGD in the setting of `das_tables`: the same features, batches of 4,096, 40 epochs, momentum
0.9, a mean of the last quarter; the best of some rates on a tenth of the training records. Nothing
is clipped, no noise is added, and released gradients are not smoothed: public data only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from dpoptim.reproduce.das_published import SOFTMAX_WITHOUT_PRIVACY
from dpoptim.reproduce.das_tables import without_penalty
from dpoptim.reproduce.real_cases import Case
from dpoptim.reproduce.results import deviation, write_rows

RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
BATCH, EPOCHS, AVERAGED, MOMENTUM = 4096, 40, 0.25, 0.9
NO_CLIPPING = 1e9


@dataclass(frozen=True)
class Row:
    """Hold-out percent without privacy: mean and deviation over seeds; the paper's."""

    data: str
    learning_rate: float
    accuracy: float
    standard_deviation: float
    seeds: int
    paper: float


def trained(case: Case, seed: int, rate: float) -> Tensor:
    """The mean of the last iterates of SGD on shuffled batches; records that are public."""
    generator = torch.Generator().manual_seed(seed)
    w = case.problem.initial()
    velocity, total = torch.zeros_like(w), torch.zeros_like(w)
    steps = EPOCHS * -(-len(case.x) // BATCH)
    first, done = round(steps * (1 - AVERAGED)), 0
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(case.x), generator=generator).split(BATCH):
            x, y = case.x[rows], case.y[rows]
            total_gradient = case.model.clipped_sum(
                x, y, [(1.0, w)], NO_CLIPPING, capacity=len(rows)
            )
            velocity = MOMENTUM * velocity + total_gradient / len(rows)
            w = w - rate * velocity
            total += w if done >= first else 0
            done += 1
    return total / (steps - first)


def measured(case: Case, rates: Sequence[float], seeds: int) -> Row:
    """Choose a rate on a tenth of the training records; train on all, with other seeds."""
    choosing = case.held_out_tenth()
    best = max(rates, key=lambda rate: choosing.accuracy(trained(choosing, 0, rate)))
    found = [case.accuracy(trained(case, seed, best)) for seed in range(1, seeds + 1)]
    paper = SOFTMAX_WITHOUT_PRIVACY.get(case.name, math.nan)
    return Row(case.name, best, mean(found), deviation(found), seeds, paper)


def das_baselines(
    out: Path, cases: Sequence[Case], *, seeds: int = 3, rates: Sequence[float] = RATES
) -> list[Row]:
    """Measure public data sets; write ``das_baselines.csv`` into the folder ``out``."""
    rows = []
    for case in cases:
        rows.append(measured(without_penalty(case), rates, seeds))
        write_rows(out / "das_baselines.csv", Row, rows)
    return rows
