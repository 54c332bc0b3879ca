"""A stream goes on from what made its first chunk: its price holds for those whom that has read."""

from typing import Any

import numpy as np
import pytest
from sklearn.model_selection import GridSearchCV

from dpoptim import Ledger
from dpoptim.estimators import DPLogisticRegression, DPSGDClassifier
from dpoptim.preprocessing import DPStandardScaler, PrivatePipeline
from dpoptim.tuning import DPSearchCV

X = np.random.default_rng(0).uniform(-1, 1, (600, 3))
Y = (X[:, 0] > 0).astype(int)


def linear(**settings: Any) -> DPLogisticRegression:
    return DPLogisticRegression(classes=[0, 1], delta=1e-5, **settings)


def test_after_a_search() -> None:
    """The winner's own fit is one of several: it stated 2.39 where the search had cost 3.99."""
    search = DPSearchCV(linear(), {"l2": [0.0, 0.1]}, epsilon=4.0, delta=1e-5, mean_trials=3)
    best = search.fit(X[:300], Y[:300]).best_estimator_
    best.partial_fit(X[300:], Y[300:])
    assert best.privacy_.epsilon == search.privacy_.epsilon > 3.9
    assert best.privacy_.accountant == search.privacy_.accountant
    assert set(search.privacy_.notes) <= set(best.privacy_.notes)
    assert best.set_params(epsilon=6.0).partial_fit(X[300:], Y[300:]).privacy_.epsilon > 5.9


@pytest.mark.parametrize(
    "last", [linear(), DPSGDClassifier(classes=[0, 1], epochs=1, hidden_layer_sizes=(2,))]
)
def test_after_a_pipeline(last: Any) -> None:
    """The last step's own fit is what the scaler left of the budget."""
    steps = [("scale", DPStandardScaler(-1, 1)), ("last", last)]
    pipeline = PrivatePipeline(steps, epsilon=2.0, delta=1e-5, shares={"scale": 0.9})
    whole = pipeline.fit(X[:300], Y[:300]).privacy_.epsilon
    scaled = pipeline[0].transform(X[300:])
    last = pipeline[-1].set_params(epsilon=0.5, delta=1e-5).partial_fit(scaled, Y[300:])
    assert last.privacy_.epsilon == whole > 1.9


@pytest.mark.filterwarnings("ignore::dpoptim.estimators.RepeatedFitWarning")
def test_what_was_said_of_earlier_fits_stays_said() -> None:
    best = GridSearchCV(linear(), {"l2": [0.0, 0.1]}, cv=2).fit(X[:300], Y[:300]).best_estimator_
    best.partial_fit(X[300:], Y[300:])
    assert any("all 5 fits of it and its clones" in note for note in best.privacy_.notes)
    with Ledger(neighboring="zero-out") as ledger:
        stream = linear(ledger=ledger)
        for rows in np.split(np.arange(len(X)), 3):
            stream.partial_fit(X[rows], Y[rows], classes=[0, 1])
    said = [note for note in stream.privacy_.notes if "on its ledger together" in note]
    assert len(said) == 1
    assert said[0].startswith("all 3 runs")
