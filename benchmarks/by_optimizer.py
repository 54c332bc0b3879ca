"""Scores by SGD, Adam and AdamBC as users get them: estimators and ``dpoptim train``, all defaults.

Digits (1,438 for training, scored on the 359 others) and breast cancer (456, 113) by
`DPSGDClassifier`, a price of houses by `DPSGDRegressor` (16,000, 4,000), and whether a house is
dear from ``houses.csv`` by ``dpoptim train`` (16,000, 4,000: the hold-out of a public table). Every
learning rate is the default of its optimizer, chosen on other tables (``choose_defaults.py``,
``choose_rates.py``). Delta = 1e-5, zero-out.

Run: ``python benchmarks/by_optimizer.py --out benchmarks/results`` writes by_optimizer.csv.
"""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from sklearn.datasets import load_breast_cancer, load_digits

from dpoptim.estimators import DPSGDClassifier, DPSGDRegressor
from dpoptim.optimizers import OPTIMIZERS
from dpoptim.runs.command import run_training
from dpoptim.runs.options import TrainRequest
from one_table import write_table
from tables import houses, scaled

EPSILONS = (1.0, 2.0, 8.0)
SEEDS = 3
METHODS = ("dp-sgd", "dp-ftrl", "dice-sgd", "value-sgd")
DELTA = 1e-5
Arrays = tuple[np.ndarray, np.ndarray]


def tasks() -> Iterator[tuple[str, Any, Arrays, tuple[str, ...]]]:
    """A name, an estimator with what is public, a table and the methods to try on it."""
    x, y = load_digits(return_X_y=True)
    public: dict[str, Any] = {"delta": DELTA, "classes": range(10), "data_norm": 4.0}
    yield "digits, DPSGDClassifier", DPSGDClassifier(**public), (x / 16, y), METHODS
    x, y = load_breast_cancer(return_X_y=True)
    classifier = DPSGDClassifier(delta=DELTA, classes=[0, 1])
    yield "breast cancer, DPSGDClassifier", classifier, (scaled(x), y), METHODS[:1]
    x, price = houses(20_000)
    regressor = DPSGDRegressor(delta=DELTA, target_bound=1.0)
    price = np.clip((price - 18) / 6, -1, 1)
    yield "houses, DPSGDRegressor", regressor, (x, price), METHODS[:1]


def by_estimator(estimator: Any, table: Arrays, seed: int) -> tuple[float, float]:
    """The learning rate, and the score on a random fifth that is left out."""
    order = np.random.default_rng(seed).permutation(len(table[0]))
    test, rest = order[: len(order) // 5], order[len(order) // 5 :]
    x, y = table
    model = estimator.set_params(noise_seed=seed, random_state=seed).fit(x[rest], y[rest])
    return model.learning_rate_, float(model.score(x[test], y[test]))


def by_command(table: Path, model: str, optimizer: str, epsilon: float, seed: int) -> Any:
    """What the certificate of ``dpoptim train`` says."""
    out = table.parent / f"{model}-{optimizer}-{epsilon:g}-{seed}"
    request = TrainRequest(
        data=str(table),
        schema=table.with_suffix(".toml"),
        data_is_public=True,
        model=model,  # type: ignore[arg-type]
        optimizer=optimizer,
        epsilon=epsilon,
        delta=DELTA,
        seed=seed,
        noise_seed=seed,
        compare=False,
        out=out,
    )
    run_training(request, Console(quiet=True))
    return json.loads((out / "certificate.json").read_text())


def write_houses(folder: Path) -> Path:
    x, price = houses(20_000)
    names = [f"c{i}" for i in range(x.shape[1])]
    with (folder / "houses.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, "dear"])
        dear = np.where(price > np.median(price), "yes", "no")
        writer.writerows([*row, label] for row, label in zip(x.tolist(), dear, strict=True))
    columns = [f'[columns.{name}]\nkind = "number"\nbounds = [-1, 1]\n' for name in names]
    target = '[columns.dear]\nkind = "target"\nclasses = ["no", "yes"]\n'
    (folder / "houses.toml").write_text("\n".join([*columns, target]))
    return folder / "houses.csv"


def row(
    task: str, method: str, epsilon: float, name: str, seed: int, *found: Any
) -> dict[str, Any]:
    rate, score = found
    print(task, method, epsilon, name, seed, rate, f"{score:.4f}", flush=True)
    return {
        "task": task,
        "method": method,
        "epsilon": epsilon,
        "optimizer": name,
        "seed": seed,
        "learning_rate": rate,
        "score": f"{100 * score:.2f}",
    }


def rows() -> Iterator[dict[str, Any]]:
    for task, estimator, table, methods in tasks():
        for method in methods:
            for epsilon in EPSILONS:
                for name in OPTIMIZERS:
                    estimator.set_params(epsilon=epsilon, method=method, optimizer=name)
                    for seed in range(SEEDS):
                        found = by_estimator(estimator, table, seed)
                        yield row(task, method, epsilon, name, seed, *found)
    with TemporaryDirectory() as folder:
        path = write_houses(Path(folder))
        for model, epsilons in (("softmax", EPSILONS), ("mlp", EPSILONS[:1])):
            for epsilon in epsilons:
                for name in OPTIMIZERS:
                    for seed in range(SEEDS):
                        said = by_command(path, model, name, epsilon, seed)
                        found = said["training"]["learning rate"], said["scores"]["private"][-1]
                        yield row(
                            f"houses.csv, dpoptim train, {model}",
                            "dp-sgd",
                            epsilon,
                            name,
                            seed,
                            *found,
                        )


if __name__ == "__main__":
    write_table("by_optimizer", __doc__, rows())
