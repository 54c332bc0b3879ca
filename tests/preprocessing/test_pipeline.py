"""One budget for a pipeline: it adds up, whatever the steps say of their own, and is worth it on
raw tables.
"""

import pickle
from typing import Any

import numpy as np
import pytest
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

import dpoptim
from dpoptim.accounting import compute_epsilon
from dpoptim.estimators import DPLinearRegression, DPLogisticRegression, DPSGDClassifier
from dpoptim.preprocessing import (
    DPImputer,
    DPMinMaxScaler,
    DPOneHot,
    DPStandardScaler,
    PrivatePipeline,
)


def people(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Age, income (skewed), rooms, city; gaps; and whether they bought."""
    rng = np.random.default_rng(seed)
    age, income, rooms = (
        rng.normal(45, 15, n),
        rng.lognormal(10.5, 0.6, n),
        rng.integers(1, 9, n).astype(float),
    )
    city = rng.choice(["ulm", "jena", "kiel"], n)
    score = (
        0.06 * (age - 45)
        + 1.2 * (np.log(income) - 10.5)
        + 0.25 * (rooms - 4)
        + 1.5 * (city == "kiel")
    )
    y = (score + rng.logistic(size=n) * 0.7 > 0.4).astype(int)
    x = np.empty((n, 4), dtype=object)
    for i, column in enumerate((age, income, rooms, city)):
        x[:, i] = column
    x[rng.random(n) < 0.08, 0] = np.nan
    return x, y


def pipeline(last: Any, **settings: Any) -> PrivatePipeline:
    scaler = DPStandardScaler([0, 0, 0], [110, 300_000, 12], missing="mean", noise_seed=5)
    columns = ColumnTransformer(
        [("numbers", scaler, [0, 1, 2]), ("city", DPOneHot([["jena", "kiel", "ulm"]]), [3])]
    )
    return PrivatePipeline(
        [("columns", columns), ("last", last)], **{"epsilon": 1.0, "delta": 1e-6, **settings}
    )


def test_raw_columns_within_two_points_of_the_pipeline_without_privacy() -> None:
    x, y = people(20_000)
    x_test, y_test = people(5_000, seed=1)
    model = pipeline(DPLogisticRegression(data_norm=2.5, classes=[0, 1], noise_seed=0)).fit(x, y)
    numbers, city = (
        [np.nan_to_num(t[:, :3].astype(float), nan=45.0) for t in (x, x_test)],
        [t[:, 3:] for t in (x, x_test)],
    )
    encode = DPOneHot([["jena", "kiel", "ulm"]]).fit(city[0])
    plain = make_pipeline(StandardScaler(), LogisticRegression()).fit(
        np.hstack([numbers[0], encode.transform(city[0])]), y
    )
    without = plain.score(np.hstack([numbers[1], encode.transform(city[1])]), y_test)
    assert model.score(x_test, y_test) > without - 0.02
    assert 0.95 < model.privacy_.epsilon <= 1.0
    assert model.steps[-1][1].privacy_ is model.privacy_
    assert model.steps[-1][1].epsilon == 1.0  # the steps' own settings are as they were
    assert 0 < model.shares_["columns__numbers"] < 0.3


@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
def test_the_parts_add_up_to_the_whole(relation: str) -> None:
    x, y = people(3_000)
    with dpoptim.Ledger(neighboring=relation) as ledger:
        last = DPLogisticRegression(data_norm=2.5, classes=[0, 1], neighboring=relation)
        model = pipeline(last, ledger=ledger, epsilon=2.0)
        model.set_params(columns__numbers__neighboring=relation).fit(x, y)
        (charged,) = ledger.entries()
    assert len(charged.event.events) == 2
    whole = compute_epsilon(charged.event, 1e-6, relation).epsilon
    assert whole == pytest.approx(model.privacy_.epsilon)
    assert 1.99 < whole <= 2.0


def test_networks_share_the_budget_by_composition() -> None:
    x, y = people(3_000)
    model = pipeline(
        DPSGDClassifier(data_norm=2.5, classes=[0, 1], epochs=5, random_state=0), epsilon=2.0
    ).fit(x, y)
    assert 1.9 < model.privacy_.epsilon <= 2.0
    assert model.privacy_.status == "proven"
    with dpoptim.Ledger(neighboring="add-or-remove-one") as ledger:
        last = DPSGDClassifier(classes=[0, 1], epochs=2, neighboring="add-or-remove-one", n=3000)
        model = (
            pipeline(last, ledger=ledger)
            .set_params(columns__numbers__neighboring="add-or-remove-one")
            .fit(x, y)
        )
        (charged,) = ledger.entries()
    assert len(charged.event.events) == 2
    assert model.privacy_.epsilon <= 1.0


def test_a_budget_of_the_same_epsilon_admits_a_network() -> None:
    """Charged step by step it did not: sampled steps cost a filter more than their epsilon."""
    x, y = people(2_000)
    last = DPSGDClassifier(data_norm=2.5, classes=[0, 1], epochs=5, random_state=0)
    with dpoptim.Ledger(neighboring="zero-out", epsilon=2.0, delta=1e-6) as ledger:
        model = pipeline(last, epsilon=2.0, ledger=ledger).fit(x, y)
        assert 1.9 < model.privacy_.epsilon <= 2.0
        with pytest.raises(dpoptim.BudgetExceeded):
            pipeline(last, epsilon=0.5, ledger=ledger).fit(x, y)


def gap_in(x: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(x))[:, None] == 5, np.nan, x)


@pytest.mark.parametrize(
    ("step", "last", "change", "said"),
    [
        (DPStandardScaler(-1, 1), DPLogisticRegression(classes=[0, 1]), gap_in, "contains NaN"),
        (DPStandardScaler(-1, 1), DPSGDClassifier(classes=[0, 1]), gap_in, "contains NaN"),
        (
            DPMinMaxScaler(-1, 1, quantile=0.1),
            DPLogisticRegression(classes=[0, 1], solver="best"),
            np.asarray,
            "solver must be one of",
        ),
        (
            DPOneHot(buckets=4),
            DPLogisticRegression(classes=[0, 2]),
            np.sign,
            "none of the declared classes",
        ),
    ],
)
def test_what_the_last_step_refuses_costs_nothing(
    step: Any, last: Any, change: Any, said: str
) -> None:
    """The steps before had been charged by then."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (400, 2))
    y = (x[:, 0] > 0).astype(int)
    with dpoptim.Ledger(neighboring="zero-out", epsilon=4.0, delta=1e-4) as ledger:
        settings: Any = {"epsilon": 2.0, "delta": 1e-4, "ledger": ledger}
        pipeline = PrivatePipeline([("step", step), ("last", last)], **settings)
        with pytest.raises(ValueError, match=said):
            pipeline.fit(change(x), y)
        assert ledger.entries() == []
        assert step.epsilon is None
        right = last.set_params(classes=[0, 1])
        right = right.set_params(solver="auto") if "solver" in right.get_params() else right
        pipeline.fit(np.sign(x) if isinstance(step, DPOneHot) else x, y)
        assert pipeline.privacy_.epsilon <= 2.0
        assert len(ledger.entries()) == 1


@pytest.mark.filterwarnings("ignore::dpoptim.estimators.RepeatedFitWarning")
def test_a_budget_bounds_repeated_fits() -> None:
    x, y = people(1_000)
    with dpoptim.Ledger(neighboring="zero-out", epsilon=1.5, delta=1e-6) as ledger:
        model = pipeline(DPLogisticRegression(data_norm=2.5, classes=[0, 1]), ledger=ledger).fit(
            x, y
        )
        with pytest.raises(dpoptim.BudgetExceeded):
            model.fit(x, y)
    alone = pipeline(DPLogisticRegression(data_norm=2.5, classes=[0, 1], noise_seed=0))
    assert cross_val_score(alone, x, y, cv=3).mean() > 0.6
    assert "this fit alone" in str(alone.fit(x, y).privacy_)


def test_regression_with_shares_of_ones_own() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(50, 10, (5_000, 2))
    y = x[:, 0] - x[:, 1] + rng.normal(size=5_000)
    steps = [
        ("fill", DPImputer(0, 100)),
        ("scale", DPStandardScaler(0, 100)),
        ("last", DPLinearRegression(target_bound=60)),
    ]
    model = PrivatePipeline(steps, epsilon=1.0, delta=1e-6, shares={"fill": 0.1, "scale": 0.2}).fit(
        x, y
    )
    assert model.score(x, y) > 0.9
    assert model.shares_ == {"fill": 0.1, "scale": 0.2}
    for shares, said in (
        ({"fill": 0.1}, "must name the charged steps"),
        ({"fill": 0.5, "scale": 0.5}, "less than 1 together"),
    ):
        with pytest.raises(ValueError, match=said):
            model.set_params(shares=shares).fit(x, y)


def test_what_cannot_be_shared_out_is_refused() -> None:
    x, y = people(200)
    with pytest.raises(ValueError, match="the last step must be an estimator of dpoptim"):
        pipeline(LogisticRegression()).fit(x, y)
    with pytest.raises(ValueError, match="sets, got 'passthrough'"):
        pipeline("passthrough").fit(x, y)
    with pytest.raises(ValueError, match="must have neighboring='replace-one'"):
        pipeline(DPLogisticRegression(neighboring="replace-one")).set_params(
            columns__numbers__neighboring="zero-out"
        ).fit(x, y)
    free = PrivatePipeline(
        [("scale", DPMinMaxScaler(0, 10)), ("last", DPLogisticRegression(classes=[0, 1]))],
        delta=1e-5,
    )
    assert free.fit(np.ones((50, 2)), y[:50]).shares_ == {}
    assert 0.99 < free.privacy_.epsilon <= 1.0


def test_free_steps_transform_once() -> None:
    """They were tried on copies first, though a refusal of the last step would cost nothing."""
    calls = []

    def counted(x: Any) -> Any:
        calls.append(len(x))
        return x / 10

    y = np.arange(200) % 2
    steps = [
        ("free", FunctionTransformer(counted)),
        ("scale", DPMinMaxScaler(0, 10)),
        ("last", DPLogisticRegression(classes=[0, 1])),
    ]
    ledger = dpoptim.Ledger(epsilon=1.0, delta=1e-5, neighboring="zero-out")
    free = PrivatePipeline(steps, epsilon=1.0, delta=1e-5, ledger=ledger).fit(np.ones((200, 2)), y)
    assert calls == [200]
    with pytest.raises(dpoptim.BudgetExceeded):
        free.fit(np.ones((200, 2)), y)
    assert len(ledger.entries()) == 1


def test_a_fitted_pipeline_is_copied_without_a_ledger_of_the_fit() -> None:
    """Clones that a `ColumnTransformer` has fitted keep no ledger that cannot be pickled."""
    x, y = people(300)
    fitted = pipeline(DPLogisticRegression(classes=[0, 1])).fit(x, y)
    again = pickle.loads(pickle.dumps(fitted))
    assert (again.predict(x) == fitted.predict(x)).all()
    with dpoptim.Ledger(neighboring="zero-out") as ledger:
        kept = pipeline(DPLogisticRegression(classes=[0, 1]), ledger=ledger).fit(x, y)
        assert kept.privacy_.epsilon <= 1.0


def test_defaults_on_raw_units() -> None:
    """Breast cancer in its raw units: 82.8 % with unit-norm scaling alone, 95.9 % where columns
    are standardised.
    """
    x, y = load_breast_cancer(return_X_y=True)
    upper = 10.0 ** np.ceil(np.log10(x.max(0)))
    scores = []
    for seed in range(3):
        scaler = DPStandardScaler(0.0, upper, noise_seed=seed)
        last = DPLogisticRegression(data_norm=5.5, classes=[0, 1], noise_seed=seed)
        model = PrivatePipeline([("scale", scaler), ("last", last)], epsilon=4.0, delta=1e-4)
        scores.append(model.fit(x[:450], y[:450]).score(x[450:], y[450:]))
    assert np.mean(scores) > 0.88


@pytest.mark.parametrize("kind", [DPLogisticRegression, DPSGDClassifier])
def test_persons_are_protected_by_the_whole_or_refused_before_anything_is_spent(kind: Any) -> None:
    """A step that counts rows may not stand before one that counts persons: a person with many
    rows would move it by more than it pays for.
    """
    rng = np.random.default_rng(0)
    x, owners = rng.uniform(0, 100, (600, 2)), np.arange(600) % 200
    y = (x[:, 0] > 50).astype(int)
    bounds: Any = {"lower": 0, "upper": 100}
    model = kind(classes=[0, 1], noise_seed=1, **({"epochs": 1} if kind is DPSGDClassifier else {}))
    with dpoptim.Ledger(neighboring="zero-out") as ledger:
        common: Any = {"epsilon": 4.0, "delta": 1e-4, "ledger": ledger}
        rows = PrivatePipeline([("s", DPStandardScaler(**bounds)), ("m", model)], **common)
        for given in ({"persons": owners}, {"m__persons": owners}):
            with pytest.raises(
                ValueError, match="step 's' learns from rows .* Fix: a step that learns nothing"
            ):
                rows.fit(x, y, **given)
        assert ledger.entries() == []
        free = PrivatePipeline([("s", DPMinMaxScaler(**bounds)), ("m", model)], **common)
        for given in ({"persons": owners}, {"m__persons": owners}):
            assert free.fit(x, y, **given).privacy_.unit == "person"
        spent = len(ledger.entries())
        with pytest.raises(dpoptim.errors.LedgerError, match="do not add up"):
            free.fit(x, y)
        assert len(ledger.entries()) == spent
    assert free.set_params(ledger=None).fit(x, y).privacy_.unit == "record"
    assert free.privacy_.epsilon <= 4.0


def test_each_step_has_a_tenth_of_any_budget() -> None:
    """A precision of a hundredth of the range was all that a scaler got, however large it was."""
    x = 50 + 0.5 * np.random.default_rng(0).normal(size=(2_000, 1))
    steps = [
        ("scale", DPStandardScaler(0, 100, noise_seed=0)),
        ("last", DPLogisticRegression(classes=[False, True], noise_seed=0)),
    ]
    whole = PrivatePipeline(steps, epsilon=100.0, delta=1e-5).fit(x, x[:, 0] > 50)
    assert whole.shares_ == {"scale": 0.1}
    assert 0.3 < whole["scale"].scale_[0] < 0.8


def test_a_column_of_dates_that_no_step_takes_is_left_out() -> None:
    """As scikit-learn does; one that a step takes is named before anything is spent."""
    pandas = pytest.importorskip("pandas")
    x, y = people(400)
    frame = pandas.DataFrame(x[:, :3].astype(float), columns=["age", "income", "rooms"])
    without = frame.assign(city=x[:, 3])
    dated = without.assign(adm=pandas.Timestamp("2020-01-01") + pandas.to_timedelta(frame["rooms"]))

    def made(named: list[str], ledger: Any = None) -> PrivatePipeline:
        scaler = DPStandardScaler(0, 300_000, missing="mean", noise_seed=5)
        columns = ColumnTransformer([("numbers", scaler, named)])
        last = DPLogisticRegression(classes=[0, 1], noise_seed=0)
        return PrivatePipeline([("columns", columns), ("last", last)], delta=1e-6, ledger=ledger)

    one, other = (made(["age", "rooms"]).fit(each, y) for each in (without, dated))
    assert np.array_equal(one.predict_proba(without), other.predict_proba(dated))
    with dpoptim.Ledger(neighboring="zero-out") as ledger:
        with pytest.raises(TypeError, match=r"dates or times, in column 'adm'\. Fix"):
            made(["age", "adm"], ledger).fit(dated, y)
        assert not ledger.entries()
