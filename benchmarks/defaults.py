"""Linear estimators with their defaults against the best of a small grid, and against AdaSSP.

Epsilon 1, delta min(1e-5, n^-1.1). Columns are scaled to [-1, 1] by public bounds. The grid knows
the scores on the test part, a favour that is not charged. AdaSSP is our
short version of Wang's (2018): three Gaussian releases, simpler constants in its ridge.

Run: ``python benchmarks/defaults.py --out benchmarks/results`` writes defaults.csv.
"""

import argparse
import csv
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import ParameterGrid

from dpoptim.accounting.gaussian import gdp_mu
from dpoptim.estimators import DPLinearRegression, DPLogisticRegression

EPSILON = 1.0
STEPS = (10, 30, 100)
CLIPS = (0.3, 1.0, 3.0)  # of the default clip norm
LARGE = 100_000
Table = tuple[str, np.ndarray, np.ndarray, bool]


def scaled(x: np.ndarray) -> np.ndarray:
    """By bounds a quarter wider than the (public) data."""
    low, high = x.min(0), x.max(0)
    room = np.where(high > low, (high - low) / 4, 1.0)
    return 2 * (x - low + room) / (high - low + 2 * room) - 1


def houses(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Ten columns of very different units, and the logarithm of a price."""
    rng = np.random.default_rng(0)
    area, income = rng.lognormal(4.4, 0.4, n), rng.lognormal(10.3, 0.5, n)
    age, distance = rng.uniform(0, 120, n), rng.exponential(8, n)
    rooms, others = np.clip(rng.poisson(area / 25), 1, 12), rng.normal(size=(n, 5))
    price = 2 * np.log(area) + 0.1 * rooms - 0.006 * age + 0.9 * np.log(income) - 0.05 * distance
    price = price + others @ [0.2, -0.1, 0.05, 0.0, 0.0] + 0.5 * rng.normal(size=n)
    bounds = np.array([[10, 400], [0, 200_000], [0, 150], [0, 60], [1, 12], *[[-4, 4]] * 5], float)
    x = np.clip(np.column_stack([area, income, age, distance, rooms, others]), *bounds.T)
    return 2 * (x - bounds[:, 0]) / np.ptp(bounds, 1) - 1, price


def tables() -> Iterator[Table]:
    for name, load in (
        ("wine", load_wine),
        ("breast cancer", load_breast_cancer),
        ("digits", load_digits),
    ):
        x, y = load(return_X_y=True)
        yield name, scaled(x), y, True
    x, y = load_diabetes(return_X_y=True)
    yield "diabetes", scaled(x), (y - 185) / 185, False
    x, price = houses(20_000)
    yield "houses, dear or not", x, (price > np.median(price)).astype(int), True
    yield "houses, price", x, np.clip((price - 18) / 6, -1, 1), False
    rng = np.random.default_rng(0)
    x = np.clip(rng.normal(size=(1_000_000, 50)).astype(np.float32) / 4, -1, 1)
    y = (x @ (4 * rng.normal(size=50)) + rng.logistic(size=len(x)) > 0).astype(int)
    yield "1e6 x 50", x, y, True


def estimator(y: np.ndarray, norm: float, delta: float, classes: bool, **settings: Any) -> Any:
    if classes:
        names = np.unique(y)
        return DPLogisticRegression(EPSILON, delta, data_norm=norm, classes=names, **settings)
    return DPLinearRegression(EPSILON, delta, data_norm=norm, target_bound=1.0, **settings)


def adassp(
    x: np.ndarray, y: np.ndarray, norm: float, mu: float, rng: np.random.Generator
) -> np.ndarray:
    """Wang (2018), Algorithm 2, rows (x, 1) of at most that norm, |y| <= 1, Gaussian noise."""
    rows = np.hstack([x, np.ones((len(x), 1))])
    bound, d = math.hypot(norm, 1), rows.shape[1]
    share = mu / math.sqrt(3)
    smallest = np.linalg.eigvalsh(rows.T @ rows)[0] + rng.normal() * bound**2 / share
    smallest = max(0.0, smallest - 2 * bound**2 / share)
    ridge = max(0.0, math.sqrt(d) * bound**2 / share * 2 - smallest)
    upper = np.triu(rng.normal(size=(d, d))) * bound**2 / share
    noise = upper + np.triu(upper, 1).T
    cross = rows.T @ y + rng.normal(size=d) * bound / share
    return np.linalg.solve(rows.T @ rows + noise + ridge * np.eye(d), cross)


def r2(y: np.ndarray, predicted: np.ndarray) -> float:
    return float(1 - np.square(y - predicted).sum() / np.square(y - y.mean()).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for defaults.csv")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "defaults.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ("table", "records", "measure", "default", "best_of_grid", "adassp", "no_privacy", "s")
        )
        for name, x, y, classes in tables():
            order = np.random.default_rng(0).permutation(len(x))
            cut = len(x) - len(x) // 5
            (a, b), (c, d) = (x[order[:cut]], y[order[:cut]]), (x[order[cut:]], y[order[cut:]])
            norm, delta = math.sqrt(x.shape[1]), min(1e-5, cut**-1.1)
            seeds = range(options.seeds if cut < LARGE else 1)

            def score(**settings: Any) -> float:
                scores = [
                    estimator(b, norm, delta, classes, noise_seed=seed, **settings)  # noqa: B023
                    .fit(a, b)  # noqa: B023
                    .score(c, d)  # noqa: B023
                    for seed in seeds  # noqa: B023
                ]
                return float(np.mean(scores))

            started = time.perf_counter()
            default = score()
            seconds = (time.perf_counter() - started) / len(seeds)
            longest = math.hypot(norm, 1) * (math.sqrt(2) if classes and len(set(b)) > 2 else 1)
            grid = {"steps": STEPS, "clip_norm": [0.1 * share * longest for share in CLIPS]}
            if cut >= LARGE:
                grid = {"steps": (30, 100), "clip_norm": [0.1 * longest]}
            best = max(default, *(score(**settings) for settings in ParameterGrid(grid)))
            other = math.nan
            if not classes:
                mu = gdp_mu(EPSILON, delta)
                found = [
                    r2(d, np.hstack([c, np.ones((len(c), 1))]) @ adassp(a, b, norm, mu, rng))
                    for rng in map(np.random.default_rng, seeds)
                ]
                other = float(np.mean(found))
            plain = LogisticRegression(max_iter=300) if classes else LinearRegression()
            row = (default, best, other, float(plain.fit(a, b).score(c, d)), seconds)
            measure = "accuracy" if classes else "R2"
            writer.writerow((name, cut, measure, *(f"{value:.4g}" for value in row)))
            file.flush()
            print(name, cut, measure, *(f"{value:.3f}" for value in row), flush=True)


if __name__ == "__main__":
    main()
