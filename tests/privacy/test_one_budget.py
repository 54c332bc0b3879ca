"""From table to scores under one budget: whatever is fitted, searched, trained and scored, in
whatever order, with kills in between, all noise that was drawn is within it.

What was released is measured where noise is drawn, against the bound on a record that the caller
claims (which the audits of each release attack); how that adds up is a formula of its own.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim import Ledger
from dpoptim.estimators import DPLinearRegression
from dpoptim.evaluation import evaluate_regressor
from dpoptim.gate import FilteredGate, Gate, adaptive, planned
from dpoptim.noise.gaussian import add_normal
from dpoptim.preprocessing import (
    DPClassCounts,
    DPImputer,
    DPMinMaxScaler,
    DPOneHot,
    DPStandardScaler,
)
from dpoptim.tuning import DPSearchCV
from dpoptim.tuning.search import search_event

N = 60
X = np.random.default_rng(0).uniform(-1, 1, (N, 3))
Y = np.clip(X[:, 0] / 2, -1, 1)
DELTA = 1e-5


class Killed(BaseException):
    """Somebody stops the program."""


class Meter:
    """Adds up what leaves: squared shifts over variances of Gaussians, and epsilons of choices.

    Attributes:
        squares: mu^2 of all Gaussian draws outside searches.
        choices: epsilon of every choice.
        trials: mu^2 of the draws in searches.
        kill_at: the draw at which the program is killed; before or after it is made.
    """

    def __init__(self) -> None:
        self.squares, self.choices = 0.0, list[float]()
        self.trials: list[float] = []
        self.kill_at, self.before = -1, False
        self.searching = False
        self._bound = math.nan

    @contextmanager
    def watching(self) -> Iterator[None]:
        def draw(stream: Any, total: torch.Tensor, deviation: float) -> None:
            self.kill_at -= 1
            if self.kill_at == 0 and self.before:
                raise Killed
            add_normal(stream, total, deviation)
            mu = self._bound / deviation
            if self.searching:
                self.trials.append(mu)
            else:
                self.squares += mu**2
            if self.kill_at == 0:
                raise Killed

        def bounded(honest: Any, bound: Any) -> Any:
            def call(one: Any, *given: Any, **named: Any) -> Any:
                self._bound = bound(one, named)
                return honest(one, *given, **named)

            return call

        def select(one: Any, scores: Any, *, norm_bound: float, epsilon: float) -> int:
            self.choices.append(epsilon)
            return honest_select(one, scores, norm_bound=norm_bound, epsilon=epsilon)

        honest_select = FilteredGate.select
        of_run = bounded(Gate.release_sum, lambda one, named: one.query.norm_bound)
        of_sum = bounded(FilteredGate.release_sum, lambda one, named: named["norm_bound"])
        with (
            patch.object(planned, "add_normal", draw),
            patch.object(adaptive, "add_normal", draw),
            patch.object(Gate, "release_sum", of_run),
            patch.object(FilteredGate, "release_sum", of_sum),
            patch.object(FilteredGate, "select", select),
        ):
            yield


def train(ledger: Ledger, epsilon: float, *, refund: bool) -> None:
    """Steps that all records take part in; the run may give back what it has not made."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.from_numpy(X).float(), torch.from_numpy(Y).float())
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N,
        batch_size=N,
        steps=8,
        epsilon=epsilon,
        delta=DELTA,
        neighboring="zero-out",
    )
    with dpoptim.attach(plan, model, optimizer, data, ledger=ledger) as private:
        for x, y in private.batches():
            private.backward((model(x)[:, 0] - y).square())
            optimizer.step()
            if refund and private.steps_done == 2 and not private.why_no_refund:
                private.finish(refund=True)
        if refund:
            private.evaluate(data, epsilon=epsilon / 2, target_bound=1.0)


def act(what: str, ledger: Ledger, epsilon: float) -> None:
    paid: Any = {"epsilon": epsilon, "delta": DELTA, "ledger": ledger}
    if what == "scale":
        DPStandardScaler(-1, 1, **paid).fit(X)
    elif what == "impute":
        DPImputer(-1, 1, **paid).fit(X)
    elif what == "ends":
        DPMinMaxScaler(-1, 1, quantile=0.1, **paid).fit(X)
    elif what == "categories":
        DPOneHot(buckets=8, **paid).fit(np.sign(X))
    elif what == "classes":
        DPClassCounts([0, 1], **paid).fit(Y > 0)
    elif what == "search":
        line = DPLinearRegression(target_bound=1.0, solver="sufficient-statistics")
        DPSearchCV(line, {"l2": [0.0, 1.0]}, mean_trials=2.0, **paid).fit(X, Y)
    elif what == "fit":
        DPLinearRegression(target_bound=1.0, solver="sufficient-statistics", **paid).fit(X, Y)
    elif what == "score":
        evaluate_regressor(Y, Y, target_bound=1.0, **paid)
    else:
        train(ledger, epsilon, refund=what == "train, and end")


ACTS = [
    *("scale", "impute", "ends", "categories", "classes", "search", "fit", "score"),
    *("train", "train, and end"),
]
step = st.tuples(
    st.sampled_from(ACTS),
    st.sampled_from([0.2, 0.5, 1.0, 1.9]),
    st.integers(-6, 6),  # the draw at which it is killed; none below 1
    st.booleans(),
)


@settings(max_examples=15, deadline=None)
@given(script=st.lists(step, min_size=4, max_size=14))
@pytest.mark.filterwarnings("ignore")
def test_no_sequence_of_steps_exceeds_the_budget(
    script: list[tuple[str, float, int, bool]],
) -> None:
    epsilon, meter, searches = 2.0, Meter(), list[float]()
    ledger = Ledger(epsilon=epsilon, delta=DELTA, neighboring="zero-out")
    budget = ledger.budget
    assert budget is not None
    assert budget.order is not None
    with meter.watching():
        for what, price, meter.kill_at, meter.before in script:
            meter.searching, before = what == "search", len(meter.trials)
            with suppress(dpoptim.BudgetExceeded, Killed):
                act(what, ledger, price)
            if len(meter.trials) > before:
                searches.append(price)
                base = 1 / search_event(price, DELTA, "zero-out", 2.0).event.noise_multiplier
                assert max(meter.trials[before:]) <= base * (1 + 1e-6)
    ledger.verify()
    # Gaussians: order mu^2 / 2. Choices: their log-ratios span an interval of length epsilon, so
    # epsilon^2 / 8 of zCDP. Searches: what the event says of trials that are no sharper than its
    # base (above).
    renyi = budget.order * (meter.squares / 2 + math.fsum(e**2 / 8 for e in meter.choices))
    renyi += math.fsum(
        budget.charge(search_event(price, DELTA, "zero-out", 2.0), 1)[0] for price in searches
    )
    if len(ledger.entries()) > 1:
        assert renyi <= budget.limit * (1 + 1e-6)
    charged = math.fsum(ledger._runs.charges(budget))
    assert renyi <= charged * (1 + 1e-6)
