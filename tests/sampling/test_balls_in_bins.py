"""Balls in bins: who takes part when, and the mixture that a run is charged as."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.accounting.balls_in_bins import BallsInBinsDpEvent
from dpoptim.noise.correlated import BandedToeplitz
from dpoptim.noise.stream import KeyStream
from dpoptim.sampling import BallsInBins
from dpoptim.sampling.balls_in_bins import mixture_event

ARGUMENTS = {"n": 60, "batch_size": 20, "epochs": 2, "noise_multiplier": 0.8, "delta": 1e-5}


def test_each_record_takes_part_once_a_pass_in_a_bin_of_its_own() -> None:
    drawn = BallsInBins.of(4).batches(KeyStream.from_seed(0, "test"), 4000)
    found = np.zeros((12, 4000), dtype=bool)
    for step in range(12):
        found[step, next(drawn)] = True
    passes = found.reshape(3, 4, 4000)
    assert (passes.sum(1) == 1).all()
    assert (passes == passes[0]).all()
    assert abs(passes[0].sum(1) - 1000).max() < 5 * np.sqrt(750)


@pytest.mark.parametrize("steps", [6, 7, 8])
def test_inner_products_are_at_least_those_of_the_strategy(steps: int) -> None:
    strategy, bins = BandedToeplitz(2), 3
    column, rows = strategy.coefficients(steps)
    matrix = np.sqrt(rows)[:, None] * sum(c * np.eye(steps, k=-k) for k, c in enumerate(column))
    means = strategy.outputs_of_bins(steps, bins)
    for start in range(bins):
        assert means[:, start] == pytest.approx(matrix[:, start::bins].sum(1))
    event = mixture_event(means, 1.0, 1.0)
    for i, j in itertools.product(range(bins), repeat=2):
        assert event.gram[abs(i - j)] >= float(means[:, i] @ means[:, j])
    with pytest.raises(ValueError, match="C >= 0"):
        mixture_event(-means, 1.0, 1.0)


def test_a_plan_charges_the_mixture_at_the_noise_of_its_query() -> None:
    method = dpoptim.DPFTRL(0.5, sampling="balls-in-bins", bands=2)
    plan = method.plan(**ARGUMENTS)
    assert plan.neighboring == "add-or-remove-one"
    assert plan.steps == 6
    assert isinstance(plan.event, BallsInBinsDpEvent)
    assert plan.event.gram[0] == pytest.approx(1.0, rel=1e-6)
    query = plan.query
    assert query.standard_deviation == pytest.approx(
        0.8 * 0.5 * BandedToeplitz(2).sensitivity(6, 2, 3, regular=True)
    )
    assert plan.guarantee.accountant == "Monte Carlo"
    assert "chance to fail" in plan.describe()
    assert dpoptim.Plan.from_json(plan.to_json()) == plan
    told = dpoptim.accounting.compute_epsilon(plan.event.told, 1e-5, "zero-out").epsilon
    assert plan.guarantee.epsilon < 0.95 * told


def test_a_run_is_charged_so_and_budgets_are_calibrated() -> None:
    plan = dpoptim.DPFTRL(1.0, sampling="balls-in-bins", bands=2).plan(
        n=60, batch_size=20, epochs=1, epsilon=3.0, delta=1e-5
    )
    assert 2.9 <= plan.guarantee.epsilon <= 3.0
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.Ledger(neighboring="add-or-remove-one", epsilon=3.1, delta=1e-5) as ledger:
        data = TensorDataset(torch.ones(60, 2))
        with dpoptim.attach(plan, model, optimizer, data, ledger=ledger) as private:
            seen = 0
            for (x,) in private.batches():
                seen += len(x)
                private.backward(model(x)[:, 0])
                optimizer.step()
        assert seen == 60
        (entry,) = ledger.entries()
        assert entry.event == plan.event


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"noise": "tree"}, "leave noise and order out"),
        ({"bands": None}, "bands is missing"),
        ({"neighboring": "replace-one"}, "neighboring='replace-one'"),
    ],
)
def test_what_has_no_theorem_is_refused(settings: dict[str, object], said: str) -> None:
    given = {"sampling": "balls-in-bins", "bands": 2, **settings}
    relation = given.pop("neighboring", None)
    with pytest.raises(ValueError, match=said):
        dpoptim.DPFTRL(1.0, **given).plan(**ARGUMENTS, neighboring=relation)  # type: ignore[arg-type]
