"""Exact audits of fits: what they release of the worst record, and what they leave behind.

How far the worst record moves a Gaussian vector, against the noise, is the likelihood ratio's
separation, so mu is found and not estimated; that the noise is drawn rightly is what `audit.noise`
tests. Beside it a replay: with the released values held fixed, everything that a fit leaves behind
must be the same on neighbouring data, or something was read past the gate. Nor may a fit that is
refused leave anything, or a fitted step tell a number of entries that nobody paid for.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from scipy.sparse import csr_array
from sklearn.compose import ColumnTransformer
from sklearn.preprocessing import TargetEncoder
from torch import Tensor

from dpoptim.accounting import gdp_epsilon
from dpoptim.accounting.filters import selection_epsilon
from dpoptim.accounting.ledger import BudgetExceeded, Ledger
from dpoptim.audit.bounds import Floats
from dpoptim.estimators import DPLogisticRegression
from dpoptim.evaluation import evaluate_classifier, evaluate_regressor
from dpoptim.gate import adaptive as gate_module
from dpoptim.preprocessing import (
    DPClassCounts,
    DPImputer,
    DPMinMaxScaler,
    DPOneHot,
    DPStandardScaler,
    PrivatePipeline,
)
from dpoptim.solvers import Budget
from dpoptim.solvers.linear_model import LinearModel
from dpoptim.solvers.sufficient_statistics import sufficient_statistics
from dpoptim.summaries.mean import private_mean

MU = 1.5
DELTA = 1e-5
RECORDS = 12
COLUMNS = 3
Fit = Callable[[Floats], Any]  # from the table, one row a record, to what is left behind
PUBLIC: Any = {
    "epsilon": gdp_epsilon(MU, DELTA),
    "delta": DELTA,
    "neighboring": "add-or-remove-one",
    "n": RECORDS,
    "noise_seed": 0,
}
PRICE: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "noise_seed": 0}
COLUMN = np.linspace(-1, 1, 20)[:, None]
LABELS, PRIVATE = np.arange(20) % 2, np.arange(20) % 2 + 7


def left_behind(estimator: Any) -> dict[str, Any]:
    """Everything that a fitted estimator shows."""
    return {name: value for name, value in vars(estimator).items() if name.endswith("_")}


def fits() -> dict[str, tuple[Fit, tuple[Sequence[float], ...]]]:
    """By name: a fit on a table of `COLUMNS` numbers, and the records that may move it most."""
    ends: tuple[Sequence[float], ...] = (
        (1.0,) * COLUMNS,
        (-1.0,) * COLUMNS,
        (1e30,) * COLUMNS,
        (math.nan,) * COLUMNS,
    )

    def counts(x: Floats) -> Any:
        return left_behind(DPClassCounts([0, 1], **PUBLIC).fit(np.where(x[:, 0] > 0.5, 1, 0)))

    def classifier(x: Floats) -> Any:
        chance = np.clip(np.nan_to_num(x[:, 0]), 0.0, 1.0)
        wrong = (chance < 0.5).astype(int)
        return evaluate_classifier(
            np.stack([1 - chance, chance], 1), wrong, classes=[0, 1], bins=2, **PUBLIC
        )

    def regressor(x: Floats) -> Any:
        return evaluate_regressor(-x[:, 0], x[:, 0], target_bound=1.0, **PUBLIC)

    def regression(x: Floats) -> Any:
        # n is public here: a record that is not there counts as zero
        empty = np.full((RECORDS - len(x), COLUMNS), np.nan)
        rows = np.vstack([x, empty])
        model = LinearModel("squared", COLUMNS - 1)
        data = (rows[:, :-1], rows[:, -1])
        found = sufficient_statistics(
            model, data, Budget(DELTA, mu=MU), radius=2.0**0.5, target_bound=1.0, noise_seed=0
        )
        return found.weights.numpy()

    def narrowed(x: Floats) -> Any:
        many = np.vstack([x, np.full((10_000, COLUMNS), 0.1)])  # who find where they are
        return left_behind(DPStandardScaler(-1, 1, **{**PUBLIC, "n": 10_000}).fit(many))

    def grouped(x: Floats) -> Any:
        by = np.where(x[:, 1] > 0.5, "a", "b")
        return private_mean(x[:, 0], -1, 1, by=by, groups=["a", "b"], **PUBLIC)

    return {
        "scaler": (lambda x: left_behind(DPStandardScaler(-1, 1, **PUBLIC).fit(x)), ends),
        "scaler in a part of its range": (narrowed, (*ends, (0.1,) * COLUMNS)),
        "scaler of a sparse table": (
            lambda x: left_behind(DPStandardScaler(-1, 1, **PUBLIC).fit(csr_array(x))),
            ends,
        ),
        "means by group": (grouped, ends),
        "imputer": (lambda x: left_behind(DPImputer(-1, 1, **PUBLIC).fit(x)), ends),
        "public range": (lambda x: left_behind(DPMinMaxScaler(-1, 1).fit(x)), ends),
        "class counts": (counts, ends),
        "frequent categories": (lambda x: left_behind(DPOneHot(buckets=16, **PUBLIC).fit(x)), ends),
        "evaluation": (classifier, tuple((chance,) * COLUMNS for chance in (1.0, 0.0, 0.4))),
        "evaluation of a regression": (regressor, ends),
        "regression sums": (
            regression,
            ((1.0, 0.0, 1.0), (0.0, 1.0, -1.0), (1e9, 0.0, 1e9), (math.nan,) * COLUMNS),
        ),
    }


def largest_mu(name: str) -> float:
    """The mu that the named fit really has, over its records; 0 where it releases nothing."""
    fit, records = fits()[name]
    others = np.zeros((RECORDS - 1, COLUMNS))
    worst = 0.0
    for record in records:
        with shifts_seen() as absent:
            fit(others)
        with shifts_seen([total for total, _ in absent]) as present:
            fit(np.vstack([others, np.asarray(record)]))
        squared = 0.0
        for (before, deviation), (after, _) in zip(absent, present, strict=True):
            squared += float((after - before).norm()) ** 2 / deviation**2
        worst = max(worst, math.sqrt(squared))
    return worst


def differs(name: str) -> bool:
    """Whether anything else that a fit leaves behind depends on the data."""
    fit, records = fits()[name]
    others = np.zeros((RECORDS - 1, COLUMNS))
    shown = set()
    for record in records:
        for table in (others, np.vstack([others, np.asarray(record)])):
            with patch.object(gate_module.FilteredGate, "release_sum", _constant):
                shown.add(repr(fit(table)))
    return len(shown) > 1


def _constant(gate: Any, total: Tensor, **_: Any) -> Tensor:
    return torch.ones_like(total)


@contextmanager
def shifts_seen(
    released: Sequence[Tensor] | None = None,
) -> Iterator[list[tuple[Tensor, float]]]:
    """The sums that the gate would add noise to, and the noise's standard deviation.

    Args:
        released: the outputs, in turn, on which later releases may depend; None: the sums.
    """
    seen: list[tuple[Tensor, float]] = []

    def keep(stream: Any, total: Tensor, deviation: float) -> None:
        seen.append((total.clone(), deviation))
        if released is not None:
            total.copy_(released[len(seen) - 1])

    with patch.object(gate_module, "add_normal", keep):
        yield seen


def sharpest_choice() -> tuple[float, float]:
    """The epsilon of one record on a quantile's choice, and that of its share of mu; exact."""
    many, worst = 100, 0.0
    settings = {**PUBLIC, "n": many}
    for held in (24, 25, 26):  # values where there may be 25
        for place in (-0.5, 0.5):
            others = np.full((many - 1, 1), math.nan)
            others[:held] = place
            found = []
            for record in (math.nan, -1.0, 1.0):
                with choices_seen(gate_module) as seen:
                    scaler = DPMinMaxScaler(-1, 1, quantile=0.25, **settings)
                    scaler.fit(np.vstack([others, [[record]]]))
                found.append([logits - np.logaddexp.reduce(logits) for logits in seen])
            for absent, present in ((found[0], found[1]), (found[0], found[2])):
                for a, b in zip(absent, present, strict=True):
                    worst = max(worst, float(np.abs(a - b).max()))
    return worst, selection_epsilon(MU / math.sqrt(2))


@contextmanager
def choices_seen(gate: ModuleType) -> Iterator[list[Floats]]:
    """The logarithms of the odds of each choice that this module of the gate's draws."""
    seen: list[Floats] = []

    def keep(stream: Any, odds: Sequence[Any]) -> int:
        seen.append(np.array([float(each) for each in odds]))
        return 0

    with patch.object(gate, "exponential_choice", keep):
        yield seen


def statistics() -> str:
    """The detector: what is refuted of any of the fits."""
    found = []
    for name in fits():
        mu = largest_mu(name)
        if mu > MU * (1 + 1e-9):
            found.append(f"refuted: {name} claims mu={MU:g}, and a record shows mu={mu:.4g}")
        if differs(name):
            found.append(f"refuted: {name} leaves behind what was not released")
    epsilon, claimed = sharpest_choice()
    if epsilon > claimed * (1 + 1e-9):
        found.append(f"refuted: an end of a range may show {claimed:.4g}, and shows {epsilon:.4g}")
    return "; ".join(found)


def attributes() -> str:
    """The detector: what a refused fit has read, or what nobody paid for: a number, a label."""
    return "; ".join([*left_by_refused_fits(), *told_by_entries(), *told_by_steps_of_others()])


def left_by_refused_fits() -> list[str]:
    """Fits that a budget refuses, after one that it admits, and what they have changed."""
    found = []
    for learner, labels in (
        (DPLogisticRegression(data_norm=1.0), PRIVATE),
        (DPOneHot(buckets=4), None),
        (DPMinMaxScaler(-1, 1, quantile=0.1), None),
    ):
        with Ledger(epsilon=1.2, delta=1e-5, neighboring="zero-out") as ledger:
            learner.set_params(**PRICE, ledger=ledger).fit(COLUMN, LABELS)
            before = dict(vars(learner))
            try:
                learner.fit(COLUMN, labels)
            except BudgetExceeded:
                changed = [
                    name for name, value in before.items() if vars(learner)[name] is not value
                ]
                found += [f"refuted: a fit that was refused left {name}" for name in changed]
    return found


def told_by_entries() -> list[str]:
    """Whether one record with a category, or without, decides how a fitted step holds tables."""
    told = set[tuple[float, bool]]()
    cases = ("?", ["a", "b"], 0.04), ("a", ["a"], 1.0), ("a", ["a"], np.float32(0.5))
    for others, known, share in cases:
        for last in ("a", "?"):
            towns = np.array([["a"], *[[others]] * 18, [last]])
            step = DPOneHot([known], sparse_output=True)
            columns = ColumnTransformer([("towns", step, [0])], sparse_threshold=share)
            model = DPLogisticRegression(classes=[0, 1], noise_seed=0)
            steps = [("towns", columns), ("model", model)]
            PrivatePipeline(steps, epsilon=1.0, delta=1e-5).fit(towns, LABELS)
            told.add((float(share), columns.sparse_output_))
    if len(told) == len(cases):
        return []
    return ["refuted: a fitted step tells how many entries are 0"]


def told_by_steps_of_others() -> list[str]:
    """Whether a pipeline is fitted that holds one record's label as a step's mean of its town."""
    towns = np.array([["a"]] * 19 + [["b"]])
    told = set[float]()
    for last in (0, 1):
        encoder = TargetEncoder(smooth=0.0, target_type="binary", cv=2)
        model = DPLogisticRegression(classes=[0, 1], noise_seed=0)
        pipeline = PrivatePipeline([("towns", encoder), ("model", model)], epsilon=1.0, delta=1e-5)
        with suppress(ValueError):  # refused, as it must be
            pipeline.fit(towns, np.array([0, 1] * 9 + [0, last]))
            told.add(float(encoder.encodings_[0][1]))
    if len(told) < 2:
        return []
    return ["refuted: a fitted step tells the label of the only record of its category"]
