"""`DPLogisticRegression` against diffprivlib's, on the same tables and epsilon: accuracy and time.

diffprivlib promises pure epsilon-DP (its guarantee has no delta), ours (epsilon, 1e-5) or n^-1.1
where that is smaller: ours is the weaker promise by that delta, which is what lets noise be
Gaussian. Both get the same public bound on row norms. Ours runs with its defaults; diffprivlib
with its default and, as a second row, with the inverse regularisation C that scores best on the
*test* part, a favour that is not charged.

Run: ``python benchmarks/tables.py --only ours --out DIR``, then ``--only diffprivlib`` in an
environment of its own, with diffprivlib 0.6.3 and scikit-learn 1.2. With scikit-learn 1.4, whose
loss is a mean over records, diffprivlib 0.6.5 adds the noise of a sum to that mean, n times too
much, and its models are at chance.
"""

import argparse
import csv
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.linear_model import LogisticRegression

EPSILONS = (0.5, 1.0, 4.0)
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1)  # inverse regularisation, diffprivlib's C; the default is 1
Table = tuple[str, np.ndarray, np.ndarray, np.ndarray, np.ndarray, float]


def split(name: str, x: np.ndarray, y: np.ndarray, norm: float, *, seed: int = 0) -> Table:
    order = np.random.default_rng(seed).permutation(len(x))
    cut = len(x) - len(x) // 5
    train, test = order[:cut], order[cut:]
    return name, x[train], y[train], x[test], y[test], norm


def tables() -> Iterator[Table]:
    x, y = load_digits(return_X_y=True)
    yield split("digits", x / 16, y, 4.0)
    x, y = load_breast_cancer(return_X_y=True)
    # public data
    yield split("breast cancer", (x - x.mean(0)) / x.std(0), y, math.sqrt(x.shape[1]))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1_000_000, 50)).astype(np.float32)
    w = rng.normal(size=50)
    y = (x @ w + rng.logistic(size=len(x)) > 0).astype(int)
    yield split("1e6 x 50", x, y, math.sqrt(50))


def methods(
    only: str, epsilon: float, norm: float, n: int, classes: np.ndarray
) -> dict[str, Callable[[int], Any]]:
    delta = min(1e-5, n**-1.1)
    found: dict[str, Callable[[int], Any]] = {}
    if only in ("all", "ours"):
        from dpoptim.estimators import DPLogisticRegression

        found["ours"] = lambda seed: DPLogisticRegression(
            epsilon, delta, data_norm=norm, classes=classes
        )
        if epsilon == EPSILONS[0]:
            found["without privacy"] = lambda seed: LogisticRegression(max_iter=200)
    if only in ("all", "diffprivlib"):
        from diffprivlib.models import LogisticRegression as Peer

        found["diffprivlib"] = lambda seed: Peer(epsilon=epsilon, data_norm=norm, max_iter=200)
        for strength in STRENGTHS:
            found[f"diffprivlib, C = {strength:g}"] = lambda seed, C=strength: Peer(
                epsilon=epsilon, data_norm=norm, max_iter=200, C=C
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for tables.csv")
    parser.add_argument("--only", choices=("all", "ours", "diffprivlib"), default="all")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name, x, y, x_test, y_test, norm in tables():
        for epsilon in EPSILONS:
            for method, make in methods(options.only, epsilon, norm, len(x), np.unique(y)).items():
                scores, seconds = [], []
                for seed in range(options.seeds if len(x) < 10**5 else 2):
                    started = time.process_time()
                    model = make(seed).fit(x, y)
                    seconds.append(time.process_time() - started)
                    scores.append(100 * model.score(x_test, y_test))
                spread = statistics.stdev(scores) if len(scores) > 1 else math.nan
                row = (
                    name,
                    epsilon,
                    method,
                    statistics.mean(scores),
                    spread,
                    statistics.median(seconds),
                )
                print("{}, epsilon {}: {} {:.1f} +- {:.1f} %, {:.2f} s".format(*row), flush=True)
                rows.append(row)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / "tables.csv"
        new = not path.exists()
        with path.open("a", newline="") as file:  # the two may run in environments of their own
            writer = csv.writer(file)
            if new:
                writer.writerow(
                    ("table", "epsilon", "method", "accuracy", "standard_deviation", "cpu_seconds")
                )
            writer.writerows(rows)


if __name__ == "__main__":
    main()
