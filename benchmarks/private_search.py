"""What a private search gains or costs beside one fit with the defaults, at one epsilon.

`DPSearchCV` over the default and 8 settings of steps, penalty and clip norm, and
`DPLogisticRegression` as it is, on the made-up tables of ``choose_defaults.py``; accuracy on 2,000
new rows.

Run: ``python benchmarks/private_search.py --out benchmarks/results`` writes private_search.csv.
"""

import statistics
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from choose_defaults import SHAPES, tables
from dpoptim.estimators import DPLogisticRegression
from dpoptim.tuning import DPSearchCV
from dpoptim.tuning.search_event import search_event
from one_table import write_table

DELTA, SEEDS = 1e-5, 3
EPSILONS = (1.0, 4.0)
GRID: list[dict[str, list[float]]] = [
    {},  # the default
    {"steps": [10, 30], "l2": [0.0, 0.01], "clip_norm": [0.3, 1.0]},
]
TRIALS = 18.0  # twice the candidates


def scored(x: np.ndarray, y: np.ndarray, epsilon: float) -> dict[str, float]:
    """Accuracies of both in percent, means and spreads of `SEEDS`."""
    common: dict[str, Any] = {"delta": DELTA, "classes": np.unique(y).tolist()}
    found: dict[str, list[float]] = {"default": [], "search": []}
    for seed in range(SEEDS):
        one = DPLogisticRegression(epsilon=epsilon, noise_seed=seed, **common)
        several = DPSearchCV(
            DPLogisticRegression(**common),
            GRID,
            epsilon=epsilon,
            delta=DELTA,
            mean_trials=TRIALS,
            noise_seed=seed,
        )
        for name, model in (("default", one), ("search", several)):
            fitted = model.fit(x[2_000:], y[2_000:])
            found[name].append(100 * fitted.score(x[:2_000], y[:2_000]))
    figures = {}
    for name, scores in found.items():
        figures[name] = round(statistics.fmean(scores), 1)
        figures[f"{name}_spread"] = round(statistics.stdev(scores), 1)
    return figures


def rows() -> Iterator[dict[str, Any]]:
    for (name, x, y), epsilon in product(tables(SHAPES, classes=True), EPSILONS):
        trial = search_event(epsilon, DELTA, "zero-out", TRIALS).event
        yield {
            "data": name,
            "epsilon": epsilon,
            "mu_of_a_trial": round(1 / trial.noise_multiplier, 3),
            **scored(x, y, epsilon),
        }


if __name__ == "__main__":
    write_table("private_search", __doc__, rows())
