"""Runs of one process on the same records and different ledgers: said aloud, and in the basis."""

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

import dpoptim
from dpoptim.accounting.guarantee import rounded_up

N = 24
WARNING = dpoptim.OtherRunsWarning


def plan(n: int = N, **settings: Any) -> dpoptim.Plan:
    asked = {"batch_size": 3, "steps": 2, "noise_multiplier": 1.0, "delta": 1e-3} | settings
    return dpoptim.DPSGD(clip_norm=1.0).plan(n=n, **asked)


def table() -> TensorDataset:
    return TensorDataset(torch.randn(N, 3), torch.randn(N, 1))


def train(data: Any, steps: int = 1, **settings: Any) -> dpoptim.PrivateTraining:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    asked = settings.pop("plan", None) or plan(len(data))
    with dpoptim.attach(asked, model, optimizer, data, **settings) as private:
        for _, (x, y) in zip(range(steps), private.batches(), strict=False):
            private.backward((model(x) - y).square().sum(1))
            optimizer.step()
            optimizer.zero_grad()
    return private


def lines(private: dpoptim.PrivateTraining) -> list[str]:
    return [each.text for each in private.basis if "this run alone" in each.text]


def test_a_rate_test_before_the_training_is_added_up() -> None:
    data = table()
    rates = train(data)
    with pytest.warns(WARNING, match="one more run of this process .* one ledger"):
        final = train(data)
    both = dpoptim.Ledger()
    for _ in range(2):
        both.reserve(final.plan.event, neighboring="add-or-remove-one", label="one")
    together = both.spent(1e-3).epsilon
    assert together > final.spent().epsilon
    for run in (rates, final):
        (line,) = lines(run)
        assert f"epsilon={rounded_up(together)} " in line
        assert not any("added up elsewhere" in each.text for each in run.basis)


ANOTHER: dict[str, Callable[[Any], Any]] = {
    "a part of it": lambda data: Subset(data, range(10)),
    "a part of a part": lambda data: Subset(Subset(data, range(3, 20)), [0, 1, 2]),
    "the same tensors": lambda data: TensorDataset(*data.tensors),
    "views of it": lambda data: dpoptim.data.views(data, lambda x: x, 1),
}


@pytest.mark.parametrize("name", ANOTHER)
def test_records_are_known_again(name: str) -> None:
    data = table()
    train(Subset(data, range(5)))
    with pytest.warns(WARNING):
        train(ANOTHER[name](data))


def test_records_of_hugging_face_are_known_again() -> None:
    arrow = pytest.importorskip("datasets")
    data = arrow.Dataset.from_dict({"x": [[0.0] * 3] * N, "y": [[1.0]] * N}).with_format("torch")
    parts = data.select([0, 1, 2, 3, 4, 5]), data.select([5, 6, 7, 8]), data.select([9, 10, 11])

    def run(part: Any) -> None:
        private = dpoptim.attach(
            plan(len(part)),
            model := nn.Linear(3, 1),
            torch.optim.SGD(model.parameters(), 0.1),
            part,
        )
        with private:
            for batch in private.batches():
                private.backward((model(batch["x"]) - batch["y"]).square().sum(1))
                private.optimizers[0].step()
                break

    run(parts[0])
    run(parts[2])
    with pytest.warns(WARNING):
        run(parts[1])


def test_who_shares_a_ledger_or_no_records_is_left_in_peace() -> None:
    """And whoever released nothing, has no noise, or is repeatable, which promises nothing."""
    data = table()
    ledger = dpoptim.Ledger()
    train(data, ledger=ledger)
    assert not lines(train(data, ledger=ledger))
    data = table()
    train(data, steps=0)
    train(data, noise_seed=1)
    train(data, plan=plan(noise_multiplier=0.0))
    train(Subset(data, range(10)))
    train(Subset(data, range(10, 20)))
    del data
    gc.collect()
    for _ in range(20):  # whose memory is that of earlier ones
        train(table())


def test_a_run_that_goes_on_is_one_run(tmp_path: Path) -> None:
    data, path = table(), tmp_path / "checkpoint"
    model = nn.Linear(3, 1)
    for resume in (None, path):  # without a ledger, each part has one of its own
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with dpoptim.attach(plan(), model, optimizer, data, resume=resume) as private:
            x, y = next(iter(private.batches()))
            private.backward((model(x) - y).square().sum(1))
            optimizer.step()
            private.save(path)
        assert not lines(private)
    with pytest.warns(WARNING, match="one more run"):
        train(data)


def test_the_figure_is_left_out_where_runs_do_not_add_up() -> None:
    data = table()
    train(data)
    with pytest.warns(WARNING, match="do not add up"):
        train(data, persons=list(range(N)))


def test_as_an_error_it_comes_before_anything_is_charged() -> None:
    data, ledger = table(), dpoptim.Ledger()
    train(data)
    with warnings.catch_warnings(), pytest.raises(WARNING):
        warnings.simplefilter("error")
        train(data, ledger=ledger)
    assert not ledger.entries()
