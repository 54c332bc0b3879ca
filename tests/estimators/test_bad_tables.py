"""Mistakes with tables: each is an error that names the fix, quotes no value and costs nothing."""

import datetime
import decimal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone

from dpoptim import Ledger
from dpoptim.estimators import (
    DPLinearRegression,
    DPLogisticRegression,
    DPSGDClassifier,
    DPSGDRegressor,
)
from dpoptim.evaluation import evaluate_classifier, evaluate_regressor
from dpoptim.preprocessing import (
    DPClassCounts,
    DPImputer,
    DPMinMaxScaler,
    DPOneHot,
    DPStandardScaler,
    PrivatePipeline,
)

VALUE = 0.8125  # of a record
ROWS = 673
PRIVATE = ("0.8125", "patient 7", str(ROWS))


def numbers() -> np.ndarray:
    return np.full((ROWS, 2), VALUE)


def with_text() -> np.ndarray:
    x = numbers().astype(object)
    x[40, 1] = "patient 7"
    return x


def with_gap() -> np.ndarray:
    x = numbers()
    x[40, 1] = np.nan
    return x


LABELS = np.arange(ROWS) % 2
TEXTS = np.where(np.arange(ROWS) == 40, "patient 7", LABELS.astype(str))
DATES = np.full((ROWS, 2), np.datetime64("2020-01-01"))
FRAMES = {  # of pandas, polars and Arrow
    "pandas period": "holds dates or times, in column 'c'. Fix",
    "pandas zone": "holds dates or times, in column 'c'. Fix",
    "pandas arrow": "holds dates or times, in column 'c'. Fix",
    "pandas text": "not a number, in column 'c'. Fix: DPOneHot",
    "pandas names": "X has two columns of one name. Fix",
    "pandas kinds of names": "Feature names are only supported",
    "pandas column": "Fix: X\\[:, None\\]",
    "pandas none": r"0 feature\(s\) \(shape=\(, 0\)\)",
    "polars date": "holds dates or times, in column 'c'. Fix",
    "polars time": "holds dates or times, in column 'c'. Fix",
    "polars lazy": r"X is a query that has not run. Fix: X.collect\(\)",
    "arrow date": "holds dates or times, in column 'c'. Fix",
}


def frame(name: str) -> Any:
    library, kind = name.split(" ", 1)
    package = pytest.importorskip("pyarrow" if library == "arrow" else library)
    dates, x = [datetime.date(2020, 1, 1)] * ROWS, numbers()
    if library == "arrow":
        return package.table({"a": x[:, 0], "c": dates})
    if library == "polars":
        made = package.DataFrame({"a": x[:, 0], "c": dates})
        made = made.with_columns(c=package.lit(datetime.time(3))) if kind == "time" else made
        return made.lazy() if kind == "lazy" else made
    plain = package.DataFrame(x, columns=["a", "b"])
    made = {
        "period": lambda: plain.assign(c=package.period_range("2020-01", periods=ROWS, freq="D")),
        "zone": lambda: plain.assign(c=package.Timestamp("2020-01-01", tz="Europe/Berlin")),
        "arrow": lambda: plain.assign(c=package.Series(dates, dtype="date32[pyarrow]")),
        "text": lambda: plain.assign(c="patient 7"),
        "names": lambda: plain.set_axis(["a", "a"], axis=1),
        "kinds of names": lambda: plain.set_axis([0, "a"], axis=1),
        "column": lambda: plain["a"],
        "none": lambda: plain[[]],
    }
    return made[kind]()


TABLES: dict[str, tuple[Callable[[], Any], str]] = {
    "text": (with_text, r"not a number, in column 1\. Fix: DPOneHot"),
    "one axis": (lambda: numbers()[:, 0], "Fix: X\\[:, None\\]"),
    "dates": (lambda: DATES, "dates or times. Fix"),
    "complex": (lambda: numbers() * 1j, "Complex data not supported. Fix"),
    "unequal rows": (lambda: [[VALUE], [VALUE, VALUE]], "Fix: rows of numbers, of equal lengths"),
    "none": (lambda: numbers()[:0], "minimum of 1 is required"),
    "no columns": (lambda: numbers()[:, :0], r"0 feature\(s\) \(shape=\(, 0\)\)"),
    "objects that are dates": (
        lambda: np.full((ROWS, 2), datetime.date(2020, 1, 1), dtype=object),
        r"but holds dates or times, in column 0, 1\. Fix",
    ),
    "too large": (lambda: np.full((ROWS, 2), 10**400, dtype=object), "too large for float64. Fix"),
    "a matrix": (lambda: numbers().view(np.matrix), "np.matrix is not supported. Please convert"),
    "nothing": (lambda: None, "Fix: X\\[:, None\\]"),
    **{name: (lambda name=name: frame(name), said) for name, said in FRAMES.items()},
}
CLASSES: dict[str, Any] = {"classes": [0, 1]}
BOUND: dict[str, Any] = {"target_bound": 1.0}
FITS: dict[str, Callable[[Any, Any, Ledger], Any]] = {
    "linear classifier": lambda x, y, ledger: DPLogisticRegression(ledger=ledger, **CLASSES).fit(
        x, y
    ),
    "linear regressor": lambda x, y, ledger: DPLinearRegression(ledger=ledger, **BOUND).fit(x, y),
    "network classifier": lambda x, y, ledger: DPSGDClassifier(ledger=ledger, **CLASSES).fit(x, y),
    "network regressor": lambda x, y, ledger: DPSGDRegressor(ledger=ledger, **BOUND).fit(x, y),
    "scaler": lambda x, y, ledger: DPStandardScaler(0, 1, ledger=ledger).fit(x),
    "quantiles": lambda x, y, ledger: DPMinMaxScaler(0, 1, ledger=ledger).fit(x),
    "imputer": lambda x, y, ledger: DPImputer(0, 1, ledger=ledger).fit(x),
    "counts": lambda x, y, ledger: DPClassCounts([0, 1], ledger=ledger).fit(y),
}
OF_TABLES = [name for name in FITS if name != "counts"]


def said_of(fit: Callable[[Ledger], Any], match: str) -> None:
    ledger = Ledger(epsilon=1.0, delta=1e-5, neighboring="zero-out")
    with pytest.raises((ValueError, TypeError), match=match) as caught:
        fit(ledger)
    shown = f"{caught.value} {caught.value.__cause__}"
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert not any(private in shown for private in PRIVATE), shown
    assert ledger.entries() == []


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("fit", OF_TABLES)
def test_a_bad_table(fit: str, table: str) -> None:
    x, match = TABLES[table]
    said_of(lambda ledger: FITS[fit](x(), LABELS, ledger), match)


@pytest.mark.parametrize("fit", [name for name in FITS if " " in name])
def test_gaps_are_for_an_imputer(fit: str) -> None:
    said_of(lambda ledger: FITS[fit](with_gap(), LABELS, ledger), "Fix: DPImputer before it")


@pytest.mark.parametrize(
    ("fit", "y", "match"),
    [
        ("linear classifier", TEXTS, "none of the declared classes. Fix"),
        ("network classifier", TEXTS, "none of the declared classes. Fix"),
        ("linear classifier", LABELS + VALUE, "Unknown label type"),
        ("linear classifier", LABELS.astype(str).astype(object), "none of the declared classes"),
        ("linear classifier", [*LABELS[:-1], "yes"], "neither all texts nor all numbers. Fix"),
        ("network classifier", DATES[:, 0], "none of the declared classes. Fix"),
        ("linear regressor", TEXTS, "y holds what is not a number. Fix"),
        ("network regressor", TEXTS, "y holds what is not a number. Fix"),
        ("linear regressor", np.where(LABELS > 0, np.nan, VALUE), "y contains NaN"),
        ("linear classifier", LABELS[:-1], "equally many rows"),
        ("linear classifier", np.c_[LABELS, LABELS], "y should be a 1d array"),
        ("network classifier", np.c_[LABELS, LABELS], "y should be a 1d array"),
        ("linear regressor", numbers(), "y should be a 1d array"),
        ("network regressor", numbers(), "y should be a 1d array"),
        ("counts", np.c_[LABELS, LABELS], "y should be a 1d array"),
        ("linear classifier", np.where(LABELS > 0, TEXTS, None), "y has missing labels. Fix"),
        (
            "network classifier",
            np.where(LABELS > 0, TEXTS.astype(object), np.nan),
            "y has missing labels. Fix",
        ),
    ],
)
def test_bad_targets(fit: str, y: Any, match: str) -> None:
    said_of(lambda ledger: FITS[fit](numbers(), y, ledger), match)


def test_decimal_labels_are_numbers() -> None:
    labels = [decimal.Decimal(int(label)) for label in LABELS]
    model = DPLogisticRegression(**CLASSES).fit(numbers(), labels)
    assert set(model.predict(numbers())) <= {0, 1}


def test_half_a_character_is_a_category_and_not_quoted() -> None:
    x = [["\ud800"], ["a"]] * ROWS
    assert DPOneHot(epsilon=1.0, buckets=4).fit_transform(x).shape[0] == 2 * ROWS


def test_a_query_is_refused_by_a_pipeline_as_by_its_steps() -> None:
    pipeline = PrivatePipeline(
        [("scale", DPStandardScaler(0, 1)), ("last", DPLogisticRegression())]
    )
    with pytest.raises(TypeError, match=r"Fix: X\.collect"):
        pipeline.fit(frame("polars lazy"), LABELS)


@pytest.mark.filterwarnings("ignore::dpoptim.estimators.RepeatedFitWarning")
@pytest.mark.parametrize("step", [DPStandardScaler(0, 1), DPImputer(0, 1)])
def test_what_is_masked_is_missing(step: Any) -> None:
    """It had been read as what lies under the mask."""
    x = np.ma.masked_array(numbers(), mask=np.arange(2 * ROWS).reshape(ROWS, 2) % 3 == 0)
    told = x.filled(np.nan)
    settings: Any = {"epsilon": 1e3, "delta": 1e-4, "noise_seed": 0}
    found = [clone(step).set_params(**settings).fit(each).mean_ for each in (x, told)]
    np.testing.assert_array_equal(*found)
    said_of(lambda ledger: FITS["linear classifier"](x, LABELS, ledger), "Fix: DPImputer before")
    y = np.ma.masked_array(LABELS, mask=LABELS == 1)
    said_of(lambda ledger: FITS["linear classifier"](numbers(), y, ledger), "y has missing labels")
    said_of(lambda ledger: FITS["linear regressor"](numbers(), y, ledger), "y contains NaN")


def test_scores_of_what_is_not_a_number() -> None:
    said_of(
        lambda ledger: evaluate_classifier(
            numbers(), [[0]] * (ROWS - 1) + [[0, 1]], classes=[0, 1], epsilon=1.0, ledger=ledger
        ),
        "y should be a 1d array",
    )
    said_of(
        lambda ledger: evaluate_regressor(TEXTS, TEXTS, target_bound=1.0, epsilon=1.0),
        "predictions holds what is not a number",
    )
    said_of(
        lambda ledger: evaluate_classifier(
            with_text(), LABELS, classes=[0, 1], epsilon=1.0, ledger=ledger
        ),
        "probabilities holds what is not a number",
    )
