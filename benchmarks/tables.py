"""Estimators with their defaults on six tables: against the best of a grid, AdaSSP, diffprivlib and
no privacy; accuracy or R2, and time.

A table is split in three: methods are trained on three fifths, settings of grids and of peers are
chosen on a fifth, and every score is of the last fifth, which nothing was chosen on. The constants
behind the defaults come from ``benchmarks/choose_defaults.py``, which looks at none of these
tables. Columns are scaled to [-1, 1] by public bounds. Delta is min(1e-5, n^-1.1); diffprivlib
promises pure epsilon-DP, which is the stronger promise by that delta. AdaSSP is our own version of
Wang's (2018), Algorithm 2, with Gaussian noise and simpler constants in its ridge.

Run: ``python benchmarks/tables.py --out benchmarks/results --peer-python PEER/bin/python`` writes
tables.csv, a table at a time; with ``--tables NAME``, rows of the others stay. PEER is an
environment of its own with diffprivlib 0.6.3, scikit-learn 1.2 and numpy 1
(``pip install diffprivlib==0.6.3 'scikit-learn<1.3' 'numpy<2'``): with scikit-learn 1.4, whose loss
is a mean over records, diffprivlib adds the noise of a sum to that mean.
"""

import argparse
import csv
import math
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.linear_model import LinearRegression, LogisticRegression

EPSILONS = (0.5, 1.0, 4.0)
GRID_AT = 1.0  # the epsilon at which grids are tried
MANY = 5_000  # records, from which two seeds must do
LARGE = 100_000  # records, from which one seed and short grids must do, networks at GRID_AT alone
CHOSEN_ON = 60_000  # records at most, on which the settings of a grid are compared
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # inverse regularisation, diffprivlib's C
COLUMNS = ("table", "records", "measure", "epsilon", "method", "score", "deviation", "cpu_seconds")
Make = Callable[[int], Any]  # from a seed of the noise to something with fit and score


@dataclass(frozen=True)
class Table:
    """``parts``: rows and targets to train, choose and test on."""

    name: str
    parts: tuple[tuple[np.ndarray, np.ndarray], ...]
    classes: tuple[int, ...]

    @property
    def n(self) -> int:
        return len(self.parts[0][0])

    @property
    def norm(self) -> float:
        return math.sqrt(self.parts[0][0].shape[1])

    @property
    def delta(self) -> float:
        return float(min(1e-5, self.n**-1.1))


def tables() -> Iterator[Table]:
    for name, load in (
        ("wine", load_wine),
        ("breast cancer", load_breast_cancer),
        ("digits", load_digits),
    ):
        x, y = load(return_X_y=True)
        yield split(name, scaled(x), y, classes=True)
    x, y = load_diabetes(return_X_y=True)
    yield split("diabetes", scaled(x), (y - 185) / 185, classes=False)
    x, price = houses(20_000)
    yield split("houses, dear or not", x, (price > np.median(price)).astype(int), classes=True)
    yield split("houses, price", x, np.clip((price - 18) / 6, -1, 1), classes=False)
    rng = np.random.default_rng(0)
    x = np.clip(rng.normal(size=(1_000_000, 50)).astype(np.float32) / 4, -1, 1)
    y = (x @ (4 * rng.normal(size=50)) + rng.logistic(size=len(x)) > 0).astype(int)
    yield split("1e6 x 50", x, y, classes=True)


def split(name: str, x: np.ndarray, y: np.ndarray, *, classes: bool) -> Table:
    order = np.random.default_rng(0).permutation(len(x))
    fifth = len(x) // 5
    parts = np.split(order, [len(x) - 2 * fifth, len(x) - fifth])
    known = tuple(np.unique(y).tolist()) if classes else ()
    return Table(name, tuple((x[part], y[part]) for part in parts), known)


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


class AdaSSP:
    """Wang (2018), Algorithm 2, rows (x, 1) of at most that norm, |y| <= 1, Gaussian noise."""

    def __init__(self, norm: float, epsilon: float, delta: float, seed: int) -> None:
        from dpoptim.accounting.gaussian import gdp_mu

        self.bound, self.rng = math.hypot(norm, 1), np.random.default_rng(seed)
        self.share = gdp_mu(epsilon, delta) / math.sqrt(3)

    def fit(self, x: np.ndarray, y: np.ndarray) -> "AdaSSP":
        rows = np.hstack([x, np.ones((len(x), 1))])
        bound, share, d = self.bound, self.share, rows.shape[1]
        smallest = np.linalg.eigvalsh(rows.T @ rows)[0] + self.rng.normal() * bound**2 / share
        smallest = max(0.0, smallest - 2 * bound**2 / share)
        ridge = max(0.0, math.sqrt(d) * bound**2 / share * 2 - smallest)
        upper = np.triu(self.rng.normal(size=(d, d))) * bound**2 / share
        noise = upper + np.triu(upper, 1).T
        cross = rows.T @ y + self.rng.normal(size=d) * bound / share
        self.weights = np.linalg.solve(rows.T @ rows + noise + ridge * np.eye(d), cross)
        return self

    def score(self, x: np.ndarray, y: np.ndarray) -> float:
        predicted = np.hstack([x, np.ones((len(x), 1))]) @ self.weights
        return float(1 - np.square(y - predicted).sum() / np.square(y - y.mean()).sum())


def ours(table: Table, epsilon: float) -> Iterator[tuple[str, list[Make]]]:
    """Methods of this library, AdaSSP and no privacy, each with the settings to choose from."""
    from dpoptim import estimators as e

    common: dict[str, Any] = {"epsilon": epsilon, "delta": table.delta, "data_norm": table.norm}
    if table.classes:
        common["classes"] = table.classes
        linear, network, plain = e.DPLogisticRegression, e.DPSGDClassifier, LogisticRegression
    else:
        common["target_bound"] = 1.0
        linear, network, plain = e.DPLinearRegression, e.DPSGDRegressor, LinearRegression

    def make(kind: Any, **settings: Any) -> Make:
        return lambda seed: kind(noise_seed=seed, **common, **settings)

    large = table.n >= LARGE
    yield f"{linear.__name__}, defaults", [make(linear)]
    if not large or epsilon == GRID_AT:
        yield f"{network.__name__}, defaults", [make(network, random_state=0)]
    if epsilon == GRID_AT:
        longest = math.hypot(table.norm, 1) * (math.sqrt(2) if len(table.classes) > 2 else 1)
        steps, clips = ((30, 100), (0.1,)) if large else ((10, 30, 100), (0.03, 0.1, 0.3))
        chosen = [
            make(linear, steps=count, clip_norm=clip * longest)
            for count, clip in product(steps, clips)
        ]
        if not table.classes:
            chosen.append(make(linear, solver="sufficient-statistics"))
        yield f"{linear.__name__}, best of grid", [make(linear), *chosen]
        rates, norms = ((0.3, 3.0), (1.0,)) if large else ((0.1, 0.3, 1.0, 3.0), (0.3, 1.0))
        chosen = [
            make(network, random_state=0, learning_rate=rate, clip_norm=clip)
            for rate, clip in product(rates, norms)
        ]
        yield f"{network.__name__}, best of grid", [make(network, random_state=0), *chosen]
        yield (
            "without privacy",
            [lambda seed: plain(**({"max_iter": 300} if table.classes else {}))],
        )
    if not table.classes:
        yield "AdaSSP", [lambda seed: AdaSSP(table.norm, epsilon, table.delta, seed)]


def peers(table: Table, epsilon: float) -> Iterator[tuple[str, list[Make]]]:
    from diffprivlib import models

    if table.classes:
        kinds = [
            lambda seed, strength=strength: models.LogisticRegression(
                epsilon=epsilon, data_norm=table.norm, max_iter=200, C=strength, random_state=seed
            )
            for strength in STRENGTHS
        ]
        yield "diffprivlib, best of five C", kinds
    else:
        bounds = {"bounds_X": (-1, 1), "bounds_y": (-1, 1)}
        yield (
            "diffprivlib",
            [lambda seed: models.LinearRegression(epsilon=epsilon, random_state=seed, **bounds)],
        )


Found = tuple[float, float, float]


def measured(
    table: Table, settings: list[Make], seeds: int = 0, *, defaults: Found | None = None
) -> Found:
    """Score on the test part, its deviation, and seconds: of the setting that is best on the part
    for choosing.

    Args:
        defaults: of the first setting, where they are known.
    """
    train, choose, test = table.parts
    seeds = seeds or (5 if table.n < MANY else 2 if table.n < LARGE else 1)
    x, y = train[0][:CHOSEN_ON], train[1][:CHOSEN_ON]
    scores = [make(0).fit(x, y).score(*choose) if settings[1:] else 0.0 for make in settings]
    best = int(np.argmax(scores))
    if best == 0 and defaults is not None:
        return defaults
    found, seconds = [], []
    for seed in range(seeds):
        started = time.process_time()
        model = settings[best](1 + seed).fit(*train)
        seconds.append(time.process_time() - started)
        found.append(model.score(*test))
    deviation = statistics.stdev(found) if len(found) > 1 else math.nan
    return statistics.mean(found), deviation, statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for tables.csv")
    parser.add_argument("--peer-python", help="an interpreter that has diffprivlib")
    parser.add_argument("--only-peers", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tables", nargs="*", help="only these; default: all")
    options = parser.parse_args()
    if options.peer_python and shutil.which(options.peer_python) is None:
        parser.error(f"--peer-python: there is no {options.peer_python}; make it (see above).")
    warnings.simplefilter("ignore")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "tables.csv"
    if not options.only_peers:
        rows = rows_of(path) if options.tables and path.exists() else []
        write(path, [row for row in rows if row[0] not in options.tables])
    names = []
    for table in tables():
        names.append(table.name)
        if options.tables and table.name not in options.tables:
            continue
        measure_all(path, table, peers if options.only_peers else ours)
        if options.peer_python:
            given = ["--only-peers", "--out", str(options.out), "--tables", table.name]
            subprocess.run([options.peer_python, __file__, *given], check=True)
    if not options.only_peers:
        write(path, sorted(rows_of(path), key=lambda row: (names.index(row[0]), float(row[3]))))
    if not options.only_peers and not options.peer_python:
        print("diffprivlib was left out: --peer-python", file=sys.stderr)


def measure_all(path: Path, table: Table, methods: Any) -> None:
    """Add a row for each method and epsilon as soon as it is known."""
    measure = "accuracy" if table.classes else "R2"
    for epsilon in EPSILONS:
        defaults: dict[str, Found] = {}
        for name, settings in methods(table, epsilon):
            kind = name.partition(",")[0]
            found = measured(table, settings, defaults=defaults.get(kind))
            defaults.setdefault(kind, found)
            row = (table.name, table.n, measure, epsilon, name)
            print(*row, *(f"{value:.3f}" for value in found), flush=True)
            with path.open("a", newline="") as file:
                csv.writer(file).writerow((*row, *(f"{value:.4g}" for value in found)))


def rows_of(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))[1:]


def write(path: Path, rows: list[list[str]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])


if __name__ == "__main__":
    main()
