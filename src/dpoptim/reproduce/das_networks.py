"""Which clip norm is best for a network? Two layers with tanh (Das et al. 2023, Table 7, Fig. 3).

The paper's data sets are EMNIST and CIFAR-100 (features of it), which the reader brings: then its
figures stand beside. Without them ours is Fashion-MNIST.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn

from dpoptim.methods import DPSGD
from dpoptim.plan import Plan
from dpoptim.reproduce.das_published import (
    EPSILONS,
    NETWORKS,
    NETWORKS_WITHOUT_PRIVACY,
    printed,
)
from dpoptim.reproduce.dice_table import UNCLIPPED
from dpoptim.reproduce.one_pass import DELTA, SCALE, load_split
from dpoptim.reproduce.private_runs import Arrays, record_losses, train_to_tail_mean
from dpoptim.reproduce.real_cases import Case
from dpoptim.reproduce.results import deviation, write_rows
from dpoptim.runs.train import accuracy

CLIP_NORMS = (0.1, 1.0, 3.0, 6.0, 12.0, 18.0, 24.0, 30.0, 36.0)
STEPS = (2.0, 8.0, 32.0)  # learning rate times clip norm
RATES = (0.1, 0.2, 0.4, 0.8)  # without clipping and noise
# for data whose norms are not known here
MORE_STEPS, MORE_RATES = (0.5, *STEPS), (0.01, 0.03, *RATES)
HIDDEN, BATCH, EPOCHS = 256, 1000, 10
Parts = tuple[Arrays, Arrays, Arrays]  # to train on, to choose rates on, to test on


@dataclass(frozen=True)
class Row:
    """Test accuracy over seeds, at the learning rate that was best on other records.

    Without privacy, clip norm and epsilon are infinite.
    """

    clip_norm: float
    epsilon: float
    learning_rate: float
    accuracy: float
    standard_deviation: float
    seeds: int


def fashion_parts(directory: Path) -> Parts:
    """Fashion-MNIST, pixels in [0, 1]."""
    training, choosing, test = ((x * SCALE, y) for x, y in load_split(directory))
    return training, choosing, test


def parts_of(case: Case) -> Parts:
    """Another data set; the last tenth of the training records chooses rates."""
    chosen = case.held_out_tenth()
    return (chosen.x, chosen.y), (chosen.x_test, chosen.y_test), (case.x_test, case.y_test)


def table7(
    out: Path,
    parts: Parts,
    *,
    data: str = "",
    seeds: int = 3,
    norms: Sequence[float] = CLIP_NORMS,
    steps: Sequence[float] = STEPS,
    without_privacy: Sequence[float] = RATES,
) -> list[Row]:
    """Measure all clip norms of public data; write a CSV into the folder ``out``.

    ``das_networks.csv``, or with the name of a data set ``das_networks_<data>.csv``, the paper's
    figures beside.

    Args:
        steps: learning rates times clip norm to choose from.
        without_privacy: learning rates to choose from without clipping and noise.
    """
    training, choosing, test = parts
    name = "_".join(["das_networks", *data.lower().replace("-", "_").split()])
    rows = []
    cells = [(norm, epsilon) for epsilon in EPSILONS for norm in norms]
    for norm, epsilon in [*cells, (math.inf, math.inf)]:
        plan = plan_of(norm, epsilon, len(training[0]))
        rates = without_privacy if math.isinf(norm) else [step / norm for step in steps]
        scores = [train(plan, training, rate, 0, choosing) for rate in rates]
        rate = rates[scores.index(max(scores))]
        found = [train(plan, training, rate, seed, test) for seed in range(1, seeds + 1)]
        rows.append(Row(norm, epsilon, rate, mean(found), deviation(found), seeds))
        paper = partial(published, data) if data else None
        write_rows(out / f"{name}.csv", Row, rows, paper)
    return rows


def published(data: str, row: Row) -> float:
    """The paper's accuracy at a clip norm and epsilon; NaN where it has none."""
    if math.isinf(row.epsilon):
        return NETWORKS_WITHOUT_PRIVACY.get(data, math.nan) / 100
    return printed(NETWORKS, data, f"{row.clip_norm:g}", row.epsilon) / 100


def plan_of(norm: float, epsilon: float, n: int) -> Plan:
    """Return the plan of a cell; of plain SGD, if the clip norm is infinite."""
    run: dict[str, Any] = {"n": n, "batch_size": BATCH, "epochs": EPOCHS, "delta": DELTA}
    if math.isinf(norm):
        return DPSGD(UNCLIPPED).plan(**run, noise_multiplier=0.0)
    return DPSGD(norm).plan(**run, epsilon=epsilon)


def train(plan: Plan, training: Arrays, rate: float, seed: int, measured_on: Arrays) -> float:
    """Accuracy of the mean of the second half of the iterates."""
    classes = int(training[1].max()) + 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(training[0].shape[1], HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, classes)
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    train_to_tail_mean(plan, model, optimizer, training, record_losses, seed)
    return accuracy(model, *measured_on)
