"""Under which relation a table is protected where nobody says so: its ledger's, where it can be."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dpoptim
from dpoptim.accounting.guarantee import neighboring_name
from dpoptim.estimators import DPLogisticRegression, DPSGDClassifier
from dpoptim.evaluation import evaluate_classifier, evaluate_regressor
from dpoptim.preprocessing import DPStandardScaler, PrivatePipeline
from dpoptim.tuning import DPSearchCV

N = 200
X = np.random.default_rng(0).uniform(-1, 1, (N, 2))
Y = (X[:, 0] > 0).astype(int)
LINE: Any = {"data_norm": 1.5, "classes": [0, 1]}


def pipeline(ledger: dpoptim.Ledger) -> Any:
    steps: Any = [("scale", DPStandardScaler(-1, 1)), ("fit", DPLogisticRegression(**LINE))]
    return PrivatePipeline(steps, epsilon=4.0, ledger=ledger).fit(X, Y).privacy_


def search(ledger: dpoptim.Ledger) -> Any:
    grid = {"clip_norm": [1.0]}
    line = DPLogisticRegression(**LINE)
    return DPSearchCV(line, grid, epsilon=4.0, ledger=ledger).fit(X, Y).privacy_


OF_ANY_N: list[Callable[[dpoptim.Ledger], Any]] = [
    lambda ledger: DPLogisticRegression(epsilon=4.0, ledger=ledger, **LINE).fit(X, Y).privacy_,
    pipeline,
    search,
]
OF_PUBLIC_N: list[Callable[..., Any]] = [
    lambda **at: DPSGDClassifier(classes=[0, 1], batch_size=N, epochs=1, **at).fit(X, Y).privacy_,
    lambda **at: DPStandardScaler(-1, 1, **at).fit(X).privacy_,
    lambda **at: dpoptim.private_mean(X[:, 0], -1, 1, **at).guarantee,
    lambda **at: dpoptim.private_histogram(Y, [0, 1], **at).guarantee,
    lambda **at: dpoptim.private_count(Y, **at).guarantee,
    lambda **at: dpoptim.private_quantile(X[:, 0], 0.5, -1, 1, **at).guarantee,
    lambda **at: evaluate_regressor(X[:, 0], X[:, 1], target_bound=1.0, **at).guarantee,
    lambda **at: evaluate_classifier(np.abs(X), Y, classes=[0, 1], **at).guarantee,
]


@pytest.mark.parametrize("release", OF_ANY_N)
def test_where_n_is_public_it_is_as_the_ledger_counts(release: Any) -> None:
    for relation in ("zero-out", "replace-one"):
        with dpoptim.Ledger(neighboring=relation) as ledger:
            assert neighboring_name(release(ledger).neighboring) == relation
    with (
        dpoptim.Ledger() as ledger,
        pytest.raises(dpoptim.LedgerError, match=r"Fix: dpoptim.Ledger\(..., neighboring='zero-ou"),
    ):
        release(ledger)  # which cannot hide n


@pytest.mark.parametrize("release", OF_PUBLIC_N)
def test_with_n_it_is_as_any_ledger_counts(release: Any) -> None:
    with dpoptim.Ledger() as ledger:
        found = release(epsilon=4.0, n=N, ledger=ledger)
        assert neighboring_name(found.neighboring) == "add-or-remove-one"
        (entry,) = ledger.entries()
    assert entry.neighboring == "add-or-remove-one"
    assert neighboring_name(release(epsilon=4.0, n=N).neighboring) == "zero-out"


def test_what_is_stated_counts() -> None:
    with dpoptim.Ledger() as ledger, pytest.raises(dpoptim.LedgerError, match="the run under zero"):
        dpoptim.private_count(Y, epsilon=4.0, n=N, ledger=ledger, neighboring="zero-out")
