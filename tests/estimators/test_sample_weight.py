"""Weights of rows: private, multiplied before clipping, and never read as a number of records."""

import math
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.ensemble import BaggingClassifier
from sklearn.model_selection import GridSearchCV, cross_validate

import dpoptim
from dpoptim import Ledger
from dpoptim.estimators import (
    DPLinearRegression,
    DPLogisticRegression,
    DPSGDClassifier,
    DPSGDRegressor,
)
from dpoptim.preprocessing import DPMinMaxScaler, PrivatePipeline
from estimators.test_bad_tables import said_of

pytestmark = pytest.mark.filterwarnings("ignore::dpoptim.estimators.RepeatedFitWarning")

ROWS = 673
RNG = np.random.default_rng(0)
X = RNG.uniform(-1, 1, (ROWS, 3))
Y = (X[:, 0] > 0).astype(int)
BUDGET: Any = {"epsilon": 3.0, "delta": 1e-4, "noise_seed": 0}
NETWORK: Any = {**BUDGET, "epochs": 2, "random_state": 0, "hidden_layer_sizes": (5,)}
MODELS: dict[str, Any] = {
    "linear classifier": DPLogisticRegression(**BUDGET, classes=[0, 1]),
    "linear regressor": DPLinearRegression(**BUDGET, target_bound=1.0, solver="momentum-gd"),
    "sums": DPLinearRegression(
        **BUDGET, target_bound=1.0, solver="sufficient-statistics", weight_bound=1.0
    ),
    "spider": DPLogisticRegression(**BUDGET, classes=[0, 1], solver="kl-spider"),
    "one pass": DPLogisticRegression(**BUDGET, classes=[0, 1], solver="accelerated-srgd"),
    "network classifier": DPSGDClassifier(**NETWORK, classes=[0, 1]),
    "network regressor": DPSGDRegressor(**NETWORK, target_bound=1.0),
}


def predictions(model: Any, x: np.ndarray = X) -> np.ndarray:
    found: np.ndarray = (
        model.predict_proba(x) if hasattr(model, "predict_proba") else model.predict(x)
    )
    return found


@pytest.mark.set_aside("network regressor")
@pytest.mark.parametrize("name", MODELS)
def test_weights_of_one_are_none_and_rows_of_weight_zero_are_not_there(name: str) -> None:
    model = MODELS[name]
    plain = clone(model).fit(X, Y)
    for ones in (np.ones(ROWS), [1] * ROWS, 1.0):
        np.testing.assert_array_equal(predictions(clone(model).fit(X, Y, ones)), predictions(plain))
    weights = np.where(np.arange(ROWS) % 2, 1.0, 0.0)
    absent, other = X.copy(), Y.copy()
    # what a row of weight 0 holds does not matter, beyond that it is there
    absent[weights == 0], other[weights == 0] = 0.3, 1
    found = [clone(model).fit(x, y, weights) for x, y in ((X, Y), (absent, other))]
    np.testing.assert_array_equal(*map(predictions, found))
    assert not np.array_equal(predictions(found[0]), predictions(plain))
    assert found[0].privacy_.epsilon == plain.privacy_.epsilon  # n is the number of rows


@pytest.mark.set_aside("network regressor")
@pytest.mark.parametrize("name", MODELS)
def test_weights_move_a_model_towards_the_heavy(name: str) -> None:
    """Of two labels at the same place, the one with weight is learnt."""
    x = np.ones((4_000, 1))
    y = np.arange(4_000) % 2
    model = clone(MODELS[name]).set_params(epsilon=20.0)
    means = []
    for heavy in (0, 1):
        found = clone(model).fit(x, y, np.where(y == heavy, 1.0, 0.05))
        means.append(predictions(found, x[:1]).ravel()[-1])
    assert means[1] - means[0] > 0.3, means


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MODELS)
def test_weights_with_persons(name: str) -> None:
    owners = np.arange(ROWS) // 3
    model = clone(MODELS[name]).set_params(rows_per_person=2)
    plain = clone(model).fit(X, Y, persons=owners)
    ones = clone(model).fit(X, Y, np.ones(ROWS), persons=owners)
    np.testing.assert_array_equal(predictions(ones), predictions(plain))
    weighted = clone(model).fit(X, Y, Y * 1.0, persons=owners)
    assert not np.array_equal(predictions(weighted), predictions(plain))
    assert weighted.privacy_.unit == "person"


BAD: dict[str, tuple[Any, str]] = {
    "negative": (np.where(np.arange(ROWS) == 40, -0.8125, 1.0), "finite numbers of at least 0"),
    "nan": (np.where(np.arange(ROWS) == 40, np.nan, 1.0), "finite numbers of at least 0"),
    "inf": (np.where(np.arange(ROWS) == 40, np.inf, 1.0), "finite numbers of at least 0"),
    "too few": (np.ones(ROWS - 1), "as many numbers as X has rows"),
    "two axes": (np.ones((ROWS, 2)), "Sample weights must be 1D array or scalar"),
    "text": (["patient 7"] * ROWS, "sample_weight holds what is not a number"),
    "masked": (np.ma.masked_array(np.ones(ROWS), mask=np.arange(ROWS) == 3), "finite numbers"),
    "complex": (np.full(ROWS, 1 + 2j), "sample_weight holds complex numbers. Fix: real"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", MODELS)
def test_bad_weights_are_refused_without_their_row(name: str, bad: str) -> None:
    weights, match = BAD[bad]
    model = MODELS[name]
    first: dict[str, Any] = {"classes": [0, 1]} if hasattr(model, "classes") else {}
    said_of(lambda ledger: clone(model).set_params(ledger=ledger).fit(X, Y, weights), match)
    said_of(
        lambda ledger: (
            clone(model).set_params(ledger=ledger).partial_fit(X, Y, sample_weight=weights, **first)
        ),
        match,
    )


def test_sums_need_a_bound_on_weights() -> None:
    unbounded = clone(MODELS["sums"]).set_params(weight_bound=None)
    said_of(
        lambda ledger: clone(unbounded).set_params(ledger=ledger).fit(X, Y, np.ones(ROWS)),
        "Fix: weight_bound=",
    )
    with pytest.raises(ValueError, match="weight_bound must be"):
        clone(unbounded).set_params(weight_bound=-1.0).fit(X, Y, np.ones(ROWS))
    # of plenty of records "auto" takes sums where weights have a bound, and steps where not
    x, y = np.tile(X, (60, 1)), np.tile(X[:, 0], 60)
    fits = {
        (solver, bound): DPLinearRegression(
            # with a clip norm, in units of the whole range, "auto" narrows no range
            **BUDGET,
            target_bound=1.0,
            solver=solver,
            weight_bound=bound,
            clip_norm=0.1,
        )
        .fit(x, y, np.ones(len(x)))
        .coef_.tobytes()
        for solver in ("auto", "sufficient-statistics", "momentum-gd")
        for bound in (None, 1.0)
        if (solver, bound) != ("sufficient-statistics", None)
    }
    assert fits["auto", None] == fits["momentum-gd", None]
    assert fits["auto", 1.0] == fits["sufficient-statistics", 1.0] != fits["momentum-gd", 1.0]


def test_sums_by_weights_are_weighted_least_squares() -> None:
    x, noise = RNG.uniform(-1, 1, (20_000, 3)), RNG.normal(0, 0.1, 20_000)
    heavy = x[:, 2] > 0
    y = np.clip(np.where(heavy, 0.5 * x[:, 0], -0.5 * x[:, 0]) + noise, -1, 1)
    weights = np.where(heavy, 3.0, 1.0)
    model = DPLinearRegression(
        50.0, 1e-5, target_bound=1.0, solver="sufficient-statistics", l2=0.3, noise_seed=0
    )
    wanted = (x.T * weights) @ x / len(x) + 0.3 * np.eye(3)
    wanted = np.linalg.solve(wanted, (x.T * weights) @ y / len(x))
    for bound in (3.0, 10.0):
        found = clone(model).set_params(weight_bound=bound, fit_intercept=False)
        np.testing.assert_allclose(found.fit(x, y, weights).coef_, wanted, atol=0.02)
    cut = clone(model).set_params(weight_bound=1.0).fit(x, y, weights)
    np.testing.assert_array_equal(cut.coef_, clone(model).fit(x, y).coef_)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "sums"])
@pytest.mark.parametrize("huge", [1e20, 1e308, np.finfo(np.float64).tiny])
@pytest.mark.thinned(2)
def test_no_weight_is_too_large_or_too_small(name: str, huge: float) -> None:
    """A record of a huge weight is clipped as any other: it counts, and others do, too."""
    weights = np.where(np.arange(ROWS) == 40, huge, 1.0)
    model = clone(MODELS[name]).fit(X, Y, weights)
    assert np.isfinite(predictions(model)).all()
    ones = np.where(np.arange(ROWS) == 40, 1.0 if huge < 1 else 1e9, 1.0)
    with_one = predictions(clone(MODELS[name]).fit(X, Y, ones))
    assert np.abs(predictions(model) - with_one).max() < 0.1


def test_all_weights_zero_are_noise_and_no_error() -> None:
    """An error would tell that not one record has weight."""
    model = clone(MODELS["linear classifier"]).fit(X, Y, np.zeros(ROWS))
    assert model.privacy_.epsilon == pytest.approx(3.0, rel=1e-3)


def test_scores_take_weights() -> None:
    model = clone(MODELS["linear classifier"]).fit(X, Y)
    right = model.predict(X) == Y
    weights = RNG.random(ROWS)
    assert model.score(X, Y, weights) == pytest.approx(np.average(right, weights=weights))


def test_searches_and_folds_pass_weights_on() -> None:
    weights = np.where(Y, 1.0, 0.05)
    model = clone(MODELS["linear classifier"])
    search = GridSearchCV(model, {"l2": [0.0, 0.1]}, cv=2).fit(X, Y, sample_weight=weights)
    told = clone(model).set_params(**search.best_params_).fit(X, Y, weights)
    np.testing.assert_array_equal(search.best_estimator_.coef_, told.coef_)
    folds = cross_validate(
        model, X, Y, params={"sample_weight": weights}, cv=2, return_estimator=True
    )
    assert all(np.isfinite(each.coef_).all() for each in folds["estimator"])
    pipe = PrivatePipeline([("s", DPMinMaxScaler(-1, 1)), ("m", clone(model))], epsilon=3.0)
    found = clone(pipe).fit(X, Y, m__sample_weight=weights)
    assert not np.array_equal(found[-1].coef_, clone(pipe).fit(X, Y)[-1].coef_)


def test_bagging_pays_for_each_of_its_fits() -> None:
    """It hands how often a row was drawn to ``fit`` as a weight, on all rows, and each fit pays."""
    seen: list[tuple[int, Any]] = []
    honest = DPLogisticRegression.fit

    def spy(self: Any, x: Any, y: Any, sample_weight: Any = None, **more: Any) -> Any:
        seen.append((len(x), sample_weight))
        return honest(self, x, y, sample_weight, **more)

    with Ledger(neighboring="zero-out") as ledger, pytest.MonkeyPatch.context() as patch:
        patch.setattr(DPLogisticRegression, "fit", spy)
        one = DPLogisticRegression(1.0, 1e-5, classes=[0, 1], ledger=ledger, noise_seed=0)
        bag = BaggingClassifier(one, n_estimators=4, random_state=0).fit(X, Y)
        assert len(ledger.entries()) == 4
        together = ledger.spent(1e-5).epsilon
    assert {rows for rows, _ in seen} == {ROWS}
    assert all(weights is not None and weights.max() > 1 for _, weights in seen)
    assert bag.estimators_[0].privacy_.epsilon <= 1.0 < 2.0 < together
    assert "all 4 runs on its ledger together" in str(bag.estimators_[-1].privacy_)


def test_bagging_ends_where_the_budget_does() -> None:
    ledger = Ledger(neighboring="zero-out", epsilon=1.5, delta=1e-5)
    one = DPLogisticRegression(1.0, 1e-5, classes=[0, 1], ledger=ledger)
    with pytest.raises(dpoptim.BudgetExceeded):
        BaggingClassifier(one, n_estimators=4, random_state=0).fit(X, Y)
    assert len(ledger.entries()) == 1
    assert math.isfinite(ledger.spent(1e-5).epsilon)
