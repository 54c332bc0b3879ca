"""What a private clip norm costs where nobody sets a learning rate.

Fashion-MNIST by softmax regression, trained on 50,000 of its training images and scored on the
other 10,000, and the made-up tables of ``choose_defaults.py`` by linear `DPSGDClassifier`: with the
clip norm of the recipe, and with one that the run finds, whose learning rate follows it, or stays.

Run: ``python benchmarks/private_clip.py --out benchmarks/results`` writes private_clip.csv.
"""

import argparse
import csv
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from choose_defaults import NETWORK_SHAPES, tables
from dpoptim import PrivateQuantile
from dpoptim.data import FASHION_MNIST_DIRECTORY, load_fashion_mnist
from dpoptim.estimators import DPSGDClassifier
from dpoptim.reproduce.one_pass import TRAINING
from dpoptim.runs.compare import run_method
from dpoptim.runs.options import TrainRequest

DELTA = 1e-5
QUANTILES = (None, 0.05, 0.5)
FOLLOWS, STAYS = "follows", "stays"


def of_images(directory: Path, epsilon: float, quantile: float | None, rate: str) -> list[float]:
    """Accuracies of 3 seeds, in percent."""
    data = load_fashion_mnist(directory)
    halves = {"x": data.x[:TRAINING], "x_test": data.x[TRAINING:]}
    labels = {"y": data.y[:TRAINING], "y_test": data.y[TRAINING:]}
    request = TrainRequest(
        data="fashion-mnist",
        epsilon=epsilon,
        delta=DELTA,
        clip_quantile=quantile,
        learning_rate=None if rate == FOLLOWS else 2.0,  # the recipe's
        noise_seed=0,
    )
    found = run_method(request, replace(data, **halves, **labels), seeds=3)
    return [100 * score for score in found.scores]


def of_table(
    x: np.ndarray, y: np.ndarray, epsilon: float, quantile: float | None, rate: str
) -> list[float]:
    """Accuracies of 3 seeds on 2,000 new rows, in percent."""
    common: dict[str, Any] = {
        **{"epsilon": epsilon, "delta": DELTA, "classes": np.unique(y).tolist()},
        "hidden_layer_sizes": (),
    }
    scores = []
    for seed in range(3):
        told = {}
        if quantile is not None:
            told["method_options"] = {"clip_norm": PrivateQuantile(quantile)}
        if rate == STAYS:  # at what it would begin with
            followed = DPSGDClassifier(noise_seed=seed, **common, **told).fit(x[2_000:], y[2_000:])
            told["learning_rate"] = followed.learning_rate_
        fitted = DPSGDClassifier(noise_seed=seed, **common, **told).fit(x[2_000:], y[2_000:])
        scores.append(100 * fitted.score(x[:2_000], y[:2_000]))
    return scores


def cases(directory: Path) -> Iterator[tuple[str, tuple[float, ...], Any]]:
    """Each data set, its epsilons, and what scores a setting on it."""
    yield "Fashion-MNIST", (2.0,), lambda *setting: of_images(directory, *setting)
    for name, x, y in tables(NETWORK_SHAPES, classes=True):
        yield name, (1.0, 4.0), lambda *setting, x=x, y=y: of_table(x, y, *setting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for private_clip.csv")
    parser.add_argument("--data-dir", type=Path, default=FASHION_MNIST_DIRECTORY)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, epsilons, score in cases(options.data_dir):
        for epsilon in epsilons:
            for quantile in QUANTILES:
                for rate in (FOLLOWS,) if quantile is None else (FOLLOWS, STAYS):
                    try:
                        found = score(epsilon, quantile, rate)
                    except ValueError as error:  # the search would follow the noise
                        if "would follow the noise" not in str(error):
                            raise
                        continue
                    figures = (statistics.fmean(found), statistics.stdev(found), len(found))
                    said = "none" if quantile is None else quantile
                    rows.append((name, epsilon, said, rate, *figures))
                    print(*rows[-1], flush=True)
    with (options.out / "private_clip.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ("data", "epsilon", "quantile", "learning_rate", "accuracy", "spread", "seeds")
        )
        writer.writerows((*row[:4], *(f"{value:.4g}" for value in row[4:])) for row in rows)


if __name__ == "__main__":
    main()
