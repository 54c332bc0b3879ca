"""Sparse tables: what is stored, and how, changes nothing; none is made dense as a whole."""

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import sparse
from sklearn.base import clone
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.pipeline import make_pipeline

from dpoptim import Ledger
from dpoptim.data import sparse_rows
from dpoptim.data.sparse_rows import SparseRows, canonical, clip_entries
from dpoptim.estimators import (
    DPLinearRegression,
    DPLogisticRegression,
    DPSGDClassifier,
    DPSGDRegressor,
)
from dpoptim.estimators.solving import SOLVERS
from dpoptim.estimators.table import clip_rows
from dpoptim.preprocessing import DPImputer, DPMinMaxScaler, DPStandardScaler, PrivatePipeline
from dpoptim.preprocessing.private_step import BoundedColumns
from dpoptim.tuning import DPSearchCV
from estimators.test_bad_tables import FITS, OF_TABLES, said_of

pytestmark = pytest.mark.filterwarnings("ignore::dpoptim.estimators.RepeatedFitWarning")

ROWS, FEATURES = 240, 6
BUDGET: Any = {"epsilon": 3.0, "delta": 1e-4, "noise_seed": 0}
NETWORK: Any = {**BUDGET, "epochs": 2, "random_state": 0, "hidden_layer_sizes": (5,)}
FORMATS = ["csr", "csc", "coo", "lil", "dok", "bsr"]


def dense(seed: int = 0, rows: int = ROWS, features: int = FEATURES) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, features)) * (rng.random((rows, features)) < 0.3)
    x[3] = 0.0  # a row without entries
    return x


X = dense()
LABELS, TARGETS = (X[:, 0] > 0).astype(int), np.clip(X[:, 0] + X[:, 1], -2, 2)
WEIGHTS, OWNERS = np.linspace(0, 3, ROWS), np.arange(ROWS) // 3


def scrambled(x: np.ndarray, seed: int = 1, kind: str = "coo") -> Any:
    """A table that stores entries in pieces that add up exactly, zeros, and all in any order."""
    rng = np.random.default_rng(seed)
    row, column = np.nonzero(x)
    values = x[row, column]
    halves = values / 2 if values.dtype.kind == "f" else np.zeros_like(values)
    zeros = rng.integers(0, x.shape[0], 9), rng.integers(0, x.shape[1], 9)
    order = rng.permutation(2 * len(row) + 9)
    places = tuple(
        np.concatenate([each, each, zero])[order]
        for each, zero in zip((row, column), zeros, strict=True)
    )
    data = np.concatenate([halves, values - halves, np.zeros(9, x.dtype)])[order]
    if kind == "coo":
        return sparse.coo_array((data, places), shape=x.shape)
    by_row = np.argsort(places[0], kind="stable")  # CSR with repeated, unsorted indices
    ends = np.concatenate([[0], np.cumsum(np.bincount(places[0], minlength=x.shape[0]))])
    return sparse.csr_matrix((data[by_row], places[1][by_row], ends), shape=x.shape)


def learnt(model: Any) -> list[Any]:
    """Everything that a fit leaves, as bytes where it is numbers; of its guarantee the price."""
    if hasattr(model, "network_"):
        return [*(p.detach().numpy().tobytes() for p in model.network_.parameters())]
    shown = {name: each for name, each in vars(model).items() if name.endswith("_")}
    shown["privacy_"] = shown["privacy_"] and shown["privacy_"].epsilon
    return [
        each.tobytes() if isinstance(each, np.ndarray) else repr(each) for each in shown.values()
    ]


MODELS: dict[str, tuple[Any, np.ndarray]] = {
    **{
        solver: (DPLogisticRegression(**BUDGET, classes=[0, 1], solver=solver), LABELS)
        for solver in SOLVERS
        if solver not in ("auto", "sufficient-statistics")
    },
    "sums": (
        DPLinearRegression(
            **BUDGET, target_bound=2.0, solver="sufficient-statistics", weight_bound=2.0
        ),
        TARGETS,
    ),
    "huber": (DPLinearRegression(**BUDGET, target_bound=2.0, loss="huber"), TARGETS),
    **{
        method: (DPSGDClassifier(**NETWORK, classes=[0, 1], method=method), LABELS)
        for method in ("dp-sgd", "dp-ftrl", "dice-sgd", "value-sgd")
    },
    "network of numbers": (DPSGDRegressor(**NETWORK, target_bound=2.0), TARGETS),
}

# sums are of at most 2,000 columns
WIDE_MODELS = [name for name in MODELS if hasattr(MODELS[name][0], "solver") and name != "sums"]


@pytest.mark.set_aside("proximal-point", "kl-spider", "momentum-gd")
@pytest.mark.parametrize("name", MODELS)
def test_models_are_the_dense_tables_bit_for_bit(name: str) -> None:
    model, y = MODELS[name]
    told = clone(model).fit(X, y, WEIGHTS)
    for table in (scrambled(X), scrambled(X, kind="csr"), sparse.csc_matrix(X)):
        found = clone(model).fit(table, y, WEIGHTS)
        assert learnt(found) == learnt(told)
        np.testing.assert_array_equal(found.predict(table), told.predict(X))


@pytest.mark.set_aside("one-pass-sgd")
@pytest.mark.parametrize("name", ["momentum-gd", "sums", "one-pass-sgd", "dp-sgd"])
def test_persons_and_chunks_of_sparse_tables(name: str) -> None:
    model, y = MODELS[name]
    table = sparse.csr_array(scrambled(X))
    people = [clone(model).fit(x, y, WEIGHTS, persons=OWNERS) for x in (X, table)]
    assert learnt(people[0]) == learnt(people[1])
    streams = [clone(model), clone(model)]
    classes = {"classes": [0, 1]} if y is LABELS else {}
    for part in (slice(0, 120), slice(120, None)):
        for stream, x in zip(streams, (X, table), strict=True):
            stream.partial_fit(x[part], y[part], **classes)
    assert learnt(streams[0]) == learnt(streams[1])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.int64, bool, np.float64])
@pytest.mark.thinned(3)
def test_formats_and_types(format: str, dtype: Any) -> None:
    x = X.astype(dtype)
    models = [
        DPLogisticRegression(**BUDGET, classes=[0, 1]).fit(table, LABELS)
        for table in (x, sparse.coo_array(x).asformat(format))
    ]
    assert learnt(models[0]) == learnt(models[1])


numbers = st.one_of(
    st.just(0.0), st.floats(width=64, allow_nan=True, allow_infinity=True), st.floats(-2, 2)
)


@settings(max_examples=150)
@given(
    x=arrays.arrays(np.float64, arrays.array_shapes(min_dims=2, max_dims=2), elements=numbers),
    seed=st.integers(0, 100),
)
def test_any_table_is_read_as_toarray_has_it(x: np.ndarray, seed: int) -> None:
    """Entries three times, out of order, whose sum depends on the order, NaN and infinite ones."""
    rng = np.random.default_rng(seed)
    row, column = np.divmod(rng.permutation(np.arange(3 * x.size) % x.size), x.shape[1])
    with np.errstate(all="ignore"):
        pieces = x[row, column] * rng.choice([0.0, 0.1, 1.0, -0.7], len(row))
        for table in (
            sparse.coo_array((pieces, (row, column)), shape=x.shape),
            sparse.coo_matrix(x),
        ):
            told = table.toarray()
            rows = SparseRows(canonical(table))
            assert rows[:].tobytes() == (told + 0.0).tobytes()  # -0 is 0 where nothing is stored
            assert not (rows.table.data == 0).any()
            assert rows.table.has_sorted_indices
            for entries, column in zip(rows.entries_of_columns(), told.T, strict=True):
                np.testing.assert_array_equal(entries, column[column != 0])
            clipped, known = clip_entries(rows.table, 2.0).toarray(), clip_rows(told, 2.0)
            np.testing.assert_allclose(clipped, known, rtol=1e-12, atol=1e-300)


@pytest.fixture
def _as_if_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_rows, "WIDE", FEATURES - 1)


@pytest.mark.set_aside("proximal-point", "noisy-gd")
@pytest.mark.usefixtures("_as_if_wide")
@pytest.mark.parametrize("name", WIDE_MODELS)
def test_wide_tables_by_their_entries(name: str) -> None:
    """However they store them bit for bit alike, and as the dense table but for rounding."""
    model, y = MODELS[name]
    found = [
        clone(model).fit(table, y, WEIGHTS)
        for table in (sparse.csr_array(X), scrambled(X), scrambled(X, 2, "csr"))
    ]
    assert learnt(found[0]) == learnt(found[1]) == learnt(found[2])
    told = clone(model).fit(X, y, WEIGHTS)
    np.testing.assert_allclose(found[0].coef_, told.coef_, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(
        found[0].predict(scrambled(X)), told.predict(X), rtol=1e-6, atol=1e-8
    )


@pytest.mark.usefixtures("_as_if_wide")
def test_several_classes_of_a_wide_table() -> None:
    y = np.arange(ROWS) % 3
    model = DPLogisticRegression(**BUDGET, classes=[0, 1, 2], class_weight={1: 4.0}, l2=0.1)
    told, found = clone(model).fit(X, y), clone(model).fit(scrambled(X), y)
    # dense rows are kept in float32, entries in float64
    np.testing.assert_allclose(found.coef_, told.coef_, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.intercept_, told.intercept_, rtol=1e-6)


@contextmanager
def limited_to(numbers: int) -> Iterator[None]:
    """What numpy holds meanwhile."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * numbers, peak / 8


@pytest.mark.parametrize(
    "fit",
    [
        lambda x, y: DPLogisticRegression(**BUDGET, classes=[0, 1], steps=2).fit(x, y).predict(x),
        lambda x, y: DPMinMaxScaler(-1, 1).fit_transform(x),
        lambda x, y: DPImputer(-1, 1, **BUDGET).fit_transform(x),
    ],
    ids=["linear", "scaler", "imputer"],
)
def test_no_table_is_dense_as_a_whole(fit: Callable[[Any, Any], Any]) -> None:
    """2,500 rows of 65,536 columns, of which a dense table would hold 164 million numbers."""
    x = sparse.random_array((2_500, 1 << 16), density=1e-4, format="csr", rng=0)
    fit(x[:10], np.arange(10) % 2)  # what it loads is loaded
    with limited_to(100_000_000):
        fit(x, np.arange(2_500) % 2)


@pytest.mark.parametrize(
    "step", [DPStandardScaler(-1, 3, with_mean=False, **BUDGET), DPImputer(-1, 3, **BUDGET)]
)
def test_steps_learn_from_the_entries_alone(step: Any) -> None:
    """Of 2,000 x 65,536 values, 131 million, those that are stored; in the same way."""
    x = sparse.random_array((2_000, 1 << 16), density=1e-4, format="csr", rng=0)
    looked_at, honest = [0], BoundedColumns._in_range

    def counted(self: Any, values: Any, *ends: Any) -> Any:
        looked_at[0] += values.size
        return honest(self, values, *ends)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundedColumns, "_in_range", counted)
        found = clone(step).fit(x)
    assert looked_at[0] == x.nnz + x.shape[1]
    few = slice(40_000, 40_300)
    told = clone(step).set_params(epsilon=1e4).fit(x[:, few].toarray())
    np.testing.assert_array_equal(
        clone(step).set_params(epsilon=1e4).fit(x[:, few]).mean_, told.mean_
    )
    assert found.mean_.shape == (1 << 16,)


def test_texts_by_hashes() -> None:
    """As people do it: private text, public hashes."""
    words = np.array(["good", "bad", "fine", "poor", "the", "a", "of"])
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 3_000)
    texts = [
        " ".join([*rng.choice(words[4:], 5), str(rng.choice(words[:4][np.arange(4) % 2 != label]))])
        for label in y
    ]
    model = make_pipeline(
        HashingVectorizer(n_features=1 << 12),
        DPLogisticRegression(4.0, 1e-5, data_norm=1.0, classes=[0, 1], noise_seed=0),
    )
    assert model.fit(texts[:2_000], y[:2_000]).score(texts[2_000:], y[2_000:]) > 0.9


STEPS: dict[str, tuple[Any, bool]] = {  # and whether 0 stays 0
    "standard": (DPStandardScaler(-1, 3, **BUDGET), False),
    "standard, without mean": (DPStandardScaler(-1, 3, with_mean=False, **BUDGET), True),
    "standard, filled": (DPStandardScaler(-1, 3, with_mean=False, missing="mean", **BUDGET), True),
    "0 outside of the range": (DPStandardScaler(1, 3, with_mean=False, **BUDGET), False),
    "imputer": (DPImputer(-1, 3, **BUDGET), True),
    "range": (DPMinMaxScaler(-1, 1), True),
    "lopsided range": (DPMinMaxScaler(-1, 2), False),
    "quantiles": (DPMinMaxScaler(-1, 2, quantile=0.05, **BUDGET), False),
}


@pytest.mark.parametrize("name", STEPS)
def test_transformers_are_the_dense_tables_bit_for_bit(name: str) -> None:
    step, stays = STEPS[name]
    x = np.where(np.random.default_rng(2).random(X.shape) < 0.1, np.nan, X)
    told = clone(step).fit(x)
    for table in (scrambled(x), scrambled(x, kind="csr")):
        found = clone(step).fit(table)
        assert learnt(found) == learnt(told)
        made = found.transform(table)
        assert sparse.issparse(made) == stays
        assert isinstance(made, sparse.sparray) == (stays and isinstance(table, sparse.sparray))
        made = made.toarray() if stays else made
        np.testing.assert_array_equal(made, told.transform(x))


@pytest.mark.parametrize("name", STEPS)
def test_whether_a_transformed_table_is_sparse_does_not_depend_on_its_entries(name: str) -> None:
    step, stays = STEPS[name]
    fitted = clone(step).fit(X)
    for x in (np.zeros((5, FEATURES)), np.ones((5, FEATURES)), X):
        assert sparse.issparse(fitted.transform(sparse.csr_array(x))) == stays


def test_pipelines_and_searches_of_sparse_tables() -> None:
    pipes, searches = [], []
    for x in (X, scrambled(X, kind="csr")):
        last = DPLogisticRegression(classes=[0, 1], noise_seed=0)
        scale = DPStandardScaler(-3, 3, with_mean=False, noise_seed=0)
        pipes.append(PrivatePipeline([("s", scale), ("m", last)], epsilon=2.0).fit(x, LABELS))
        searches.append(DPSearchCV(last, {"l2": [0.0, 0.1]}, noise_seed=0).fit(x, LABELS))
    assert learnt(pipes[0][-1]) == learnt(pipes[1][-1])
    assert learnt(searches[0].best_estimator_) == learnt(searches[1].best_estimator_)


@pytest.mark.parametrize("fit", OF_TABLES)
def test_bad_sparse_tables(fit: str) -> None:
    """As of dense ones; and nothing is said of what they store."""
    stored = sparse.coo_array(([0.8125] * 99, (np.arange(99) * 6, np.zeros(99, int))), (673, 2))
    y = np.arange(673) % 2
    said_of(lambda ledger: FITS[fit](stored * 1j, y, ledger), "Complex data not supported. Fix")
    said_of(lambda ledger: FITS[fit](stored[:0], y, ledger), "minimum of 1 is required")
    said_of(lambda ledger: FITS[fit](sparse.coo_array(np.ones(673)), y, ledger), "Fix: X\\[:, None")


@pytest.mark.parametrize("kind", ["csr", "csc", "bsr", "coo"])
@pytest.mark.parametrize("fit", OF_TABLES)
def test_entries_outside_of_a_table_are_not_quoted(fit: str, kind: Any) -> None:
    table = sparse.coo_array(X).asformat(kind)
    places = table.coords[1] if kind == "coo" else table.indices
    for place in (-31, 98127):
        places[3] = place
        said_of(lambda ledger: FITS[fit](table, LABELS, ledger), "X is a damaged sparse table")


def test_rows_that_end_beyond_a_tables_entries() -> None:
    table = sparse.csr_array(X)
    table.indptr[5] = 10 * len(table.data)
    said_of(lambda ledger: FITS[OF_TABLES[0]](table, LABELS, ledger), "X is a damaged sparse table")


@pytest.mark.parametrize("fit", [name for name in FITS if " " in name])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_gaps_of_sparse_tables(fit: str, value: float) -> None:
    table = sparse.coo_array(([value, 1.0], ([40, 41], [1, 0])), (673, 2))
    said_of(lambda ledger: FITS[fit](table, np.arange(673) % 2, ledger), "Input X contains")


@pytest.mark.parametrize("name", ["momentum-gd", "dp-sgd"])
def test_other_columns_than_in_the_fit(name: str) -> None:
    model, y = MODELS[name]
    fitted = clone(model).fit(scrambled(X), y)
    with pytest.raises(ValueError, match="X has 5 features, but .* is expecting 6"):
        fitted.predict(scrambled(X[:, :5]))


def test_a_refused_fit_is_not_charged() -> None:
    ledger = Ledger(epsilon=1.0, delta=1e-5, neighboring="zero-out")
    with pytest.raises(ValueError, match="Input X contains NaN"):
        DPLogisticRegression(ledger=ledger).fit(scrambled(X * np.nan), LABELS)
    assert ledger.entries() == []
