"""What a pipeline states covers every fit within it, wherever steps are held."""

import pickle
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import sklearn
from sklearn.base import BaseEstimator, TransformerMixin, clone
from sklearn.compose import ColumnTransformer, make_column_selector
from sklearn.decomposition import PCA
from sklearn.feature_selection import SelectFromModel
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    Normalizer,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
    StandardScaler,
    TargetEncoder,
)

import dpoptim
from dpoptim.accounting.guarantee import SEEDED
from dpoptim.estimators import DPLogisticRegression
from dpoptim.preprocessing import DPMinMaxScaler, DPOneHot, DPStandardScaler, PrivatePipeline
from dpoptim.preprocessing.steps_of_others import note_on, notes_on_others

X = np.random.default_rng(0).uniform(-1, 1, (400, 3))
Y = (X[:, 0] > 0).astype(int)


def model(**settings: Any) -> DPLogisticRegression:
    return DPLogisticRegression(classes=[0, 1], **settings)


def scaler() -> DPStandardScaler:
    return DPStandardScaler(-1, 1)


def pipeline(first: Any, **settings: Any) -> PrivatePipeline:
    steps = [("first", first), ("last", model())]
    return PrivatePipeline(steps, **{"epsilon": 2.0, "delta": 1e-5, **settings})


def test_no_fit_comes_from_a_cache(tmp_path: Path) -> None:
    """A second fit would learn by the first one's scaler, and state the price of its last step."""
    ledger = dpoptim.Ledger(tmp_path / "l.sqlite", neighboring="zero-out")
    cache = str(tmp_path / "cache")
    for first, name in (
        (scaler(), "memory"),
        (Pipeline([("scale", scaler())], memory=cache), "first__memory"),
    ):
        whole = pipeline(first, memory=cache if name == "memory" else None, ledger=ledger)
        with pytest.raises(ValueError, match=f"^{name}: .* Fix: {name}=None"):
            whole.fit(X, Y)
    assert not ledger.entries()
    pipeline(DPMinMaxScaler(-1, 1), memory=cache).fit(X, Y)  # reads no record


def test_no_entry_decides_whether_a_table_is_sparse() -> None:
    """ColumnTransformer counts entries beside 0, and keeps the answer: one record changed it."""
    towns = np.array([["a"]] * 90 + [["?"]] * 210)
    found = []
    for last in ("a", "?"):
        towns[89] = last
        columns = ColumnTransformer([("towns", DPOneHot([["a", "b"]], sparse_output=True), [0])])
        columns.set_params(sparse_threshold=0.15)
        whole = pipeline(columns).fit(towns, Y[: len(towns)])
        found.append(whole["first"].sparse_output_)
        assert columns.sparse_threshold == 0.15
    assert found == [True, True]
    dense = ColumnTransformer(columns.transformers, sparse_threshold=0)
    assert not pipeline(dense).fit(towns, Y[: len(towns)])["first"].sparse_output_


@pytest.mark.parametrize("backend", ["threading", "loky"])
def test_steps_are_fitted_where_the_ledger_is(backend: str) -> None:
    """Threads did not know that steps were only tried; processes had no ledger in memory."""
    columns = ColumnTransformer([("a", scaler(), [0]), ("b", scaler(), [1, 2])], n_jobs=2)
    ledger = dpoptim.Ledger(neighboring="zero-out")
    whole = pipeline(columns, ledger=ledger)
    with joblib.parallel_config(backend=backend):
        with pytest.raises(ValueError, match="data_norm must be a number"):
            clone(whole).set_params(last__data_norm="1").fit(X, Y)
        assert not ledger.entries()
        assert 1.9 < whole.fit(X, Y).privacy_.epsilon <= 2.0
    (charged,) = ledger.entries()
    assert len(charged.event.events) == 3
    assert whole[0].n_jobs == 2


def test_an_estimator_within_a_step_is_none_that_shares_the_budget() -> None:
    """It would be charged nowhere, and ``privacy_`` would say that it had learnt nothing."""
    with pytest.raises(ValueError, match="step 'first__estimator', a DPLogisticRegression, would"):
        pipeline(SelectFromModel(model())).fit(X, Y)
    chosen = model(epsilon=1.0).fit(X, Y)
    notes = pipeline(SelectFromModel(FrozenEstimator(chosen))).fit(X, Y).privacy_.notes
    frozen = "on trust: the frozen DPLogisticRegression was not fitted to these records, or its own"
    assert any(note.startswith(frozen) for note in notes)


def test_one_transformer_under_two_names_has_one_share() -> None:
    """The last of its shares was spent twice: 2.74 where 2 was asked for."""
    one = scaler()
    columns = ColumnTransformer([("a", one, [0]), ("b", one, [1, 2])])
    with pytest.raises(ValueError, match="the same for one transformer under two names"):
        pipeline(columns, shares={"first__a": 0.05, "first__b": 0.8}).fit(X, Y)
    two = ColumnTransformer([("a", one, [0]), ("b", clone(one), [1, 2])])
    for first, shares in ((columns, (0.4, 0.4)), (two, (0.05, 0.8))):
        both = dict(zip(("first__a", "first__b"), shares, strict=True))
        assert 1.9 < pipeline(first, shares=both).fit(X, Y).privacy_.epsilon <= 2.0


def columns_to_learn(ledger: Any = None) -> PrivatePipeline:
    steps = [("range", DPMinMaxScaler(-1, 1)), ("scale", scaler())]
    return PrivatePipeline(steps, epsilon=0.5, delta=1e-5, ledger=ledger)


@pytest.mark.filterwarnings("ignore::dpoptim.estimators.RepeatedFitWarning")
def test_a_pipeline_of_transformers_pays_for_what_it_gives() -> None:
    """``fit_transform`` took the steps' own settings: no budget, and no charge on its ledger."""
    ledger = dpoptim.Ledger(neighboring="zero-out")
    made = columns_to_learn(ledger)
    scaled = made.fit_transform(X)
    assert scaled.shape == X.shape
    assert 0.49 < made.privacy_.epsilon <= 0.5
    assert len(ledger.entries()) == 1
    whole = pipeline(scaler(), ledger=ledger).fit(X, Y)
    whole[:-1].fit_transform(X)
    assert len(ledger.entries()) == 3
    within = Pipeline([("columns", columns_to_learn(ledger)), ("last", model(ledger=ledger))])
    assert within.fit(X, Y)[0].privacy_.epsilon <= 0.5
    assert len(ledger.entries()) == 5


@pytest.mark.parametrize("epsilon", [0.6, 0.99, 1.0, 1.5])
def test_a_budget_for_some_of_the_steps_is_left_whole(epsilon: float) -> None:
    """The scaler was charged, and then the last step refused: it had been paid for in vain."""
    ledger = dpoptim.Ledger(neighboring="zero-out", epsilon=epsilon, delta=1e-5)
    whole = pipeline(scaler(), epsilon=1.0, ledger=ledger)
    if epsilon >= 1.0:
        whole.fit(X, Y)
    else:
        with pytest.raises(dpoptim.BudgetExceeded):
            whole.fit(X, Y)
    assert len(ledger.entries()) == (1 if epsilon >= 1.0 else 0)


@pytest.mark.parametrize("union", [False, True])
def test_an_inner_pipeline_has_what_the_outer_one_gives(union: bool) -> None:
    ledger = dpoptim.Ledger(neighboring="zero-out")
    inner: Any = columns_to_learn()
    whole = pipeline(FeatureUnion([("columns", inner)]) if union else inner, ledger=ledger)
    assert 1.9 < whole.fit(X, Y).privacy_.epsilon <= 2.0
    (charged,) = ledger.entries()
    assert len(charged.event.events) == 2
    assert inner.epsilon == 0.5
    free = PrivatePipeline([("scale", scaler()), ("range", DPMinMaxScaler(-1, 1))]).fit(X)
    assert 0 < free.privacy_.epsilon <= 1.0


def test_persons_reach_the_last_step_by_routes_too() -> None:
    owners = np.arange(len(X)) // 2
    with sklearn.config_context(enable_metadata_routing=True):
        last = model().set_fit_request(persons=True, sample_weight=True)
        whole = PrivatePipeline([("first", DPMinMaxScaler(-1, 1)), ("last", last)], delta=1e-5)
        whole.fit(X, Y, persons=owners, sample_weight=np.ones(len(X)))
    assert whole.privacy_.unit == "person"


class Centred:
    """A transformer of somebody's own, of no base."""

    def fit(self, x: Any, y: Any = None) -> "Centred":
        self.mean_ = x.mean(0)
        return self

    def transform(self, x: Any) -> Any:
        return x - self.mean_


def test_steps_that_learn_are_refused_wherever_they_are_held() -> None:
    """`TargetEncoder(smooth=0)` published labels under ``status == "proven"``."""
    ledger = dpoptim.Ledger(neighboring="zero-out")
    rest = ColumnTransformer([("a", scaler(), [0])], remainder=StandardScaler())
    union = FeatureUnion([("a", Pipeline([("deep", TargetEncoder())])), ("b", "passthrough")])
    inner = PrivatePipeline([("own", PCA()), ("range", DPMinMaxScaler(-1, 1))])
    for first, said in (
        (StandardScaler(), "step 'first', a StandardScaler, .* Fix: DPStandardScaler"),
        (rest, "step 'first__remainder', a StandardScaler, would learn from the private records"),
        (union, "step 'first__a__deep', a TargetEncoder, .* Fix: DPOneHot"),
        (inner, "step 'first__own', a PCA, .* Fix: fit it on public data, .*FrozenEstimator"),
        (OneHotEncoder(), "OneHotEncoder, .* with a list of categories and handle_unknown='ignore"),
        (SimpleImputer(strategy="constant"), "DPImputer.*, keep_empty_features=True .* is kept"),
        (Centred(), "a Centred, .* if its fit learns nothing, .* tags say requires_fit=False"),
    ):
        with pytest.raises(ValueError, match=said):
            pipeline(first, ledger=ledger).fit(X, Y)
    assert not ledger.entries()


class Doubled(TransformerMixin, BaseEstimator):
    """A transformer of somebody's own, which says that it learns nothing."""

    def fit(self, x: Any, y: Any = None) -> "Doubled":
        return self

    def transform(self, x: Any) -> Any:
        return 2 * x

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.requires_fit = False
        return tags


def test_what_is_on_trust_of_the_steps_of_others_is_said() -> None:
    frozen = FrozenEstimator(StandardScaler().fit(np.ones((3, 3))))
    for first, said in (
        (frozen, "the frozen StandardScaler was not fitted to these records"),
        (
            FunctionTransformer(lambda x: x - x.mean(0)),
            "FunctionTransformer treats each row",
        ),
        (
            ColumnTransformer([("some", scaler(), lambda x: list(range(x.shape[1])))]),
            "the function that chooses columns for first__some looks at no record",
        ),
        (Doubled(), "Doubled treats each row by itself, and needs no fit, as its tags say"),
    ):
        notes = pipeline(first).fit(X, Y).privacy_.notes
        assert any(note.startswith("on trust: ") and said in note for note in notes)
    for free in (FunctionTransformer(np.abs), FunctionTransformer(), Normalizer(), "passthrough"):
        assert "itself" not in str(pipeline(free).fit(X, Y).privacy_.notes)


KNOWN = [["a", "b"], ["0", "1"]]
WORDS = np.array([["a", "0"], ["b", "1"], ["a", "1"]], dtype=object)
OTHERS = np.array([["?", "9"], [None, "1"], ["a", "7"]], dtype=object)
UNKNOWN: Any = {"handle_unknown": "use_encoded_value", "unknown_value": -1}


@pytest.mark.parametrize(
    ("step", "tables"),
    [
        (OneHotEncoder(categories=KNOWN, handle_unknown="ignore"), (WORDS, OTHERS)),
        (OrdinalEncoder(categories=KNOWN, **UNKNOWN), (WORDS, OTHERS)),
        (PolynomialFeatures(2), (np.ones((3, 2)), np.full((3, 2), 7.0))),
        (
            SimpleImputer(strategy="constant", fill_value=0.0, keep_empty_features=True),
            (np.ones((3, 2)), np.full((3, 2), np.nan)),
        ),
    ],
)
def test_steps_let_go_by_their_settings_learn_nothing(step: Any, tables: Any) -> None:
    """Fitted to whatever records, they are the same."""
    assert not list(note_on("it", step))
    one, other = (pickle.dumps(clone(step).fit(table)) for table in tables)
    assert one == other


@pytest.mark.parametrize(
    "step",
    [
        OneHotEncoder(categories=KNOWN),
        OneHotEncoder(categories=KNOWN, handle_unknown="ignore", min_frequency=2),
        OrdinalEncoder(categories="auto", **UNKNOWN),
        OrdinalEncoder(categories=KNOWN),
        SimpleImputer(strategy="constant"),
        SimpleImputer(strategy="constant", keep_empty_features=True, add_indicator=True),
        SelectFromModel(model()),
    ],
)
def test_other_settings_of_them_are_refused(step: Any) -> None:
    """An unknown category is an error that a record alone brings about, or counts decide."""
    with pytest.raises(ValueError, match="would learn from the private records"):
        list(note_on("it", step))


class LearnsAsAFunction(FunctionTransformer):
    """Learns, though it is derived from what does not."""

    def fit(self, X: Any, y: Any = None) -> "LearnsAsAFunction":
        self.mean_ = np.asarray(X).mean(0)
        return self


class LearnsAsItTransforms:
    """Has no method that is named ``fit``."""

    def fit_transform(self, X: Any, y: Any = None) -> Any:
        self.mean_ = np.asarray(X).mean(0)
        return X

    def transform(self, X: Any) -> Any:
        return X


class LearnsAsAColumnTransformer(ColumnTransformer):
    def fit_transform(self, X: Any, y: Any = None, **params: Any) -> Any:
        self.mean_ = np.asarray(X).mean(0)
        return super().fit_transform(X, y, **params)


@pytest.mark.parametrize("step", [LearnsAsAFunction(), LearnsAsItTransforms()])
def test_what_learns_is_refused_or_named_whatever_it_is_derived_from(step: Any) -> None:
    try:
        notes = notes_on_others([("first", step)])
    except ValueError:
        return
    assert [note for note in notes if note.startswith("on trust: ")] != []


@pytest.mark.parametrize(
    "step",
    [
        LearnsAsAColumnTransformer([("all", "passthrough", [0, 1])]),
        FunctionTransformer(np.frompyfunc(abs, 1, 1)),
        ColumnTransformer([("all", "passthrough", make_column_selector(dtype_include="number"))]),
    ],
)
def test_what_may_look_at_records_is_refused_or_named(step: Any) -> None:
    test_what_learns_is_refused_or_named_whatever_it_is_derived_from(step)


def test_a_seeded_step_is_said_of_the_pipeline() -> None:
    scale = DPStandardScaler(lower=-1, upper=1, noise_seed=1)
    assert SEEDED in pipeline(scale).fit(X, Y).privacy_.notes
