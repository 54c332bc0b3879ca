"""The private search: its price is that of the event, whatever it tries; it finds; and only the
winner leaves.
"""

import math
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from scipy.stats import chisquare
from sklearn.base import clone
from sklearn.datasets import load_digits

import dpoptim
from dpoptim.accounting import compute_epsilon, event_from_json, event_to_json, renyi_divergence
from dpoptim.accounting.gaussian import gdp_mu
from dpoptim.data.parquet_rows import ParquetRows
from dpoptim.estimators import (
    DPLinearRegression,
    DPLogisticRegression,
    DPSGDClassifier,
    RepeatedFitWarning,
)
from dpoptim.estimators.table import READ_OFF
from dpoptim.estimators.weights import TRUSTED
from dpoptim.gate import TrialsGate
from dpoptim.noise.stream import KeyStream
from dpoptim.noise.trials import even_choice, logarithmic_count, logarithmic_parameter
from dpoptim.preprocessing import DPOneHot, PrivatePipeline
from dpoptim.training.batches.privacy_units import Persons
from dpoptim.tuning import DPSearchCV, records, search
from dpoptim.tuning.records import held_out_units
from dpoptim.tuning.search_event import search_event

GRID: Any = {"clip_norm": [0.3, 30.0], "steps": [5, 10]}


def digits() -> tuple[np.ndarray, np.ndarray]:
    x, y = load_digits(return_X_y=True)
    return x / 16, y


def base(**settings: Any) -> DPLogisticRegression:
    return DPLogisticRegression(data_norm=4.0, classes=range(10), **settings)


def test_no_trial_is_heard_of() -> None:
    """Weights beyond all numbers, times zeros of held-out records: numpy warned of those."""
    x = np.eye(4)[np.arange(200) % 4]
    line = DPLogisticRegression(data_norm=1.0, classes=[0, 1])
    grid = {"step_size": [1e300], "clip_norm": [1e8]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DPSearchCV(line, grid, epsilon=4.0, delta=1e-5, mean_trials=2, noise_seed=3).fit(
            x, np.arange(200) % 2
        )


def test_it_finds_good_settings_within_the_budget() -> None:
    x, y = digits()
    with dpoptim.Ledger(neighboring="zero-out", epsilon=4.0, delta=1e-5) as ledger:
        search = DPSearchCV(
            base(), GRID, epsilon=4.0, delta=1e-5, mean_trials=8, ledger=ledger, noise_seed=3
        ).fit(x, y)
        (entry,) = ledger.entries()  # the whole search is one charge
        with pytest.raises(dpoptim.BudgetExceeded):
            search.fit(x, y)
    assert isinstance(entry.event, RepeatAndSelectDpEvent)
    assert entry.event.mean == 8
    assert 0.99 * 4.0 <= search.privacy_.epsilon <= 4.0
    assert search.best_params_["clip_norm"] != 30.0  # which drowns in its noise
    assert search.score(x, y) > 0.75
    assert search.best_score_ == pytest.approx(search.score(x, y), abs=0.15)
    assert search.best_estimator_.privacy_ is search.privacy_
    assert search.predict_proba(x[:3]).shape == (3, 10)
    assert "how many trials" in str(search.privacy_)
    left = {name for name in vars(search) if name.endswith("_")}
    assert left == {
        *(
            "best_score_",
            "best_estimator_",
            "best_params_",
            "privacy_",
            "ledger_run_",
            "classes_",
            "n_features_in_",
        ),
    }  # no loser, and no number of trials


def test_trials_are_as_sharp_as_the_event_allows() -> None:
    for relation, differ in (("zero-out", 1.0), ("replace-one", 2.0)):
        event = search_event(1.0, 1e-6, relation, 10.0)
        assert 0.99 <= compute_epsilon(event, 1e-6, relation).epsilon <= 1.0
        mu = differ / event.event.noise_multiplier
        assert 0.12 < mu < gdp_mu(1.0, 1e-6)
        fits: list[float] = []
        honest = DPLogisticRegression.fit

        def spy(self: Any, *data: Any, persons: Any, fits: Any = fits, honest: Any = honest) -> Any:
            fits.append(gdp_mu(self.epsilon, self.delta))
            return honest(self, *data, persons=persons)

        x, y = digits()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DPLogisticRegression, "fit", spy)
            estimator = base(neighboring=relation)
            DPSearchCV(estimator, {"steps": [2]}, epsilon=1.0, delta=1e-6, noise_seed=1).fit(x, y)
        assert all(0.999 * mu < each <= mu for each in fits)


def test_regressions_are_searched_too() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (4_000, 3))
    y = x @ [1.0, -2.0, 0.5]
    grid = [{"solver": ["sufficient-statistics"]}, {"solver": ["momentum-gd"], "clip_norm": [1e-4]}]
    search = DPSearchCV(
        DPLinearRegression(target_bound=4.0), grid, epsilon=4.0, delta=1e-5, noise_seed=2
    ).fit(x, y)
    assert search.best_params_ == {"solver": "sufficient-statistics"}
    assert search.score(x, y) > 0.9
    assert search.best_score_ <= 0.05  # minus a squared error


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"estimator": DPSGDClassifier(classes=[0, 1])}, "estimator must be DPLogisticRegression"),
        ({"param_grid": {"epsilon": [1.0, 2.0]}}, "may not set"),
        ({"mean_trials": 1.0}, "mean_trials must be above 1"),
        ({"holdout": 1.0}, r"holdout must be in"),
        ({"epsilon": 0}, "epsilon must be"),
        ({"estimator": base(neighboring="add-or-remove-one")}, "divided by their places"),
    ],
)
def test_what_the_guarantee_does_not_cover_is_refused(wrong: dict[str, Any], said: str) -> None:
    x, y = digits()
    with dpoptim.Ledger(neighboring="zero-out") as ledger:
        settings: Any = {
            "estimator": base(),
            "param_grid": GRID,
            "delta": 1e-5,
            "ledger": ledger,
            **wrong,
        }
        with pytest.raises(ValueError, match=said):
            DPSearchCV(**settings).fit(x, y)
        assert ledger.entries() == []


def table_with(column: str, value: Any) -> tuple[Any, Any]:
    """Two classes; one record, which is held out, has ``value``."""
    rng = np.random.default_rng(1)
    table = {"x": rng.uniform(-1, 1, (300, 2)), "y": rng.integers(0, 2, 300)}
    public = KeyStream.from_seed(0, "public parts")
    table[column][np.flatnonzero(held_out_units(300, 0.2, public))[0]] = value
    return table["x"], table["y"]


@pytest.mark.parametrize(
    ("wrong", "table", "said"),
    [
        ({"param_grid": {"clip_norm": [1.0, -1.0]}}, table_with("y", 1), "clip_norm must be"),
        ({"param_grid": {"solver": ["auto", "best"]}}, table_with("y", 1), "solver must be one of"),
        ({"param_grid": {"steps": [10, 0]}}, table_with("y", 1), "steps must be"),
        ({"param_grid": {"stepz": [10]}}, table_with("y", 1), "Invalid parameter 'stepz'"),
        ({}, table_with("y", 7), "none of the declared classes"),
        ({}, table_with("x", np.nan), "contains NaN"),
        ({}, (table_with("y", 1)[0], [0, 1]), "equally many rows"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_every_candidate_and_held_out_rows_too_are_refused_before_a_charge(
    wrong: dict[str, Any], table: tuple[Any, Any], said: str, seed: int
) -> None:
    """Whichever candidates the trials would have drawn."""
    model = DPLogisticRegression(data_norm=2.0, classes=[0, 1])
    with dpoptim.Ledger(neighboring="zero-out") as ledger:
        settings: Any = {"param_grid": {"steps": [5, 10]}, "epsilon": 4.0, "delta": 1e-4, **wrong}
        with pytest.raises(ValueError, match=said):
            DPSearchCV(model, **settings, ledger=ledger, noise_seed=seed).fit(*table)
        assert ledger.entries() == []


def test_only_drawn_trials_get_past_their_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, done = DPLogisticRegression.fit, []

    def fit(self: Any, *data: Any, persons: Any) -> Any:
        fitted = honest(self, *data, persons=persons)
        done.append(fitted)
        return fitted

    monkeypatch.setattr(DPLogisticRegression, "fit", fit)
    model = DPLogisticRegression(data_norm=2.0, classes=[0, 1])
    for seed in range(4):
        done.clear()
        grid = {"steps": [2, 3, 4, 5, 6]}
        DPSearchCV(model, grid, epsilon=4.0, mean_trials=3, noise_seed=seed).fit(
            *table_with("y", 1)
        )
        assert len(done) == logarithmic_count(KeyStream.from_seed(seed, "trials"), 3.0)


def test_a_trial_that_releases_more_than_is_paid_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fit whose noise is too low; and one that is charged nowhere."""
    model = DPLogisticRegression(data_norm=2.0, classes=[0, 1])
    honest = DPLogisticRegression.fit

    def uncharged(self: Any, *data: Any, persons: Any) -> Any:
        return honest(self.set_params(ledger=None), *data, persons=persons)

    for owner, name, other in ((search, "LEFT", 1.01), (DPLogisticRegression, "fit", uncharged)):
        with dpoptim.Ledger(neighboring="zero-out") as ledger, monkeypatch.context() as patched:
            patched.setattr(owner, name, other)
            searched = DPSearchCV(model, {"steps": [2]}, epsilon=4.0, delta=1e-4, ledger=ledger)
            with pytest.raises(dpoptim.PrivacyError, match="a trial of this search is paid for as"):
                searched.fit(*table_with("y", 1))
            assert ledger.entries() == []


def test_classes_may_be_read_off_y_once_for_all_trials() -> None:
    x, y = table_with("y", 1)
    words = np.array(["no", "yes"])[y]
    told = DPLogisticRegression(data_norm=2.0, classes=["yes", "no"])
    settings: Any = {"epsilon": 4.0, "delta": 1e-4, "noise_seed": 0}
    public = DPSearchCV(told, {"steps": [5]}, **settings).fit(x, words)
    read = DPSearchCV(clone(told).set_params(classes=None), {"steps": [5]}, **settings)
    read.fit(x, words)
    np.testing.assert_array_equal(read.classes_, ["no", "yes"])
    np.testing.assert_array_equal(read.predict_proba(x), public.predict_proba(x))
    assert READ_OFF in read.privacy_.notes
    again = clone(read.best_estimator_).fit(x, y)
    assert READ_OFF in again.privacy_.notes
    assert READ_OFF not in public.privacy_.notes
    assert read.estimator.classes is None


def test_weights_train_and_do_not_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trial has its rows' weights; a held-out row's is checked, and moves nothing."""
    seen, honest = [], DPLogisticRegression.fit

    def fit(self: Any, X: Any, y: Any, weights: Any, *, persons: Any) -> Any:
        seen.append((X, weights))
        return honest(self, X, y, weights, persons=persons)

    x, y = table_with("y", 1)
    weights = np.arange(300) / 100
    model = DPLogisticRegression(data_norm=2.0, classes=[0, 1])
    settings: Any = {"epsilon": 4.0, "delta": 1e-4, "mean_trials": 2, "noise_seed": 0}
    with monkeypatch.context() as patched:
        patched.setattr(DPLogisticRegression, "fit", fit)
        found = DPSearchCV(model, {"steps": [5]}, **settings).fit(x, y, weights)
    for rows, factors in seen:
        places = [int(np.flatnonzero((x == row).all(1))[0]) for row in rows]
        np.testing.assert_array_equal(factors, weights[places])
    assert TRUSTED in found.privacy_.notes
    test = held_out_units(300, 0.2, KeyStream.from_seed(0, "public parts"))
    other = np.where(test, 7.0, weights)
    again = DPSearchCV(model, {"steps": [5]}, **settings).fit(x, y, other)
    np.testing.assert_array_equal(again.best_estimator_.coef_, found.best_estimator_.coef_)
    assert again.best_score_ == found.best_score_
    other[np.flatnonzero(test)[0]] = -1.0
    with pytest.raises(ValueError, match="sample_weight must hold finite numbers"):
        DPSearchCV(model, {"steps": [5]}, **settings).fit(x, y, other)


def test_targets_may_be_objects() -> None:
    x = np.linspace(-1, 1, 200)[:, None]
    model = DPLinearRegression(target_bound=1.0)
    found = DPSearchCV(model, {"steps": [5]}, epsilon=4.0, delta=1e-4, noise_seed=0)
    assert found.fit(x, x[:, 0].astype(object)).best_score_ < 0.5


def test_columns_have_the_names_of_fit() -> None:
    """A frame's columns in another order are refused, by the search and by its winner."""
    pd = pytest.importorskip("pandas")
    x, y = table_with("y", 1)
    frame = pd.DataFrame(x, columns=["age", "dose"])
    model = DPLogisticRegression(data_norm=2.0, classes=[0, 1])
    found = DPSearchCV(model, {"steps": [5]}, epsilon=4.0, delta=1e-4, noise_seed=0).fit(frame, y)
    np.testing.assert_array_equal(found.predict(frame), found.best_estimator_.predict(frame))
    for each in (found, found.best_estimator_):
        with pytest.raises(ValueError, match="feature names"):
            each.predict(frame[["dose", "age"]])


def test_files_in_order_are_no_table_of_a_search(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    x, y = table_with("y", 1)
    parquet.write_table(pa.table({"a": x[:, 0]}), tmp_path / "x.parquet")
    rows = ParquetRows(tmp_path / "x.parquet", columns=["a"])
    with pytest.raises(ValueError, match="Parquet file is read in order"):
        DPSearchCV(base(), GRID).fit(rows, y)


def test_a_training_record_never_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"trains": [set[float]()], "scores": [set[float]()]}
    x, y = np.linspace(-1, 1, 1000)[:, None], np.repeat([0, 1], 500)
    fit, values = DPLogisticRegression.fit, records.values_of_units

    def noted(self: Any, X: Any, *rest: Any, **options: Any) -> Any:
        rows["trains"].append(set(X[:, 0].tolist()))
        return fit(self, X, *rest, **options)

    def scored(model: Any, X: Any, *rest: Any) -> Any:
        rows["scores"].append(set(X[:, 0].tolist()))
        return values(model, X, *rest)

    monkeypatch.setattr(DPLogisticRegression, "fit", noted)
    monkeypatch.setattr(records, "values_of_units", scored)
    for _ in range(2):  # by places alone
        DPSearchCV(base(), GRID, mean_trials=2).fit(x, y)
        train, test = rows["trains"][-1], rows["scores"][-1]
        assert (len(train), len(test), len(train | test)) == (800, 200, 1000)
        assert test == rows["scores"][1]


def persons_who_count_twice(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Those with rows in training and in the score, or with more of a score than one record."""
    rng = np.random.default_rng(0)
    owners = rng.permutation(np.repeat(np.arange(200), rng.integers(1, 30, 200)))
    x = np.column_stack([owners / 200, rng.choice([-1.0, 1.0], len(owners))])
    y = (x[:, 1] > 0).astype(int)
    trained, twice, honest = [set[int]()], set[int](), DPLogisticRegression.fit

    def fit(self: Any, X: Any, *rest: Any, persons: Any) -> Any:
        assert len(persons) == len(X)
        trained.append(set((X[:, 0] * 200).round().astype(int).tolist()))
        return honest(self, X, *rest, persons=persons)

    def values(model: Any, X: Any, y: Any, units: Any) -> Any:
        scored = set((X[:, 0] * 200).round().astype(int).tolist())
        twice.update(scored & trained[-1])
        found = all_values(model, X, y, units)
        if len(found) != len(scored) or np.abs(found).max() > 0.5:
            twice.update(scored)
        return found

    all_values = records.values_of_units
    with monkeypatch.context() as patched:
        patched.setattr(DPLogisticRegression, "fit", fit)
        patched.setattr(records, "values_of_units", values)
        model = DPLogisticRegression(data_norm=2.0, classes=[0, 1], rows_per_person=4)
        found = DPSearchCV(model, {"steps": [5, 10]}, epsilon=4.0, delta=1e-4, noise_seed=1)
        found.fit(x, y, persons=owners)
    assert len(trained) > 1
    assert found.privacy_.unit == "person"
    assert "at most 4 of them" in str(found.privacy_)
    return twice


def test_a_person_trains_or_scores_with_all_rows_and_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not persons_who_count_twice(monkeypatch)
    honest = Persons.numbers.fget
    assert honest is not None
    wrong = property(lambda self: np.roll(honest(self), 1))  # another's rows
    monkeypatch.setattr(Persons, "numbers", wrong)
    assert persons_who_count_twice(monkeypatch)


def test_the_number_of_trials_has_its_law() -> None:
    stream, mean = KeyStream.from_seed(0, "test"), 5.0
    counts = np.array([logarithmic_count(stream, mean) for _ in range(4000)])
    gamma = logarithmic_parameter(mean)
    k = np.arange(1, 9)
    law = (1 - gamma) ** k / k / -math.log(gamma)
    seen = np.array([*[(counts == i).sum() for i in k], (counts > 8).sum()])
    assert chisquare(seen, 4000 * np.array([*law, 1 - law.sum()])).pvalue > 1e-6
    assert counts.mean() == pytest.approx(mean, rel=0.1)
    drawn = np.bincount([even_choice(stream, 3) for _ in range(3000)], minlength=3)
    assert chisquare(drawn).pvalue > 1e-6
    assert {even_choice(stream, 1) for _ in range(5)} == {0}


def test_the_event_is_stored_and_filtered() -> None:
    event = search_event(1.0, 1e-6, "zero-out", 10.0)
    assert event_from_json(event_to_json(event)) == event
    once = renyi_divergence(event.event, 8.0, "zero-out")
    assert once < renyi_divergence(event, 8.0, "zero-out") < 12 * once
    with dpoptim.Ledger(neighboring="zero-out", epsilon=4.0, delta=1e-6) as ledger:
        for _ in range(2):
            gate = TrialsGate(
                event=event,
                neighboring="zero-out",
                ledger=ledger,
                noise=KeyStream.from_seed(0, "t"),
                label="x",
            )
            assert set(gate.draw(3)) <= {0, 1, 2}
            gate.finish()
        assert len(ledger.entries()) == 2


def best_of_many(shift: float, mu: float, mean: float, runs: int, seed: int) -> np.ndarray:
    """The best of a search's trials, many times over, each trial being a Gaussian of that
    shift.
    """
    rng = np.random.default_rng(seed)
    counts = rng.logseries(1 - logarithmic_parameter(mean), runs)
    scores = rng.normal(mu * shift, 1.0, counts.sum())
    return np.maximum.reduceat(scores, np.concatenate([[0], np.cumsum(counts)[:-1]]))


def test_an_attack_on_the_best_score_stays_below_the_claim_and_refutes_uncharged_losers() -> None:
    """With losers uncharged, each trial would be as sharp as one fit of the whole budget."""
    epsilon, delta, mean, runs = 2.0, 1e-5, 30.0, 60_000
    charged = 1 / search_event(epsilon, delta, "zero-out", mean).event.noise_multiplier
    found = []
    for mu in (charged, gdp_mu(epsilon, delta)):
        absent, present = (best_of_many(s, mu, mean, runs, 5 + int(s)) for s in (0.0, 1.0))
        lower = 0.0
        for threshold in np.linspace(-3.0, 5.0, 33):
            for p, q in (
                ((present > threshold), (absent > threshold)),
                ((absent <= threshold), (present <= threshold)),
            ):
                # Five standard deviations on each rate.
                low = p.mean() - 5 * math.sqrt(max(p.mean(), 1e-4) / runs)
                high = q.mean() + 5 * math.sqrt(max(q.mean(), 1e-4) / runs)
                lower = max(lower, math.log((low - delta) / high) if low > delta else 0.0)
        found.append(lower)
    assert 0.1 < found[0] <= epsilon
    assert found[1] > 1.5 * found[0]


def test_a_pipeline_is_refused_by_its_name_before_its_table_is_looked_at() -> None:
    """It was told that the table holds what is not a number, which is right for a pipeline."""
    pipeline = PrivatePipeline(
        [("codes", DPOneHot([["north", "south"]])), ("model", DPLogisticRegression(classes=[0, 1]))]
    )
    search = DPSearchCV(pipeline, {"model__steps": [5]}, epsilon=1.0)
    with pytest.raises(ValueError, match=r"got PrivatePipeline: .* Fix: "):
        search.fit(np.array([["north"], ["south"]] * 20, dtype=object), np.arange(40) % 2)


def test_the_estimators_own_epsilon_is_not_dropped_without_a_word() -> None:
    x, y = table_with("y", 1)
    told = DPLogisticRegression(epsilon=3.0, classes=[0, 1])
    search = DPSearchCV(told, [{}, {"l2": [0.1]}], epsilon=1.0, delta=1e-5, noise_seed=0)
    with pytest.warns(UserWarning, match=r"epsilon=3.0 is not used: .* its own, epsilon=1.0"):
        search.fit(x, y)
    (said,) = (note for note in search.privacy_.notes if "each trial is" in note)
    trial, alone = (float(each) for each in re.findall(r"([\d.]+)-GDP", said))
    assert trial < alone / 1.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", RepeatedFitWarning)
        clone(search).set_params(estimator__epsilon=1.0).fit(x, y)


@pytest.mark.parametrize("mean_trials", [2.0, 20.0])
def test_a_search_over_the_budget_says_which_one_fits(mean_trials: float) -> None:
    """To the letter; and nearly the largest: twice as much does not."""
    x, y = np.linspace(-1, 1, 40)[:, None], np.repeat([0, 1], 20)
    ledger = dpoptim.Ledger(epsilon=3.0, delta=1e-5, neighboring="zero-out")

    def search(epsilon: float) -> None:
        DPSearchCV(
            base(), GRID, epsilon=epsilon, delta=1e-5, mean_trials=mean_trials, ledger=ledger
        ).fit(x, y)

    search(1.0)
    with pytest.raises(dpoptim.BudgetExceeded, match="Fix: a search of epsilon=") as raised:
        search(2.9)
    assert "its steps" not in str(raised.value)
    fits = float(str(raised.value).rpartition("epsilon=")[2].split()[0])
    with pytest.raises(dpoptim.BudgetExceeded):
        search(1.2 * fits)
    search(fits)
    assert len(ledger.entries()) == 2
