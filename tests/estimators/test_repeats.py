"""What searches of scikit-learn cost, which fit clones: said aloud, whoever counts."""

import copy
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.model_selection import (
    GridSearchCV,
    cross_val_score,
    learning_curve,
    permutation_test_score,
)

import dpoptim
from dpoptim.accounting import gdp_epsilon, gdp_mu
from dpoptim.estimators import (
    DPLinearRegression,
    DPLogisticRegression,
    DPSGDClassifier,
    RepeatedFitWarning,
)
from dpoptim.estimators.other_fits import rows_of
from dpoptim.estimators.repeats import ALONE
from dpoptim.preprocessing import DPStandardScaler, PrivatePipeline
from dpoptim.tuning import DPSearchCV, tune_on_public

X = np.random.default_rng(0).uniform(-1, 1, (300, 3))
Y = (X[:, 0] > 0).astype(int)
PRICE: Any = {"epsilon": 1.0, "delta": 1e-5}
GRID = {"l2": [0.0, 0.1, 1.0]}


def logistic(**settings: Any) -> DPLogisticRegression:
    return DPLogisticRegression(**PRICE, data_norm=2.0, classes=[0, 1], **settings)


def network(**settings: Any) -> DPSGDClassifier:
    return DPSGDClassifier(
        **PRICE, data_norm=2.0, classes=[0, 1], hidden_layer_sizes=(), epochs=2, **settings
    )


def pipeline(**settings: Any) -> PrivatePipeline:
    steps = [("scale", DPStandardScaler(-1, 1)), ("model", DPLogisticRegression(classes=[0, 1]))]
    return PrivatePipeline(steps, **PRICE, **settings)


@contextmanager
def heard() -> Iterator[list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        words: list[str] = []
        yield words
        words += [str(one.message) for one in caught if one.category is RepeatedFitWarning]


def test_a_search_says_what_all_its_fits_cost() -> None:
    """Nine on folds and one on all: 3.62 where the best one says 1."""
    with heard() as words:
        search = GridSearchCV(logistic(), GRID, cv=3).fit(X, Y)
    assert [text.split(": ")[1].split()[1] for text in words] == ["2", "4", "8", "10"]
    assert "10 fits of it and its clones" in words[-1]
    price = gdp_epsilon(gdp_mu(1.0, 1e-5) * 10**0.5, 1e-5)  # of ten Gaussians
    assert float(words[-1].split("epsilon=")[1].split()[0]) == pytest.approx(price, abs=0.01)
    assert "tune_on_public, DPSearchCV" in words[-1]
    stated = search.best_estimator_.privacy_
    assert stated.epsilon <= 1.0
    assert sum("10 fits" in note for note in stated.notes) == 1


@pytest.mark.parametrize("made", [logistic, network, pipeline])
def test_cross_validation_says_what_all_its_fits_cost(made: Any) -> None:
    with heard() as words:
        cross_val_score(made(), X, Y, cv=5)
    assert [text.split(": ")[1].split()[1] for text in words] == ["2", "4"]
    assert words[0].startswith(type(made()).__name__)


def test_a_clone_that_is_fitted_again_counts_too() -> None:
    """As `permutation_test_score` does, with each of its clones: it was never said."""
    with heard() as words:
        permutation_test_score(logistic(), X, Y, cv=2, n_permutations=3)
    assert "all 5 fits of it and its clones" in words[-1]


def test_streams_of_clones_count_once_each() -> None:
    """A record is in one chunk of each, and in several streams."""
    with heard() as words:
        sizes = {"train_sizes": [0.5, 1.0], "exploit_incremental_learning": True}
        learning_curve(logistic(), X, Y, cv=3, **sizes)
    assert "all 2 fits of it and its clones" in words[0]


def test_a_network_is_charged_for_its_own_events() -> None:
    one = network()
    with heard():
        first, second = one.fit(X, Y).privacy_, clone(one).fit(X, Y).privacy_
    assert first.epsilon == second.epsilon
    plan = one._plan(300, 1e-5, epsilon=1.0)
    ledger = dpoptim.Ledger(neighboring="zero-out")
    for _ in range(2):
        ledger.reserve(plan.event, neighboring="zero-out", label="one")
    assert str(ledger.spent(1e-5)).split(" (")[0] in "; ".join(second.notes)


def test_a_ledger_counts_for_all(tmp_path: Path) -> None:
    ledger = dpoptim.Ledger(tmp_path / "ledger.sqlite", neighboring="zero-out")
    with heard() as words:
        search = GridSearchCV(logistic(ledger=ledger), GRID, cv=2, n_jobs=2).fit(X, Y)
    assert len(ledger.entries()) == 7
    assert "all 7 runs on its ledger together: epsilon=" in words[-1]
    assert any("all 7 runs" in note for note in search.best_estimator_.privacy_.notes)


def test_fits_that_a_ledger_does_not_know_are_counted_beside_it() -> None:
    """Those without any, and on others: the last one's ledger knew of one run, and said nothing."""
    one, fits = logistic().fit(X, Y), 1
    for _ in range(2):
        with dpoptim.Ledger(neighboring="zero-out") as ledger:
            fits += 1
            notes = one.set_params(ledger=ledger).fit(X, Y).privacy_.notes
        assert any(note.startswith(f"all {fits} fits of it and its clones") for note in notes)
        assert ALONE not in notes


def test_a_ledger_is_advised_to_who_has_none(tmp_path: Path) -> None:
    ledger = dpoptim.Ledger(tmp_path / "ledger.sqlite", neighboring="zero-out")
    for settings, advised in (({}, True), ({"ledger": ledger}, False)):
        with heard() as here:
            cross_val_score(logistic(**settings), X, Y, cv=2)
        with heard() as elsewhere:  # as in another process
            pickle.loads(pickle.dumps(clone(logistic(**settings)))).fit(X, Y)
        for words in (here, elsewhere):
            assert len(words) == 1
            assert "tune_on_public, DPSearchCV" in words[0]
            assert ("ledger=dpoptim.Ledger(" in words[0]) is advised


def test_a_budget_ends_a_search(tmp_path: Path) -> None:
    """What was not admitted was not charged; scikit-learn names the failed fits."""
    path = tmp_path / "ledger.sqlite"
    ledger = dpoptim.Ledger(path, epsilon=2.0, delta=1e-5, neighboring="zero-out")
    with heard(), pytest.raises(dpoptim.BudgetExceeded):
        GridSearchCV(logistic(ledger=ledger), GRID, cv=3, error_score="raise").fit(X, Y)
    assert 2 <= len(ledger.entries()) < 9


def test_other_processes_are_named_where_nobody_counts_them() -> None:
    with heard() as words:
        search = GridSearchCV(logistic(), GRID, cv=3, n_jobs=2).fit(X, Y)
    assert "other processes are not counted" in words[-1]
    assert any("other processes" in note for note in search.best_estimator_.privacy_.notes)
    with heard() as words:  # as in those processes
        for _ in range(2):
            pickle.loads(pickle.dumps(clone(logistic()))).fit(X, Y)
    assert words[0].startswith("DPLogisticRegression: a copy from another process was fitted")
    assert words[0] == words[1]  # which Python shows once


def test_who_shares_a_count() -> None:
    """An estimator, its clones and their clones; none of equal settings, and no chunk."""
    one = logistic()
    with heard() as words:
        one.fit(X, Y)
        logistic().fit(X, Y)
        one.predict(X)
        for part in range(3):
            one.partial_fit(X[part::3], Y[part::3])
    assert words == []
    with heard():
        for fits, again in enumerate((one, clone(one), clone(clone(one)), copy.deepcopy(one)), 2):
            notes = again.fit(X, Y).privacy_.notes
            assert any(note.startswith(f"all {fits} fits of it and its clones") for note in notes)
    assert vars(logistic()).keys() == logistic().get_params().keys()  # nothing before a fit


def test_what_is_accounted_as_a_whole_or_public_is_not_counted() -> None:
    line = DPLinearRegression(target_bound=1.0, solver="sufficient-statistics")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            DPSearchCV(clone(line), {"l2": [0.0, 1.0]}, **PRICE).fit(X, X[:, 0])
        ledger = dpoptim.Ledger(neighboring="zero-out")
        held = clone(line).set_params(ledger=ledger)
        tune_on_public(held, {"l2": [0.0, 1.0]}, (X, X[:, 0]), (X, X[:, 0]), **PRICE)
        assert ledger.entries() == []  # public records cost nothing
        line.fit(X, X[:, 0])
        pipeline().fit(X, Y)
    search = DPSearchCV(line, {"l2": [0.0, 1.0]}, **PRICE).fit(X, X[:, 0])
    with pytest.warns(RepeatedFitWarning, match="all 2 fits"):
        clone(search).fit(X, X[:, 0])


def test_as_an_error_it_comes_after_a_fit_that_is_whole() -> None:
    one = logistic().fit(X, Y)
    before = one.coef_.copy()
    one.fit(X, Y)  # by hand: a note, no warning
    assert any("2 fits" in note for note in one.privacy_.notes)
    others = [clone(one), clone(one)]
    with pytest.raises(RepeatedFitWarning, match="3 fits"):
        others[0].fit(X, Y)
    with pytest.raises(RepeatedFitWarning, match="4 fits"):
        others[1].fit(X, Y)
    assert not np.array_equal(others[1].coef_, before)


def test_a_copy_that_is_pickled_and_loaded_here_shares_the_count() -> None:
    """It was "a copy from another process", of "all 1 fits"."""
    one = logistic().fit(X, Y)
    with heard():
        again = pickle.loads(pickle.dumps(one)).fit(X, Y)
    assert any(note.startswith("all 2 fits of it and its clones") for note in again.privacy_.notes)


@contextmanager
def heard_of_others() -> Iterator[list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        words: list[str] = []
        yield words
        words += [str(one.message) for one in caught if one.category is dpoptim.OtherRunsWarning]


def test_a_loop_of_new_estimators_says_what_all_of_them_cost() -> None:
    """Twelve constructors on one table were twelve times "this fit alone"."""
    x, y = X.copy(), Y.copy()
    with heard_of_others() as words:
        for l2 in (0.0, 0.1, 0.2, 0.3):
            logistic(l2=l2).fit(x, y)
    assert [text.split(": ")[1].split()[0] for text in words] == ["2", "4"]
    price = gdp_epsilon(gdp_mu(1.0, 1e-5) * 4**0.5, 1e-5)
    assert float(words[-1].split("epsilon=")[1].split()[0]) == pytest.approx(price, abs=0.01)


def test_ledgers_that_do_not_add_up_are_named_and_one_ledger_is_not() -> None:
    for made in (logistic, network, pipeline):
        x, y = X.copy(), Y.copy()
        with heard_of_others() as words:
            for _ in range(2):
                made(ledger=dpoptim.Ledger(neighboring="zero-out")).fit(x, y)
        assert len(words) == 1
        assert words[0].startswith(f"{type(made()).__name__}: 2 fits of this process so far")
    one, x, y = dpoptim.Ledger(neighboring="zero-out"), X.copy(), Y.copy()
    with heard_of_others() as words:
        for l2 in (0.0, 0.1):
            logistic(l2=l2, ledger=one).fit(x, y)
    assert not words


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (lambda x: x[:100], lambda x: x[100:], False),
        (lambda x: x[::2], lambda x: x[1::2], False),
        (lambda x: x[:150], lambda x: x[100:], True),
        (lambda x: x[:, :2], lambda x: x[:, 2:], True),
        (lambda x: x[::-1], lambda x: x, True),
        (lambda x: csr_array(x), lambda x: csr_array(x), False),
        (lambda x: pd.DataFrame(x), lambda x: pd.DataFrame(x.copy()), None),
    ],
)
def test_the_same_records_are_known_by_their_memory(first: Any, second: Any, shared: Any) -> None:
    x = X.copy()
    one, other = first(x), second(x)
    mine, its = rows_of(one), rows_of(other)
    assert mine is not None
    assert its is not None
    assert mine.shares_records(mine)
    if shared is not None:
        assert mine.shares_records(its) is shared
    del x, one, other
    assert mine.is_there is False


def test_columns_chosen_anew_are_known_by_the_labels() -> None:
    frame = pd.DataFrame(X, columns=["a", "b", "c"]).assign(y=Y)
    with heard_of_others() as words:
        for columns in (["a", "b"], ["b", "c"]):
            logistic().fit(frame[columns], frame["y"])
    assert len(words) == 1


PERSONS = np.arange(300) // 3
OTHER_KINDS: Any = [
    ({}, {"persons": PERSONS}, {}),
    ({"neighboring": "zero-out"}, {}, {"neighboring": "replace-one"}),
    ({"neighboring": "replace-one"}, {"persons": PERSONS}, {}),
]


@pytest.mark.parametrize(("settings", "whose", "then"), OTHER_KINDS)
def test_fits_for_others_do_not_add_up(
    settings: Any, whose: Any, then: Any, tmp_path: Path
) -> None:
    """They were counted, and left out of the sum: so it was that of the last fit alone."""
    one = logistic(**settings).fit(X.copy(), Y.copy())
    with heard() as words:
        stated = one.set_params(**then).fit(X, Y, **whose).privacy_
    said = "all 2 fits of it and its clones so far: they protect other units or neighbours"
    assert len(words) == 1
    assert said in words[0]
    assert any(note.startswith(said) for note in stated.notes)
    dpoptim.certify(one, tmp_path / "run", data="made up")
    assert said in (tmp_path / "run" / "certificate.json").read_text()
    with heard() as words:
        clone(one).fit(X, Y)  # nor is there a sum of those that are alike, beside others
    assert str(one.privacy_).count("epsilon=") == 1
    assert all("epsilon=" not in text.split(dpoptim.estimators.repeats.FIX)[0] for text in words)


def test_fits_for_others_by_new_estimators_do_not_add_up() -> None:
    x, y = X.copy(), Y.copy()
    with heard_of_others() as words:
        for whose in ({}, {}, {"persons": PERSONS}, {}):
            logistic().fit(x, y, **whose)
        network(neighboring="add-or-remove-one", n=300).fit(x, y)
    assert [text.split(": ")[1].split()[0] for text in words] == ["2", "3", "4", "5"]
    assert "epsilon=" in words[0].split("Fix")[0]
    for text in words[1:]:
        assert "no ledger adds them up; they protect other units or neighbours, and do not" in text
        assert "epsilon=" not in text.split("Fix")[0]
