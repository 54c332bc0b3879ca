"""Estimators that protect persons with several rows, and weights of classes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpoptim.accounting.ledger import Ledger
from dpoptim.data import ParquetRows
from dpoptim.estimators import (
    DPLinearRegression,
    DPLogisticRegression,
    DPSGDClassifier,
    DPSGDRegressor,
)
from dpoptim.estimators.persons import RowsOfPersons
from dpoptim.estimators.solving import SOLVERS
from dpoptim.solvers import LinearProblem

rng = np.random.default_rng(0)
OWNERS = np.repeat(np.arange(300), rng.integers(1, 9, 300))
rng.shuffle(OWNERS)
X = rng.uniform(-1, 1, (len(OWNERS), 3))
Y = (X[:, 0] + 0.2 * rng.normal(size=len(OWNERS)) > 0).astype(int)
T = X @ np.array([1.0, 0.0, -1.0])
COMMON: Any = {"epsilon": 4.0, "delta": 1e-4, "data_norm": 2.0, "noise_seed": 0}


def classifier(**settings: Any) -> DPLogisticRegression:
    return DPLogisticRegression(**COMMON, classes=[0, 1], **settings)


@pytest.mark.set_aside("proximal-point")
@pytest.mark.parametrize("solver", [name for name in SOLVERS if name != "sufficient-statistics"])
def test_every_solver_protects_persons(solver: str) -> None:
    with Ledger(neighboring="zero-out") as ledger:
        model = classifier(solver=solver, rows_per_person=4, ledger=ledger).fit(
            X, Y, persons=OWNERS
        )
        assert ledger.spent(1e-4).epsilon <= 4 * (1 + 1e-9)
    assert model.score(X, Y) > 0.8
    assert model.privacy_.unit == "person"
    assert "at most 4 of them" in str(model.privacy_)


def test_sums_protect_persons() -> None:
    model = DPLinearRegression(**COMMON, target_bound=2.0, solver="sufficient-statistics")
    model.fit(X, T, persons=OWNERS.astype(str))
    assert model.score(X, T) > 0.9
    assert model.privacy_.unit == "person"


@pytest.mark.parametrize("kind", [DPSGDClassifier, DPSGDRegressor])
def test_networks_protect_persons(kind: Any) -> None:
    bound: Any = {"classes": [0, 1]} if kind is DPSGDClassifier else {"target_bound": 2.0}
    model = kind(**COMMON, **bound, epochs=1, hidden_layer_sizes=(4,))
    assert model.fit(X, Y, persons=OWNERS).privacy_.unit == "person"


def test_a_person_without_company_is_a_record() -> None:
    """Limit: one row each, all of them brought, gives what no persons give, to float64's rounding
    and margin.
    """
    alone = np.arange(len(X))
    plain, owned = (classifier().fit(X, Y, persons=each) for each in (None, alone))
    # of the largest: margins and residuals round to the dtype
    np.testing.assert_allclose(owned.coef_, plain.coef_, atol=1e-5 * np.abs(plain.coef_).max())
    model = DPLinearRegression(**COMMON, target_bound=2.0, solver="sufficient-statistics")
    plain_sums = model.fit(X, T).coef_
    np.testing.assert_allclose(model.fit(X, T, persons=alone).coef_, plain_sums, rtol=1e-9)


def test_a_persons_rows_are_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[float]] = []
    prepare = LinearProblem.prepare

    def spy(self: LinearProblem, records: Any) -> Any:
        brought = records[1][records[2] > 0]
        seen.append(set(brought.tolist()))
        return prepare(self, records)

    monkeypatch.setattr(LinearProblem, "prepare", spy)
    model = DPLinearRegression(**COMMON, target_bound=300.0, solver="one-pass-sgd", steps=10)
    model.fit(X, OWNERS.astype(float), persons=OWNERS)
    assert len(seen) == 10
    assert sum(map(len, seen)) == len(set.union(*seen)) == 300


def test_a_memory_map_is_read_person_by_person(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    held, read = (classifier().fit(x, Y, persons=OWNERS) for x in (X, mapped))
    np.testing.assert_allclose(read.coef_, held.coef_, rtol=1e-12)
    assert RowsOfPersons(mapped, np.array([[3, 5], [7, 7]]))[0:1].tolist() == [X[[3, 5]].tolist()]


def test_chunks_protect_the_same_unit() -> None:
    with Ledger(neighboring="zero-out") as ledger:
        model = classifier(ledger=ledger).partial_fit(X, Y, persons=OWNERS)
        spent = ledger.spent(1e-4)
        with pytest.raises(ValueError, match="persons must be given with every chunk"):
            model.partial_fit(X, Y)
        assert ledger.spent(1e-4) == spent
        said = model.partial_fit(X, Y, persons=OWNERS).privacy_
    assert said.unit == "person"
    assert any("no person is in two chunks" in note for note in said.notes)
    assert not any("no record is in two chunks" in note for note in said.notes)


@pytest.mark.parametrize(
    ("persons", "said"),
    [
        (OWNERS[:-1], "one axis, as long as"),
        (OWNERS + 0.5, "whole numbers or strings"),
        (OWNERS + 0.5j, "whole numbers or strings"),
        ([*map(str, OWNERS[1:]), "7\0"], r"ends in NUL, .* persons=\[repr\(name\)"),
        ([[0], *[[0, 1]] * (len(OWNERS) - 1)], "one axis, as long as"),
        (np.ma.masked_array(OWNERS, mask=OWNERS == 1), "rows without an owner"),
        ([*map(str, OWNERS[1:]), "Null"], r"no row lacks an owner: persons=\['='"),
    ],
)
def test_bad_persons_are_refused(persons: Any, said: str) -> None:
    for model in (classifier(), DPSGDClassifier(classes=[0, 1])):
        with pytest.raises(ValueError, match=said):
            model.fit(X, Y, persons=persons)
    with pytest.raises(ValueError, match="rows_per_person must be"):
        classifier(rows_per_person=0).fit(X, Y, persons=OWNERS)


def test_parquet_is_read_in_order(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = pytest.importorskip("pyarrow").table({n: X[:, i] for i, n in enumerate("abc")})
    parquet.write_table(columns, tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="anywhere in a Parquet file"):
        classifier().fit(ParquetRows(tmp_path / "x.parquet", "abc"), Y, persons=OWNERS)


@pytest.mark.parametrize("solver", ["auto", "accelerated-srgd"])
def test_weights_of_classes(solver: str) -> None:
    """A rare class is found more often at the same guarantee."""
    draws = np.random.default_rng(1)
    x, y = draws.normal(size=(4000, 2)), (draws.random(4000) < 0.08).astype(int)
    x[y == 1] += 1.0
    plain, weighted, same = (
        classifier(solver=solver, class_weight=weights).fit(x, y)
        for weights in (None, {0: 0.1}, {0: 3, 1: 3.0})
    )
    assert weighted.predict(x[y == 1]).mean() > plain.predict(x[y == 1]).mean() + 0.2
    assert weighted.privacy_ == plain.privacy_
    np.testing.assert_array_equal(same.coef_, plain.coef_)
    nobody = classifier(solver=solver, class_weight={0: 0.0}).fit(x, y)
    assert nobody.predict(x).mean() > 0.9
    for wrong, said in (("balanced", "must be a mapping"), ({7: 1.0}, "none of the classes")):
        with pytest.raises(ValueError, match=said):
            classifier(class_weight=wrong).fit(x, y)
