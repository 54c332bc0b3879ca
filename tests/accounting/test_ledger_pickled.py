"""A pickled ledger goes on with its own file, or not at all: it never makes one."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest

from dpoptim.accounting.ledger import BudgetExceeded, Ledger
from dpoptim.errors import LedgerError
from dpoptim.estimators import DPLinearRegression

AR = "add-or-remove-one"
X = np.random.default_rng(0).normal(size=(200, 3))
Y = X[:, 0]


def reserve(ledger: Ledger, noise: float = 2.0) -> None:
    ledger.reserve(dp.GaussianDpEvent(noise), neighboring=AR, label="run")


def linear(ledger: Ledger, **settings: Any) -> DPLinearRegression:
    given = {"epsilon": 0.9, "delta": 1e-6, "target_bound": 3.0} | settings
    return DPLinearRegression(ledger=ledger, **given)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table.ledger"


def test_a_model_whose_ledger_was_moved_predicts_and_does_not_fit(path: Path) -> None:
    """It made an empty ledger without a budget at the old place: all was admitted again."""
    ledger = Ledger(path, epsilon=1.0, delta=1e-5, neighboring="zero-out")
    model = linear(ledger).fit(X, Y)
    kept = pickle.dumps(model)
    moved = path.rename(path.with_name("moved.ledger"))
    loaded = pickle.loads(kept)
    assert np.array_equal(loaded.predict(X), model.predict(X))
    assert "put it back, or name its new place" in repr(loaded.ledger)
    for epsilon in (0.1, 5.0):
        with pytest.raises(LedgerError, match=r"table\.ledger: .*put it back, or name its new pl"):
            loaded.set_params(epsilon=epsilon).fit(X, Y)
    assert not path.exists()
    loaded.set_params(ledger=Ledger(moved))
    with pytest.raises(BudgetExceeded):
        loaded.fit(X, Y)
    assert len(Ledger(moved).entries()) == 1


def test_what_it_was_made_with_and_whom_it_protects_stay(path: Path) -> None:
    made = Ledger(path, dataset="cells", epsilon=2.0, delta=1e-6, neighboring="zero-out")
    loaded = pickle.loads(pickle.dumps(made.of_units("person")))
    assert (loaded.dataset, loaded.neighboring, loaded.unit) == ("cells", "zero-out", "person")
    assert loaded.budget == made.budget
    assert loaded.id == made.id
    assert type(loaded) is Ledger
    assert loaded.remaining() == made.remaining()


def test_it_charges_the_file_that_goes_on(path: Path) -> None:
    made = Ledger(path, epsilon=8.0, delta=1e-6)
    reserve(made)
    kept = pickle.dumps(made)
    reserve(made)
    loaded = pickle.loads(pickle.dumps(pickle.loads(kept)))  # also one that was not read between
    reserve(loaded)
    assert len(made.entries()) == len(loaded.entries()) == 3
    assert loaded.verify() == made.verify()


def test_another_ledger_in_its_place_is_refused(path: Path) -> None:
    kept = pickle.dumps(Ledger(path, epsilon=8.0, delta=1e-6))
    path.unlink()
    Ledger(path)
    with pytest.raises(LedgerError, match="another ledger has taken this file's place"):
        reserve(pickle.loads(kept))


@pytest.mark.parametrize("went_on", [0, 1, 2, 3])
def test_an_older_copy_is_refused_also_where_it_went_on(path: Path, went_on: int) -> None:
    made = Ledger(path, epsilon=8.0, delta=1e-6)
    reserve(made)
    older = shutil.copy(path, path.with_name("older.ledger"))
    reserve(made)
    kept = pickle.dumps(made)
    for count in range(went_on):
        reserve(Ledger(older), 3.0 + count)
    Path(older).replace(path)
    loaded = pickle.loads(kept)
    for each in (loaded, pickle.loads(pickle.dumps(loaded))):
        with pytest.raises(LedgerError, match="older copy"):
            reserve(each)
