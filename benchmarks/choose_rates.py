"""Learning rates of Adam and AdamBC for ``dpoptim train``, chosen on records kept for that.

Models of the command line, at its defaults but for the optimizer and its rate: on 50,000 training
images of Fashion-MNIST, scored on the other 10,000 (the test images are not looked at), and on the
made-up tables of ``choose_defaults.py``. Rates are over those of the rule, which is the default of
SGD and of numbers to predict, and else `planning.ranking.adaptive_learning_rate`; the score,
accuracy or R2 in percent, is of the average that the recipe takes. SGD is beside them. CNNs were
not tried.

Run: ``python benchmarks/choose_rates.py --out benchmarks/results`` writes choose_rates.csv; needs
Fashion-MNIST (``--data``, or Debian's).
"""

import argparse
import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from choose_defaults import tables
from dpoptim import Ledger
from dpoptim.data import Data, load_fashion_mnist
from dpoptim.data.bundled import FASHION_MNIST_DIRECTORY
from dpoptim.data.preparation import SquareRoot
from dpoptim.planning.choice import taken_back
from dpoptim.planning.ranking import adaptive_learning_rate
from dpoptim.runs.command import planned_run
from dpoptim.runs.models import build_model
from dpoptim.runs.options import TrainRequest
from dpoptim.runs.outcome import parameters_of
from dpoptim.runs.train import train_privately

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
EPSILONS = (1.0, 4.0)
DELTA = 1e-5
KEPT = 10_000  # images to choose by


@dataclass(frozen=True)
class Task:
    """What is trained, on what.

    Attributes:
        factors: rates over that of the rule.
        seeds: runs of each.
    """

    name: str
    model: str
    data: Data
    factors: tuple[float, ...] = FACTORS
    seeds: int = 2


def made_up(classes: bool) -> Iterator[Task]:
    """Tables of unit rows, as ``dpoptim train`` makes them."""
    for name, x, y in tables(((600, 12), (4_000, 20)), classes):
        unit = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
        labels = y.astype(np.int64 if classes else np.float32)
        names = tuple(map(str, range(int(labels.max()) + 1))) if classes else ()
        bounds = None if classes else (-1.0, 1.0)
        held, rest = slice(2_000), slice(2_000, None)
        data = Data(
            "made up", unit[rest], labels[rest], unit[held], labels[held], names, True, bounds
        )
        kind = "classes" if classes else "numbers"
        yield Task(f"table of {kind}, {name}", "softmax", data)
        if not classes and len(data.x) < 4_000:
            yield Task(f"table of {kind}, {name}, mlp", "mlp", data)


def images(folder: Path) -> Iterator[Task]:
    whole = load_fashion_mnist(folder, (SquareRoot(),))
    kept, rest = slice(-KEPT, None), slice(-KEPT)
    data = replace(
        whole, x=whole.x[rest], y=whole.y[rest], x_test=whole.x[kept], y_test=whole.y[kept]
    )
    for model in ("softmax", "mlp"):
        yield Task(f"Fashion-MNIST, {model}", model, data, FACTORS[1:], seeds=1)


def run(task: Task, optimizer: str, factor: float, epsilon: float, seed: int) -> dict[str, Any]:
    request = TrainRequest(
        model=task.model,  # type: ignore[arg-type]
        optimizer=optimizer,
        epsilon=epsilon,
        delta=DELTA,
        neighboring="zero-out",
    )
    torch.manual_seed(seed)
    model = build_model(task.model, task.data.x.shape[1:], task.data.outputs)
    plan, by = planned_run(request, task.data, None, parameters_of(model))
    rule = by.learning_rate
    if by.optimizer.kind.adaptive and task.data.target_bounds is None:
        rule = adaptive_learning_rate(parameters_of(model), plan.steps, taken_back(plan))
    by = replace(by, learning_rate=factor * rule)
    trained = train_privately(
        task.data,
        model,
        plan,
        by,
        ledger=Ledger(neighboring="zero-out"),
        label="benchmark",
        noise_seed=seed,
        on_step=lambda _: None,
    )
    return {
        "task": task.name,
        "optimizer": optimizer,
        "epsilon": epsilon,
        "over the rule": factor,
        "rate": f"{by.learning_rate:.4g}",
        "seed": seed,
        "score": f"{100 * trained.scores[-1]:.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for choose_rates.csv")
    parser.add_argument("--data", type=Path, default=Path(FASHION_MNIST_DIRECTORY))
    parser.add_argument("--only", default="", help="tasks whose names begin so; the rest stays")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "choose_rates.csv"
    rows = []
    if path.exists():
        with path.open(newline="") as file:
            old = list(csv.DictReader(file))
            rows = [each for each in old if not each["task"].startswith(options.only)]
    for task in (*made_up(True), *made_up(False), *images(options.data)):
        if not task.name.startswith(options.only):
            continue
        for optimizer in ("sgd", "adam", "adam_bc"):
            for factor in task.factors:
                for epsilon in EPSILONS:
                    for seed in range(task.seeds):
                        rows.append(run(task, optimizer, factor, epsilon, seed))
                        print(*rows[-1].values(), sep=", ", flush=True)
                        with path.open("w", newline="") as file:
                            writer = csv.DictWriter(file, list(rows[-1]), lineterminator="\n")
                            writer.writeheader()
                            writer.writerows(rows)


if __name__ == "__main__":
    main()
