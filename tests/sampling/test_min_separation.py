"""b-min-sep batches: who takes part when, and what a run with them is charged."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.accounting.min_separation import MinSeparationDpEvent
from dpoptim.noise.correlated import BandedToeplitz
from dpoptim.noise.stream import KeyStream
from dpoptim.sampling import MinSeparationSampling
from dpoptim.training.batches.microbatches import BatchQueue
from took_part import took_part

ARGUMENTS: dict[str, Any] = {"n": 60, "batch_size": 10, "epochs": 2, "delta": 1e-5}


def test_steps_are_apart_and_every_batch_is_expected_to_be_as_large() -> None:
    sampler, records, steps = MinSeparationSampling(0.15, 4), 40_000, 24
    found = took_part(sampler, records, steps)
    for lag in range(1, 4):
        assert not (found[lag:] & found[:-lag]).any()
    assert abs(found.sum(1) - 0.15 * records).max() < 5 * np.sqrt(0.15 * 0.85 * records)
    # the first step after the wait has a coin like any other
    again = found[4:] & found[:-4]
    rate = again.sum() / found[:-4].sum()
    assert sampler.rate == pytest.approx(0.15 / (1 - 3 * 0.15))
    assert rate == pytest.approx(sampler.rate, abs=5 * np.sqrt(0.2 / found[:-4].sum()))


def test_records_are_independent_of_each_other() -> None:
    found = took_part(MinSeparationSampling(0.2, 3), 20_000, 9).astype(float)
    left, right = found[:, :10_000], found[:, 10_000:]
    covariances = (left - 0.2) @ (right - 0.2).T / 10_000
    assert abs(covariances).max() < 5 * 0.2 * 0.8 / 100


@pytest.mark.parametrize(("rate", "gap"), [(0.3, 1), (0.25, 4)])
def test_the_limits_are_poisson_batches_and_parts_in_turns(rate: float, gap: int) -> None:
    sampler = MinSeparationSampling(rate, gap)
    found = took_part(sampler, 20_000, 3 * gap)
    if gap == 1:
        assert sampler.rate == pytest.approx(0.3)
        assert (found[0] & found[1]).mean() == pytest.approx(0.09, abs=0.01)
    else:
        assert sampler.rate == 1.0
        assert (found.sum(0) == 3).all()


def test_a_run_goes_on_with_the_same_waits() -> None:
    def queue(seed: int) -> BatchQueue:
        coins = KeyStream.from_seed(seed, "test")
        return BatchQueue(MinSeparationSampling(0.1, 5), coins, 500, 20, together=1)

    whole, batches = queue(3), []
    ahead = whole.ahead()
    for _ in range(9):
        batches.append(next(ahead))
        whole.released()
    resumed = queue(4)  # other coins
    resumed.restore(whole.secret_state())
    rest = resumed.ahead()
    for step in range(9, 13):
        waiting = set(np.concatenate(batches[step - 4 : step]))
        batches.append(next(rest))
        resumed.released()
        assert len(batches[-1])
        assert not set(batches[-1]) & waiting
    assert resumed.steps_released == 13


def test_a_plan_charges_the_columns_of_its_strategy() -> None:
    plan = dpoptim.DPFTRL(0.5, sampling="b-min-sep", bands=3).plan(
        **ARGUMENTS, noise_multiplier=0.9
    )
    event, query = plan.event, plan.query
    assert plan.neighboring == "add-or-remove-one"
    assert isinstance(event, MinSeparationDpEvent)
    column, rows = BandedToeplitz(3).coefficients(plan.steps)
    sensitivity = BandedToeplitz(3).sensitivity(plan.steps)
    assert query.standard_deviation == pytest.approx(0.9 * 0.5 * sensitivity)
    lags = np.subtract.outer(np.arange(plan.steps), np.arange(plan.steps))
    honest = sum(c * (lags == lag) for lag, c in enumerate(column))
    honest = np.sqrt(rows)[:, None] * honest / sensitivity
    charged = event.columns.toarray()
    assert (charged >= honest).all()
    assert charged == pytest.approx(honest, rel=1e-3)
    assert event.rate == pytest.approx(1 / 6 / (1 - 2 / 6))
    assert (event.separation, event.steps) == (3, 12)
    assert plan.guarantee.accountant == "Monte Carlo"
    assert "chance to fail" in plan.describe()
    assert dpoptim.Plan.from_json(plan.to_json()) == plan
    by_turns = dpoptim.DPFTRL(0.5, sampling="cyclic-poisson", bands=3).plan(
        **ARGUMENTS, noise_multiplier=0.9
    )
    assert plan.guarantee.epsilon < by_turns.guarantee.epsilon


def test_independent_noise_of_several_sizes_is_charged_by_the_step() -> None:
    event = MinSeparationSampling(0.1, 2).event(np.array([2.0, 1.0, 4.0]))
    assert isinstance(event, MinSeparationDpEvent)
    assert event.products[:, 0] == pytest.approx([0.25, 1.0, 0.0625], rel=1.1e-3)
    assert event.noise_multiplier == 1.0


def test_a_run_is_charged_so_and_budgets_are_calibrated() -> None:
    plan = dpoptim.DPFTRL(1.0, sampling="b-min-sep").plan(**ARGUMENTS, epsilon=3.0)
    assert 2.9 <= plan.guarantee.epsilon <= 3.0
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.Ledger(neighboring="add-or-remove-one", epsilon=3.1, delta=1e-5) as ledger:
        data = TensorDataset(torch.ones(60, 2))
        with dpoptim.attach(plan, model, optimizer, data, ledger=ledger) as private:
            for (x,) in private.batches():
                private.backward(model(x)[:, 0])
                optimizer.step()
        (entry,) = ledger.entries()
        assert entry.event == plan.event


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"noise": "tree"}, "leave noise and order out"),
        ({"bands": 7}, "leaves too few records"),
        ({"bands": None}, "bands is missing"),
        ({"neighboring": "replace-one"}, "neighboring='replace-one'"),
        ({"epochs": 4000}, "sampling='cyclic-poisson'"),
    ],
)
def test_what_has_no_theorem_is_refused(settings: dict[str, Any], said: str) -> None:
    given = {"sampling": "b-min-sep", "bands": 2, **settings}
    run = {**ARGUMENTS, "noise_multiplier": 1.0, "neighboring": given.pop("neighboring", None)}
    run["epochs"] = given.pop("epochs", 2)
    with pytest.raises(ValueError, match=said):
        dpoptim.DPFTRL(1.0, **given).plan(**run)


def test_strategies_with_other_signs_or_more_bands_are_refused() -> None:
    sampler, rows = MinSeparationSampling(0.1, 2), np.ones(4)
    for column in ([1.0, -0.5], [1.0, 0.5, 0.2]):
        with pytest.raises(ValueError, match="C >= 0 of at most gap=2 bands"):
            sampler.event_of_strategy(np.array(column), rows, 1.0)
