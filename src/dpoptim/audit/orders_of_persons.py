"""Detector of persons whose steps or parts follow from where others' rows stand.

Who replaces a person has other rows, so persons are numbered otherwise then. Whatever goes by their
numbers without coins would change for everybody between.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils.data import TensorDataset

from dpoptim.accounting import gdp_epsilon
from dpoptim.audit.statistics import DELTA, MU
from dpoptim.estimators import DPLinearRegression, DPLogisticRegression
from dpoptim.methods import DPFTRL
from dpoptim.solvers import LinearProblem
from dpoptim.training.attach import attach
from dpoptim.tuning.search import DPSearchCV

PERSONS = 100  # the same 20 of them twice, or the same order, is chance once in 10^20 times
X = np.linspace(-1, 1, PERSONS)[:, None]
BUDGET: Any = {"epsilon": gdp_epsilon(MU, DELTA), "delta": DELTA}
Seen = list[tuple[float, ...]]


def orders_of_persons() -> str:
    """Fits of one table without seeds: empty, or what others' places decide each time alike."""
    found = [
        f"refuted: {what} is the same each time, so it follows from where persons' rows stand"
        for what, watched in (
            ("who trains in a search", trained_in_a_search),
            ("who is in a batch of a single pass", first_batch),
        )
        if watched() == watched()
    ]
    if goes_by_the_given_order():
        found.append("refuted: persons who may be replaced are batched in the order of their rows")
    return "; ".join(found)


def watching(kind: Any, name: str, column: Callable[..., Any], seen: Seen) -> Any:
    """A patch of a method, which notes whom each call is of."""
    honest = getattr(kind, name)

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        seen.append(tuple(np.asarray(column(*args)).ravel().tolist()))
        return honest(self, *args, **options)

    return patch.object(kind, name, watched)


def trained_in_a_search() -> tuple[float, ...]:
    """Whose rows the first trial trained on; rehearsals are on none."""
    seen: Seen = []
    model = DPLogisticRegression(data_norm=1.0, classes=[0, 1], neighboring="replace-one")
    search = DPSearchCV(model, {"steps": [1]}, **BUDGET, mean_trials=1.5)
    with watching(DPLogisticRegression, "fit", lambda x, *_: np.sort(x[:, 0]), seen):
        search.fit(X, (X[:, 0] > 0).astype(int), persons=range(PERSONS))
    return next(each for each in seen if len(each) < PERSONS)


def first_batch() -> tuple[float, ...]:
    """Who is in the first batch of a single pass."""
    seen: Seen = []
    model = DPLinearRegression(
        **BUDGET,
        data_norm=1.0,
        target_bound=1.0,
        neighboring="replace-one",
        solver="one-pass-sgd",
        steps=5,
    )
    with watching(LinearProblem, "prepare", lambda records: np.sort(records[1], 0), seen):
        model.fit(X, X[:, 0], persons=range(PERSONS))
    return seen[0]


def goes_by_the_given_order() -> bool:
    plan = DPFTRL(1.0, order="given").plan(
        n=PERSONS, batch_size=20, epochs=1, **BUDGET, neighboring="replace-one"
    )
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.from_numpy(X).float())
    try:
        with attach(
            plan,
            model,
            optimizer,
            data,
            loss=lambda model, batch: model(batch[0])[:, 0],
            persons=range(PERSONS),
        ):
            return True
    except ValueError:
        return False
