"""Targets that take up a small part of their public range are learnt in that part."""

from typing import Any

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent

from dpoptim import Ledger
from dpoptim.errors import LedgerError
from dpoptim.estimators import DPLinearRegression, DPSGDRegressor
from dpoptim.preprocessing import DPStandardScaler, PrivatePipeline

ROWS, COLUMNS = 4_000, 3
SHARED: Any = {"delta": 1e-5, "noise_seed": 0}


def table(fill: float, middle: float, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Columns in [-1, 1], and targets that scatter by ``fill`` / 3 about ``middle``."""
    rng = np.random.default_rng(1)
    x = rng.uniform(-1, 1, (rows, COLUMNS))
    y = x @ [1.0, -0.5, 0.5] + 0.4 * rng.normal(size=rows)
    return x, np.clip(middle + fill / 3 * y / y.std(), -1, 1)


@pytest.mark.set_aside("0.1-0.5")
@pytest.mark.parametrize(("fill", "middle"), [(1.0, 0.0), (0.1, 0.5), (0.01, -0.8)])
def test_more_epsilon_is_never_worse_however_little_of_the_range_targets_take_up(
    fill: float, middle: float
) -> None:
    x, y = table(fill, middle)
    best = np.corrcoef(y, x @ np.linalg.lstsq(x, y - y.mean(), rcond=None)[0])[0, 1] ** 2
    scores = [
        DPLinearRegression(epsilon, target_bound=1.0, **SHARED).fit(x, y).score(x, y)
        for epsilon in (0.5, 1.0, 3.0, 5.0, 10.0, 30.0)
    ]
    assert (np.diff(scores) > -0.02).all()
    assert scores[0] > 0.8 * best
    assert scores[1] > 0.95 * best


@pytest.mark.parametrize("epsilon", [0.5, 30.0])
def test_targets_that_no_column_explains_get_their_mean(epsilon: float) -> None:
    """About 0 is as good as the mean: noise costs a little, and little of it is left."""
    x, y = table(0.02, 0.6)
    y = np.roll(y, 1)
    assert DPLinearRegression(epsilon, target_bound=1.0, **SHARED).fit(x, y).score(x, y) > -0.05


def test_the_whole_fit_is_one_entry_of_a_ledger() -> None:
    x, y = table(0.1, 0.5)
    ledger = Ledger(epsilon=1.0, delta=1e-5, neighboring="zero-out")
    fitted = DPLinearRegression(1.0, target_bound=1.0, ledger=ledger, **SHARED).fit(x, y)
    assert len(ledger.entries()) == 1
    assert fitted.privacy_.epsilon == pytest.approx(1.0)


def test_long_tails_do_not_draw_predictions_towards_the_median() -> None:
    """Of counts with a long tail the mean prediction was 7 % of their scatter too low."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (20_000, 2))
    y = np.minimum(rng.poisson(np.exp(0.3 + 0.5 * x[:, 0] + 1.2 * rng.normal(size=len(x)))), 100)
    model = DPLinearRegression(1.0, target_bound=(0.0, 100.0), **SHARED).fit(x, y)
    assert abs(model.predict(x).mean() - y.mean()) < 0.035 * y.std()
    owners = np.repeat(np.arange(len(x) // 2), 2)
    model = DPLinearRegression(2.0, target_bound=(0.0, 100.0), rows_per_person=2, **SHARED)
    assert abs(model.fit(x, y, persons=owners).predict(x).mean() - y.mean()) < 0.035 * y.std()


def test_what_a_solver_refuses_costs_nothing() -> None:
    x, y = table(0.1, 0.5)
    ledger = Ledger(neighboring="zero-out")
    wrong = DPLinearRegression(
        1.0, target_bound=1.0, solver_options={"momentums": 0.5}, ledger=ledger, **SHARED
    )
    with pytest.raises(TypeError, match="momentums"):
        wrong.fit(x, y)
    assert not ledger.entries()


def test_chunks_stay_in_the_part_that_the_first_one_found() -> None:
    x, y = table(0.01, -0.8)
    model = DPLinearRegression(2.0, target_bound=1.0, **SHARED)
    for rows in (slice(2_000), slice(2_000, None)):
        model.partial_fit(x[rows], y[rows])
    assert model.score(x, y) > 0.7


def test_persons_with_several_rows() -> None:
    x, y = table(0.02, 0.5)
    owners = np.repeat(np.arange(ROWS // 2), 2)
    model = DPLinearRegression(4.0, target_bound=1.0, rows_per_person=3, **SHARED)
    assert model.fit(x, y, persons=owners).score(x, y) > 0.7


NETWORK: Any = {**SHARED, "target_bound": 1.0, "random_state": 0, "hidden_layer_sizes": (8,)}


@pytest.mark.set_aside("0.1-0.5")
@pytest.mark.parametrize(("fill", "middle"), [(1.0, 0.0), (0.1, 0.5), (0.01, -0.8)])
def test_networks_learn_however_little_of_the_range_targets_take_up(
    fill: float, middle: float
) -> None:
    """In the whole range R2 is 0.4 at a tenth, and -60 at a hundredth."""
    x, y = table(fill, middle)
    model = DPSGDRegressor(3.0, epochs=20, **NETWORK).fit(x, y)
    assert model.score(x, y) > 0.6
    assert model.privacy_.epsilon <= 3.0


def test_a_networks_fit_is_one_entry_of_a_ledger_and_all_of_its_budget() -> None:
    x, y = table(0.1, 0.5)
    ledger = Ledger(epsilon=1.0, delta=1e-5, neighboring="zero-out")
    model = DPSGDRegressor(1.0, epochs=2, ledger=ledger, **NETWORK).fit(x, y)
    assert len(ledger.entries()) == 1
    assert 0.98 < model.privacy_.epsilon <= 1.0
    wrong = DPSGDRegressor(1.0, epochs=2, projection=-1.0, ledger=ledger, **NETWORK)
    with pytest.raises(ValueError, match="projection"):
        wrong.fit(x, y)
    assert len(ledger.entries()) == 1


def test_a_pipeline_ends_within_its_budget() -> None:
    x, y = table(0.05, 0.5)
    network = DPSGDRegressor(epochs=10, **NETWORK)
    steps = [("scale", DPStandardScaler(lower=-1.0, upper=1.0, noise_seed=0)), ("network", network)]
    pipeline = PrivatePipeline(steps, epsilon=2.0, delta=1e-5).fit(x, y)
    assert 1.96 < pipeline.privacy_.epsilon <= 2.0
    assert pipeline.score(x, y) > 0.6


def test_networks_of_chunks_and_of_persons_with_several_rows() -> None:
    x, y = table(0.02, -0.8)
    chunks = DPSGDRegressor(3.0, epochs=10, **NETWORK)
    for rows in (slice(2_000), slice(2_000, None)):
        chunks.partial_fit(x[rows], y[rows])
    assert chunks.score(x, y) > 0.6
    owners = np.repeat(np.arange(ROWS // 2), 2)
    model = DPSGDRegressor(8.0, epochs=10, rows_per_person=2, **NETWORK)
    assert model.fit(x, y, persons=owners).score(x, y) > 0.6
    assert model.privacy_.unit == "person"


@pytest.mark.filterwarnings("ignore::dpoptim.estimators.RepeatedFitWarning")
def test_a_pipeline_whose_network_goes_on_fits_again() -> None:
    """The first fit finds the range; the others keep it, and are charged for their network."""
    x, y = table(0.05, 0.5)
    ledger = Ledger(neighboring="zero-out")
    network = DPSGDRegressor(epochs=2, warm_start=True, **NETWORK)
    steps = [("scale", DPStandardScaler(lower=-1.0, upper=1.0, noise_seed=0)), ("m", network)]
    pipeline = PrivatePipeline(steps, epsilon=2.0, delta=1e-5, ledger=ledger)
    for _ in range(2):
        assert pipeline.fit(x, y).privacy_.epsilon <= 2.0
    assert [entry.state for entry in ledger.entries()] == ["committed"] * 2
    first, second = (entry.event.events[-1] for entry in ledger.entries())
    assert isinstance(first, ComposedDpEvent)
    assert not isinstance(second, ComposedDpEvent)


@pytest.mark.parametrize("kind", [DPLinearRegression, DPSGDRegressor])
def test_runs_on_persons_are_entered_as_such(kind: Any) -> None:
    """Ledgers refuse to add up runs on records and on persons."""
    x, y = table(0.05, 0.5)
    owners = np.repeat(np.arange(ROWS // 2), 2)
    settings: Any = {**NETWORK, "epochs": 1} if kind is DPSGDRegressor else SHARED
    ledger = Ledger(neighboring="zero-out")
    model = kind(4.0, **{**settings, "target_bound": 1.0}, ledger=ledger)
    model.fit(x, y, persons=owners)
    assert [entry.unit for entry in ledger.entries()] == ["person"]
    with pytest.raises(LedgerError, match="do not add up"):
        model.fit(x, y)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stated", [3_600, 3_000, 2_000, 1_500])
def test_a_number_of_records_that_is_wrong_does_not_mislead_the_range(stated: int) -> None:
    x, y = table(0.1, 0.5)
    model = DPSGDRegressor(4.0, neighboring="add-or-remove-one", n=stated, epochs=10, **NETWORK)
    assert model.fit(x, y).score(x, y) > 0.0


def test_a_clip_norm_by_hand_keeps_the_whole_range() -> None:
    x, y = table(0.01, -0.8)
    ledger = Ledger(neighboring="zero-out")
    DPSGDRegressor(3.0, epochs=1, clip_norm=0.3, ledger=ledger, **NETWORK).fit(x, y)
    assert not isinstance(ledger.entries()[0].event, ComposedDpEvent)  # the network's alone
