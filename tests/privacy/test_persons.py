"""A plan for persons is kept for persons: from the plan to the certificate."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.estimators import DPLogisticRegression
from dpoptim.privacy_unit import Unit
from dpoptim.tuning import DPSearchCV


def plan_for_persons(n: int = 8) -> dpoptim.Plan:
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=n, batch_size=n, steps=1, noise_multiplier=1.0, delta=1e-5
    )
    return replace(plan, unit=Unit("person", 3))


def test_the_plan_says_whom_it_protects() -> None:
    records = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=1000, batch_size=100, steps=10, noise_multiplier=1.0, delta=1e-5
    )
    persons = replace(records, unit=Unit("person", 8))
    assert "per person" in str(persons.guarantee)
    assert "per person" not in str(records.guarantee)
    assert persons.guarantee.epsilon == records.guarantee.epsilon
    assert not any("no person contributed more than one" in each.text for each in persons.basis)
    assert any("owner of every row" in each.text for each in persons.basis)
    enforced = [each.text for each in persons.basis if each.kind == "enforced"]
    assert any("each person adds at most" in text for text in enforced)
    assert any("each person joins each step" in text for text in enforced)
    assert not any("each record" in text for text in enforced)
    assert dpoptim.Plan.from_json(persons.to_json()) == persons
    assert dpoptim.Plan.from_json(records.to_json()) == records


def test_a_plan_for_persons_does_not_run_on_records() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.zeros(16, 2), torch.zeros(16))
    with pytest.raises(
        ValueError,
        match=r"protects persons with at most 3 rows.*persons=..., "
        r"rows_per_record=3",
    ):
        dpoptim.attach(plan_for_persons(), model, optimizer, data)
    owners = np.arange(16) % 8
    with pytest.raises(ValueError, match="rows_per_record=3"):
        dpoptim.attach(
            plan_for_persons(), model, optimizer, data, persons=owners, rows_per_record=4
        )
    with dpoptim.attach(
        plan_for_persons(), model, optimizer, data, persons=owners, rows_per_record=3
    ) as private:
        texts = [each.text for each in private.basis]
        assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("unit", [("household", 2), ("person", 0), ("person", 1.5)])
def test_other_units_are_refused(unit: tuple[str, int]) -> None:
    with pytest.raises(ValueError, match="unit"):
        Unit(*unit)


def test_runs_for_persons_and_for_records_are_not_charged_to_one_ledger() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, owners = TensorDataset(torch.zeros(16, 2), torch.zeros(16)), np.arange(16) % 8
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=8, batch_size=8, steps=1, noise_multiplier=4.0, delta=1e-5, neighboring="zero-out"
    )
    ledger = dpoptim.Ledger(epsilon=8.0, delta=1e-5, neighboring="zero-out")
    with dpoptim.attach(plan, model, optimizer, data, persons=owners, ledger=ledger) as private:
        for x, y in private.batches():
            private.backward((model(x).squeeze(1) - y).square())
            optimizer.step()
        private.evaluate(data, epsilon=0.1, target_bound=1.0, persons=owners.tolist(), noise_seed=0)
    with pytest.raises(dpoptim.LedgerError, match="do not add up"):
        dpoptim.attach(replace(plan, n=16), model, optimizer, data, ledger=ledger)
    assert [run.unit for run in ledger.entries()] == ["person", "person"]
    assert "per person" in str(ledger.spent())
    x, y = np.random.default_rng(0).random((16, 2)), np.arange(16) % 2
    fit = DPLogisticRegression(
        epsilon=0.5, delta=1e-5, neighboring="zero-out", ledger=ledger, noise_seed=0
    )
    fit.fit(x, y, persons=owners)
    with pytest.raises(dpoptim.LedgerError, match="do not add up"):
        fit.fit(x, y)
    assert {run.unit for run in ledger.entries()} == {"person"}


def test_persons_are_divided_by_secret_coins_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stood before Ann and stands behind her now is as likely to be held out as before."""
    found: list[np.ndarray] = []
    fit = DPLogisticRegression.fit

    def noted(self: Any, X: Any, *rest: Any, **options: Any) -> Any:
        found.append(X[:, 0])
        return fit(self, X, *rest, **options)

    monkeypatch.setattr(DPLogisticRegression, "fit", noted)
    others = np.arange(20)
    for names in ([-1, *others], [*others, -1]):  # her first row is the first, or the last
        times, runs = np.zeros(20), 60
        for _ in range(runs):
            model = DPLogisticRegression(classes=[0, 1], neighboring="replace-one", steps=1)
            search = DPSearchCV(model, {"l2": [0.0]}, delta=1e-5, mean_trials=1.5, holdout=0.5)
            x = np.array(names, dtype=float)[:, None] / 32
            search.fit(x, np.array(names) % 2, persons=names)
            times += np.isin(others, (found[-1] * 32).astype(int))
        # of a binomial of 1/2, 5.8 standard deviations: 60 runs in 20 places, wrong once in 10^7
        assert np.abs(times / runs - 11 / 21).max() < 0.375


@pytest.mark.parametrize("relation", ["replace-one", "zero-out"])
def test_batches_in_the_given_order_are_not_for_persons_who_are_replaced(relation: str) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, owners = TensorDataset(torch.zeros(16, 2), torch.zeros(16)), np.arange(16) % 8

    def enter(relation: str, order: Any) -> None:
        plan = dpoptim.DPFTRL(clip_norm=1.0, order=order).plan(
            n=8, batch_size=4, epochs=1, noise_multiplier=4.0, delta=1e-5, neighboring=relation
        )
        with dpoptim.attach(plan, model, optimizer, data, persons=owners):
            pass

    enter("replace-one", "shuffled")
    if relation == "zero-out":
        enter(relation, "given")
    else:
        with pytest.raises(ValueError, match=r"Fix: neighboring='zero-out'.*order='shuffled'"):
            enter(relation, "given")


def test_chunks_are_not_for_persons_who_are_replaced() -> None:
    x, y = np.zeros((16, 2)), np.arange(16) % 2
    model = DPLogisticRegression(classes=[0, 1], neighboring="replace-one", delta=1e-5)
    model.partial_fit(x, y, persons=np.arange(16) % 8)
    with pytest.raises(ValueError, match="may be in another chunk. Fix: neighboring='zero-out'"):
        model.partial_fit(x, y, persons=np.arange(16) % 8)
