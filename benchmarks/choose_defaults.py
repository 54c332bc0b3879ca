"""The constants behind the estimators' defaults, chosen on made-up tables alone.

Each table is drawn anew, of its own shape, with columns in [-1, 1] that take up all or a small
part of their bounds; none of the tables of ``benchmarks/tables.py`` is looked at. A setting's
regret on a table and epsilon is the best setting's score less its own, in points, means of
all seeds; a classifier's score is its accuracy in percent, less ten times its log-loss. Of all
settings the one with the least mean regret is chosen.

Run: ``python benchmarks/choose_defaults.py --out benchmarks/results`` writes choose_defaults.csv.
"""

import argparse
import csv
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from dpoptim.estimators import (
    DPLinearRegression,
    DPLogisticRegression,
    DPSGDClassifier,
    DPSGDRegressor,
    linear_fit,
    network_fit,
    solving,
)

EPSILONS = (1.0, 4.0)
SHAPES = ((200, 12), (1_500, 20), (4_000, 60), (12_000, 15))
FEW_RECORDS = ((120, 6), (300, 25), (600, 10))  # where noise can take an R2 to 0
MANY_RECORDS = ((60_000, 10), (60_000, 40))  # where sums X^T X are known well
NETWORK_SHAPES = ((600, 12), (4_000, 20))
Shapes = tuple[tuple[int, int], ...]
Table = tuple[str, np.ndarray, np.ndarray]
Settings = dict[str, float]


def columns(n: int, d: int, rng: np.random.Generator) -> np.ndarray:
    """Correlated, skewed and even columns by thirds, each in [-1, 1]."""
    factors = rng.normal(size=(n, 3)) @ rng.normal(size=(3, d)) / 2 + 0.7 * rng.normal(size=(n, d))
    kind = np.arange(d) % 3
    x = np.where(kind == 0, factors / 4, np.where(kind == 1, np.exp(0.6 * factors) / 4 - 1, 0.0))
    even = 2 * (np.argsort(np.argsort(factors, 0), 0) / n) - 1
    return np.clip(np.where(kind == 2, even, x), -1, 1)


def tables(shapes: Shapes, classes: bool) -> Iterator[Table]:
    """Two of each shape: for classes of 2 and of 5, for numbers of much and of little noise."""
    for seed, ((n, d), few) in enumerate(product(shapes, (True, False))):
        rng = np.random.default_rng(1_000 + seed)
        x = columns(n + 2_000, d, rng)
        z = (x - x.mean(0)) / x.std(0)
        outputs = (2 if few else 5) if classes else 1
        signal = z @ rng.normal(size=(d, outputs)) * rng.choice([0.3, 1.0, 2.0]) / math.sqrt(d)
        # what no linear model finds
        signal = signal + 0.4 * np.tanh(2 * z[:, : 2 * outputs : 2] * z[:, 1 : 2 * outputs : 2])
        if classes:
            y = (2 * signal + rng.gumbel(size=signal.shape)).argmax(1)
        else:
            noisy = signal[:, 0] + (0.3 if few else 1.0) * rng.normal(size=len(x))
            y = np.clip(noisy / rng.choice([3.0, 6.0]), -1, 1)
        yield f"{n} x {d}, {'few' if few else 'many'}", x, y


def linear_classifier(settings: Settings) -> Any:
    steps = dict.fromkeys(("softmax", "logistic"), settings["largest_step"])
    return (
        patch.object(linear_fit, "MOMENTUM_SHARE", settings["clipped_share"]),
        patch.dict(solving.MOMENTUM_STEP, steps),
        patch.object(solving, "TOLERANCE", settings["tolerance"]),
        {},
    )


def linear_regressor(settings: Settings) -> Any:
    return (
        patch.object(linear_fit, "SQUARED_SHARE", settings["clipped_share"]),
        patch.dict(solving.MOMENTUM_STEP, {"squared": settings["largest_step"]}),
        patch.object(solving, "SQUARED_STEPS", int(settings["steps"])),
        patch.object(solving, "SQUARED_RATE", settings["rate"]),
        {"solver": "momentum-gd"},
    )


def auto_regressor(settings: Settings) -> Any:
    return (patch.object(solving, "SHARP", settings["sharp"]), {})


def feedback(settings: Settings) -> Any:
    """DiceSGD, on networks of no hidden layer and of one, in the settings' hands."""
    arguments: dict[str, Any] = {"method": "dice-sgd", "random_state": 0, **settings}
    hidden = int(arguments.pop("hidden"))
    return (arguments | {"hidden_layer_sizes": (hidden,) if hidden else ()},)


def network(settings: Settings, optimizer: str = "sgd") -> Any:
    arguments = {
        "hidden_layer_sizes": (32,),
        "random_state": 0,
        "optimizer": optimizer,
        **settings,
    }
    rate = arguments.pop("rate")
    patches = [patch.object(each, "_rate", rate) for each in (DPSGDClassifier, DPSGDRegressor)]
    if "clip" in arguments:
        patches.append(patch.object(network_fit, "CLIP", arguments.pop("clip")))
    return (*patches, arguments)


STUDIES: Mapping[str, tuple[Any, bool, Shapes, Any, dict[str, tuple[float, ...]]]] = {
    "DPLogisticRegression": (
        DPLogisticRegression,
        True,
        SHAPES,
        linear_classifier,
        {
            "clipped_share": (0.1, 0.2, 0.3, 0.5),
            "largest_step": (64, 256),
            "tolerance": (0.2, 0.4),
        },
    ),
    "DPLinearRegression, gradients": (
        DPLinearRegression,
        False,
        SHAPES + FEW_RECORDS,
        linear_regressor,
        {
            "clipped_share": (0.05, 0.1, 0.2),
            "largest_step": (1, 3),  # above 3.8 it diverges on some data
            "rate": (0.02, 0.03, 0.05, 1e9),  # at 1e9 the noise bounds no step
            "steps": (60, 100),
        },
    ),
    "DPLinearRegression, auto": (
        DPLinearRegression,
        False,
        SHAPES + FEW_RECORDS + MANY_RECORDS,
        auto_regressor,
        {"sharp": (0.0, 0.0025, 0.005, 0.01, 0.02, 0.04, 1e9)},
    ),
    "DPSGDClassifier": (
        DPSGDClassifier,
        True,
        NETWORK_SHAPES,
        network,
        {"rate": (0.5, 1, 2), "clip": (0.8, 1.2, 1.6), "epochs": (20, 40)},
    ),
    "DPSGDRegressor": (
        DPSGDRegressor,
        False,
        NETWORK_SHAPES,
        network,
        {"rate": (0.25, 0.5, 1, 2), "clip_norm": (0.3, 1), "epochs": (20, 40)},
    ),
    **{
        f"{estimator.__name__}, dice-sgd, {kind}": (
            estimator,
            estimator is DPSGDClassifier,
            NETWORK_SHAPES,
            feedback,
            {"hidden": (hidden,), "clip_norm": (0.2, 0.3, 0.4, 0.6, 1.2, 2.4)},
        )
        for estimator in (DPSGDClassifier, DPSGDRegressor)
        for kind, hidden in (("linear", 0), ("network", 32))
    },
    **{
        f"{estimator.__name__}, {name}": (
            estimator,
            estimator is DPSGDClassifier,
            NETWORK_SHAPES,
            partial(network, optimizer=name),
            {"rate": rates},
        )
        for estimator, rates in (
            (DPSGDClassifier, (0.25, 0.5, 1, 2, 4)),
            (DPSGDRegressor, (0.03, 0.06, 0.125, 0.25, 0.5, 1)),
        )
        for name in ("adam", "adam_bc")
    },
}


def scores(
    estimator: Any, classes: bool, arrange: Any, settings: Settings, held: Table, seeds: int
) -> list[float]:
    """Points on 2,000 new rows at each epsilon, means over noise seeds."""
    _, x, y = held
    *patches, arguments = arrange(settings)
    delta = min(1e-5, (len(x) - 2_000) ** -1.1)
    known: dict[str, Any] = {"classes": np.unique(y).tolist()} if classes else {"target_bound": 1.0}
    found = []
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        for epsilon in EPSILONS:
            values = [
                points(
                    estimator(epsilon, delta, noise_seed=seed, **known, **arguments).fit(
                        x[2_000:], y[2_000:]
                    ),
                    x[:2_000],
                    y[:2_000],
                )
                for seed in range(seeds)
            ]
            # a model that explains less than nothing is of no use, however much less
            found.append(max(0.0, float(np.mean(values))))
    return found


def points(model: Any, x: np.ndarray, y: np.ndarray) -> float:
    """R2, or accuracy, in percent, less ten times the log-loss in nats: probabilities count."""
    score: float = 100 * model.score(x, y)
    if not hasattr(model, "predict_proba"):
        return score
    right = model.predict_proba(x)[np.arange(len(x)), np.searchsorted(model.classes_, y)]
    return score - 10 * float(-np.log(np.clip(right, 1e-9, 1.0)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for choose_defaults.csv")
    parser.add_argument("--only", choices=tuple(STUDIES), help="one; rows of the others stay")
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "choose_defaults.csv"
    rows = []
    for name in STUDIES if options.only is None else (options.only,):
        estimator, classes, shapes, arrange, grid = STUDIES[name]
        held = list(tables(shapes, classes))
        settings = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
        measured = np.array(
            [
                [
                    point
                    for each in held
                    for point in scores(estimator, classes, arrange, setting, each, options.seeds)
                ]
                for setting in settings
            ]
        )
        regrets = measured.max(0) - measured
        order = np.argsort(regrets.mean(1))
        for place in order:
            said = " ".join(f"{key}={value:g}" for key, value in settings[place].items())
            rows.append((name, said, regrets[place].mean(), regrets[place].max()))
        for _, said, mean, worst in rows[-len(order) :][:5]:
            print(f"{name}: {said}: regret {mean:.2f}, at most {worst:.2f} points", flush=True)
    found = [(*row[:2], *(f"{value:.3f}" for value in row[2:])) for row in rows]
    if options.only is not None and path.exists():
        with path.open(newline="") as file:
            found += [
                tuple(row)
                for row in csv.reader(file)
                if row[0] in STUDIES and row[0] != options.only
            ]
    order_of = {name: place for place, name in enumerate(STUDIES)}
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("estimator", "setting", "mean_regret", "worst_regret"))
        writer.writerows(sorted(found, key=lambda row: order_of[row[0]]))


if __name__ == "__main__":
    main()
