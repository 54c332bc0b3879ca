"""Which clip norm is best for a network? Two layers with tanh (Das et al. 2023, Table 7, Fig. 3).

The paper's data sets are EMNIST and CIFAR-100; ours is Fashion-MNIST, so no figures of theirs
stand beside.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpoptim.methods import DPSGD
from dpoptim.plan import Plan
from dpoptim.reproduce.dice_table import UNCLIPPED
from dpoptim.reproduce.kl_rates import write_rows
from dpoptim.reproduce.one_pass import DELTA, SCALE, load
from dpoptim.runs.train import accuracy
from dpoptim.training.attach import attach
from dpoptim.training.tail_average import TailAverage

EPSILONS = (2.0, 4.0, 6.0)
CLIP_NORMS = (0.1, 1.0, 3.0, 6.0, 12.0, 18.0, 24.0, 30.0, 36.0)
STEPS = (2.0, 8.0, 32.0)  # learning rate times clip norm
RATES = (0.1, 0.2, 0.4, 0.8)  # without clipping and noise
HIDDEN, BATCH, EPOCHS = 256, 1000, 10
Arrays = tuple[Tensor, Tensor]


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


def table7(
    out: Path,
    directory: Path,
    *,
    seeds: int = 3,
    epsilons: Sequence[float] = EPSILONS,
    norms: Sequence[float] = CLIP_NORMS,
) -> list[Row]:
    """Measure all clip norms of public data; write ``das_networks.csv`` into the folder ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    training, choosing, test = ((x * SCALE, y) for x, y in load(directory))
    rows = []
    cells = [(norm, epsilon) for epsilon in epsilons for norm in norms]
    for norm, epsilon in [*cells, (math.inf, math.inf)]:
        plan = plan_of(norm, epsilon, len(training[0]))
        rates = RATES if math.isinf(norm) else [step / norm for step in STEPS]
        scores = [train(plan, training, rate, 0, choosing) for rate in rates]
        rate = rates[scores.index(max(scores))]
        found = [train(plan, training, rate, seed, test) for seed in range(1, seeds + 1)]
        spread = stdev(found) if seeds > 1 else math.nan
        rows.append(Row(norm, epsilon, rate, mean(found), spread, seeds))
        write_rows(out / "das_networks.csv", Row, rows)
    return rows


def plan_of(norm: float, epsilon: float, n: int) -> Plan:
    """Return the plan of a cell; of plain SGD, if the clip norm is infinite."""
    run: dict[str, Any] = {"n": n, "batch_size": BATCH, "epochs": EPOCHS, "delta": DELTA}
    if math.isinf(norm):
        return DPSGD(UNCLIPPED).plan(**run, noise_multiplier=0.0)
    return DPSGD(norm).plan(**run, epsilon=epsilon)


def train(plan: Plan, training: Arrays, rate: float, seed: int, measured_on: Arrays) -> float:
    """Accuracy of the mean of the second half of the iterates."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(training[0].shape[1], HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 10)
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    average = TailAverage(model, plan.steps // 2)
    with attach(plan, model, optimizer, TensorDataset(*training), noise_seed=seed) as private:
        for x, y in private.batches():
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
            average.update(private.steps_done)
    average.swap()
    return accuracy(model, *measured_on)
