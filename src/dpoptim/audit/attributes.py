"""Exact audit of what estimators hold beside released numbers, and show whoever has them."""

from typing import Any

import numpy as np
from sklearn.compose import ColumnTransformer

from dpoptim.accounting.ledger import BudgetExceeded, Ledger
from dpoptim.estimators import DPLogisticRegression
from dpoptim.preprocessing import DPMinMaxScaler, DPOneHot, PrivatePipeline

PRICE: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "noise_seed": 0}
X = np.linspace(-1, 1, 20)[:, None]
LABELS, PRIVATE = np.arange(20) % 2, np.arange(20) % 2 + 7


def attributes() -> str:
    """The detector: what a refused fit has read, or a number of entries that nobody paid for."""
    return "; ".join([*left_by_refused_fits(), *told_by_entries()])


def left_by_refused_fits() -> list[str]:
    """Fits that a budget refuses, after one that it admits, and what they have changed."""
    found = []
    for learner, labels in (
        (DPLogisticRegression(data_norm=1.0), PRIVATE),
        (DPOneHot(buckets=4), None),
        (DPMinMaxScaler(-1, 1, quantile=0.1), None),
    ):
        with Ledger(epsilon=1.2, delta=1e-5, neighboring="zero-out") as ledger:
            learner.set_params(**PRICE, ledger=ledger).fit(X, LABELS)
            before = dict(vars(learner))
            try:
                learner.fit(X, labels)
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
