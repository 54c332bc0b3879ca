"""A fit that is refused or interrupted leaves everything as it was: else a guarantee would stand
beside what other records have taught, or a list of private labels without any.
"""

import inspect
import warnings
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone

import dpoptim
from dpoptim.estimators import (
    DPLinearRegression,
    DPLogisticRegression,
    DPSGDClassifier,
    DPSGDRegressor,
    RepeatedFitWarning,
)
from dpoptim.estimators.repeats import CountsFits
from dpoptim.preprocessing import (
    DPClassCounts,
    DPImputer,
    DPMinMaxScaler,
    DPOneHot,
    DPStandardScaler,
    PrivatePipeline,
)

X = np.random.default_rng(0).uniform(-1, 1, (200, 2))
Y = np.where(X[:, 0] > 0, "yes", "no")
OTHERS = np.where(X[:, 0] > 0, "hiv", "none")
PRICE: Any = {"epsilon": 1.0, "delta": 1e-5}
EVERY: list[tuple[Any, Any]] = [
    (DPLogisticRegression(**PRICE), Y),
    (DPSGDClassifier(**PRICE, epochs=1, hidden_layer_sizes=()), Y),
    (DPLinearRegression(**PRICE, target_bound=1.0), X[:, 0]),
    (DPSGDRegressor(**PRICE, target_bound=1.0, epochs=1, hidden_layer_sizes=()), X[:, 0]),
    (DPOneHot(**PRICE, buckets=8), None),
    (DPMinMaxScaler(**PRICE, lower=-1, upper=1, quantile=0.1), None),
    (DPStandardScaler(**PRICE, lower=-1, upper=1), None),
    (DPImputer(**PRICE, lower=-1, upper=1), None),
    (
        PrivatePipeline(
            [("scale", DPStandardScaler(-1, 1)), ("model", DPLogisticRegression())], **PRICE
        ),
        Y,
    ),
]


def small_ledger() -> dpoptim.Ledger:
    """A ledger with room for one fit."""
    return dpoptim.Ledger(epsilon=1.2, delta=1e-5, neighboring="zero-out")


@pytest.mark.parametrize("learner", EVERY, ids=lambda each: type(each[0]).__name__)
def test_what_a_budget_refuses_changes_nothing(learner: tuple[Any, Any]) -> None:
    """Of a second fit on other columns and labels, whose names were left behind."""
    model, y = learner
    model.set_params(ledger=small_ledger()).fit(X, y)
    before = dict(vars(model))
    more = np.hstack([X, X])
    with pytest.raises(dpoptim.BudgetExceeded):
        model.fit(more, OTHERS if y is Y else y)
    assert vars(model).keys() == before.keys()
    assert all(vars(model)[name] is value for name, value in before.items())


def test_no_private_labels_are_left_by_a_refused_fit() -> None:
    model = DPLogisticRegression(**PRICE, ledger=small_ledger()).fit(X, Y)
    with pytest.raises(dpoptim.BudgetExceeded):
        model.fit(X, OTHERS)
    assert set(model.predict(X)) <= {"yes", "no"}
    new = DPLogisticRegression(**PRICE, ledger=model.ledger)
    with pytest.raises(dpoptim.BudgetExceeded):
        new.fit(X, OTHERS)
    assert not hasattr(new, "classes_")


def test_categories_of_private_counts_keep_their_guarantee() -> None:
    """It said None, as of public ones."""
    towns = np.array([["jena"], ["kiel"]] * 100)
    encoder = DPOneHot(**PRICE, ledger=small_ledger()).fit(towns)
    with pytest.raises(dpoptim.BudgetExceeded):
        encoder.fit(towns)
    assert encoder.privacy_ is not None
    scaler = DPMinMaxScaler(lower=-1, upper=1, quantile=0.1, **PRICE).fit(X)
    with pytest.raises(ValueError, match="epsilon is missing"):
        scaler.set_params(epsilon=None).fit(X)
    assert scaler.privacy_ is not None


def test_a_pipeline_that_is_interrupted_has_no_new_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scaler had learnt anew, and was not in the pipeline's guarantee."""
    steps: Any = [
        ("scale", DPStandardScaler(lower=-1, upper=1)),
        ("model", DPLogisticRegression(classes=["no", "yes"])),
    ]
    pipeline = PrivatePipeline(steps, **PRICE).fit(X, Y)
    before = {name: dict(vars(step)) for name, step in steps}
    solved, calls = DPLogisticRegression._solve, iter(range(1))

    def interrupted(*args: Any, **more: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return solved(*args, **more)

    monkeypatch.setattr(DPLogisticRegression, "_solve", interrupted)  # after it was tried once
    claimed = pipeline.privacy_
    with pytest.raises(KeyboardInterrupt):
        pipeline.fit(X / 2, Y)
    assert pipeline.privacy_ is claimed
    for name, step in steps:
        assert vars(step).keys() == before[name].keys()
        assert all(vars(step)[key] is value for key, value in before[name].items())


def test_a_warning_that_is_an_error_comes_when_all_is_learnt() -> None:
    """The fit is charged then, and its guarantee is beside what it taught."""
    first = DPStandardScaler(lower=-1, upper=1, **PRICE).fit(X)
    second = clone(first)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RepeatedFitWarning)
        with pytest.raises(RepeatedFitWarning):
            second.fit(X)
    assert second.privacy_ is not None
    assert second.mean_.shape == (2,)


def test_every_fit_is_whole() -> None:
    kinds = [CountsFits]
    for kind in kinds:
        kinds += kind.__subclasses__()
    ours = [kind for kind in kinds if kind.__module__.startswith("dpoptim.")]
    assert DPClassCounts in ours
    for kind in ours:
        for name in ("fit", "partial_fit"):
            if (found := getattr(kind, name, None)) is not None and not inspect.isabstract(kind):
                assert found.__wrapped__.__module__.startswith("dpoptim."), kind
