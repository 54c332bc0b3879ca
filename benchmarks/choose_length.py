"""The factor by which a private classifier's weights are shortened, chosen on made-up tables alone.

Noise makes weights longer, and clipping makes them surer, than the records are worth. A factor from
public numbers, ``min(1, share (signal / 50)^power)`` where the signal is ``mu n / sqrt d``, changes
no prediction, only how sure it is. Tables are those of ``choose_defaults.py``, and of normal
columns with even and with rare classes. A factor's regret on a table and epsilon is its log-loss on
new rows, less that of the best factor there.

Run: ``python benchmarks/choose_length.py --out benchmarks/results`` writes choose_length.csv, best
first; one minute.
"""

import argparse
import csv
import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

from choose_defaults import SHAPES, Table, tables
from dpoptim.accounting import gdp_mu
from dpoptim.estimators import DPLogisticRegression, linear_fit

EPSILONS = (0.5, 1.0, 3.0, 8.0)
DELTA = 1e-5
SHARES = (0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 1.0)
POWERS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
NORMAL_SHAPES = ((500, 5), (500, 50), (5_000, 5), (5_000, 50))
MORE_SHAPES = (*SHAPES, (300, 25), (600, 12), (30_000, 30))
FACTORS = np.geomspace(0.05, 1.5, 40)


class Curve(NamedTuple):
    """Log-losses of one fit, by the factor of its scores; and the signal that it had."""

    losses: np.ndarray
    signal: float

    def at(self, factor: float) -> float:
        return float(np.interp(math.log(factor), np.log(FACTORS), self.losses))


def normal_tables() -> Iterator[Table]:
    """Standard normal columns, two classes, even or one in seven."""
    for seed, ((n, d), (steepness, offset)) in enumerate(
        product(NORMAL_SHAPES, ((1.0, 0.0), (1.5, -3.8)))
    ):
        rng = np.random.default_rng(2_000 + seed)
        x = rng.normal(size=(n + 2_000, d))
        z = steepness * 2 * x @ rng.normal(size=d) / math.sqrt(d) + offset
        y = (rng.random(len(x)) < 1 / (1 + np.exp(-z))).astype(int)
        yield f"{n} x {d}, normal", x, y


def length(share: float, power: float) -> AbstractContextManager[object]:
    return patch.multiple(linear_fit, LENGTH_SHARE=share, LENGTH_POWER=power)


def curve(table: Table, epsilon: float) -> Curve:
    _, x, y = table
    classes = np.unique(y)
    with (
        length(1.0, 0.0),
        warnings.catch_warnings(action="ignore"),  # of fits of the same made-up records
    ):
        model = DPLogisticRegression(epsilon, DELTA, classes=classes.tolist(), noise_seed=1).fit(
            x[2_000:], y[2_000:]
        )
    scores = np.log(np.clip(model.predict_proba(x[:2_000]), 1e-300, 1))
    right = np.searchsorted(classes, y[:2_000])
    losses = [log_loss(factor * scores, right) for factor in FACTORS]
    outputs = len(classes) if len(classes) > 2 else 1
    return Curve(
        np.array(losses),
        linear_fit.signal(len(x) - 2_000, outputs * (x.shape[1] + 1), gdp_mu(epsilon, DELTA)),
    )


def log_loss(scores: np.ndarray, right: np.ndarray) -> float:
    scores = scores - scores.max(1, keepdims=True)
    logs = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    return -float(np.clip(logs[np.arange(len(right)), right], -27, 0).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for choose_length.csv")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    curves = [
        curve(table, epsilon)
        for table in (*tables(MORE_SHAPES, True), *normal_tables())
        for epsilon in EPSILONS
    ]
    rows = []
    for share, power in product(SHARES, POWERS):
        with length(share, power):
            losses = np.array([each.at(linear_fit.length_for(each.signal)) for each in curves])
        regrets = losses - [each.losses.min() for each in curves]
        deviation = math.sqrt(np.square(regrets).mean())
        rows.append((share, power, deviation, regrets.max(), losses.mean()))
    rows.sort(key=lambda row: row[2])
    with (options.out / "choose_length.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("share", "power", "regret", "worst_regret", "log_loss"))
        writer.writerows((*row[:2], *(f"{float(value):.4f}" for value in row[2:])) for row in rows)
    for row in (*rows[:3], *(row for row in rows if row[:2] == (1.0, 0.0))):
        print("share {} power {}: regret {:.3f}, at most {:.3f}, log-loss {:.3f}".format(*row))


if __name__ == "__main__":
    main()
