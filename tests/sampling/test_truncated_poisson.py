"""Batches of a largest size: the event knows of it (that coins choose who is left out is
what `audit.participation` tests).
"""

import dp_accounting
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.accounting.event_json import event_from_json, event_to_json
from dpoptim.audit.attack_families import attack
from dpoptim.sampling import PoissonSampling, TruncatedPoissonSampling

ARGUMENTS = {"n": 300, "batch_size": 60, "steps": 5, "noise_multiplier": 1.0, "delta": 1e-6}


def test_the_event_is_the_truncated_one_and_survives_json() -> None:
    plan = dpoptim.DPSGD(1.0, largest_batch=1.1).plan(**ARGUMENTS)
    step = dp_accounting.TruncatedSubsampledGaussianDpEvent(300, 0.2, 66, 1.0)
    assert plan.event == dp_accounting.SelfComposedDpEvent(step, 5)
    assert plan.neighboring == "zero-out"
    assert event_from_json(event_to_json(plan.event)) == plan.event
    assert dpoptim.Plan.from_json(plan.to_json()) == plan
    plain = dpoptim.DPSGD(1.0).plan(**ARGUMENTS, neighboring="zero-out")
    roomy = dpoptim.DPSGD(1.0, largest_batch=3).plan(**ARGUMENTS)
    # what pushes others out costs, and what never happens does not
    assert plan.guarantee.epsilon > 1.02 * plain.guarantee.epsilon
    assert roomy.guarantee.epsilon == pytest.approx(plain.guarantee.epsilon, rel=2e-3)
    calibrated = dpoptim.DPSGD(1.0, largest_batch=1.1).plan(
        n=300, batch_size=60, steps=5, epsilon=3.0, delta=1e-6
    )
    assert 2.97 <= calibrated.guarantee.epsilon <= 3


def test_a_run_charges_it_and_delivers_no_more() -> None:
    plan = dpoptim.DPSGD(1.0, largest_batch=1.0).plan(**ARGUMENTS)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.Ledger(neighboring="zero-out") as ledger:
        data = TensorDataset(torch.ones(300, 2))
        with dpoptim.attach(plan, model, optimizer, data, ledger=ledger) as private:
            for (x,) in private.batches():
                assert len(x) <= 60
                private.backward(model(x)[:, 0])
                optimizer.step()
        (entry,) = ledger.entries()
        assert entry.event == plan.event


@pytest.mark.variants
def test_the_attack_comes_near_the_claim() -> None:
    plan = dpoptim.DPSGD(1.0, largest_batch=1.5).plan(
        n=400, batch_size=200, steps=4, noise_multiplier=1.0, delta=1e-5
    )
    found = attack(plan, 12_000, 0)
    assert found.verdict == "consistent"
    assert found.lower_bound > 0.85 * found.limit


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="largest_batch must be at least 1"):
        dpoptim.DPSGD(1.0, largest_batch=0.9)
    with pytest.raises(ValueError, match="neighboring='add-or-remove-one'"):
        dpoptim.DPSGD(1.0, largest_batch=1.1).plan(**ARGUMENTS, neighboring="add-or-remove-one")
    with pytest.raises(ValueError, match="one process"):
        TruncatedPoissonSampling(0.1, 10, 2).shard(5)
    assert PoissonSampling(0.1).capacity(1000) > TruncatedPoissonSampling(0.1, 1000, 110).capacity(
        1000
    )
