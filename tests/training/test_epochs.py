"""Epochs: the plan's steps in parts, whatever memory holds and wherever a run goes on."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim import PrivacyError, PrivateTraining


def attached(steps: int = 10, **options: object) -> tuple[PrivateTraining, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=40, batch_size=8, steps=steps, noise_multiplier=1.0, delta=1e-3
    )
    data = TensorDataset(torch.randn(40, 3), torch.randint(2, (40,)))
    return dpoptim.attach(plan, model, optimizer, data, **options), optimizer


def train(
    private: PrivateTraining, optimizer: torch.optim.Optimizer, batches: Iterable[object]
) -> None:
    for x, y in batches:
        private.backward(F.cross_entropy(private.model(x), y, reduction="none"))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("physical_batch_size", [None, 3])
def test_epochs_share_out_all_steps(physical_batch_size: int | None) -> None:
    private, optimizer = attached()
    with private:
        batches = private.batches(physical_batch_size=physical_batch_size)
        ends = []
        for epoch in private.epochs(3, batches):
            train(private, optimizer, epoch)
            ends.append((epoch.number, epoch.steps, private.steps_done))
    assert ends == [(0, 3, 3), (1, 3, 6), (2, 4, 10)]


def test_there_are_as_many_as_the_plan_goes_through_the_data_set() -> None:
    private, optimizer = attached()
    with private:
        epochs = private.epochs()
        assert [len(epoch) for epoch in epochs] == [5, 5]
        for epoch in epochs:
            train(private, optimizer, epoch)
    assert private.steps_done == 10


def test_batches_that_grow_make_as_many_epochs_as_the_plan_says() -> None:
    """Of a step's first size there would be 2."""
    model = torch.nn.Linear(3, 2)
    plan = dpoptim.DPSGD(clip_norm=1.0, batch_schedule=((5, 3),)).plan(
        n=40, batch_size=8, steps=10, noise_multiplier=1.0, delta=1e-3
    )
    data = TensorDataset(torch.randn(40, 3), torch.randint(2, (40,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = dpoptim.attach(plan, model, optimizer, data)
    assert [epoch.steps for epoch in private.epochs()] == [5, 1, 2, 2]  # of 1, 0.6, 1.2, 1.2 passes
    assert round(plan.epochs) == 4
    assert [epoch.steps for epoch in private.epochs(10)] == [1] * 10


def test_fewer_steps_than_an_epoch_are_one() -> None:
    private, _ = attached(steps=2)
    assert [epoch.steps for epoch in private.epochs()] == [2]


def test_a_resumed_run_begins_with_what_remains_of_an_epoch(tmp_path: Path) -> None:
    private, optimizer = attached()
    with private:
        first = private.epochs(2)[0]
        for _, (x, y) in zip(range(3), first, strict=False):
            train(private, optimizer, [(x, y)])
        private.save(tmp_path / "run")
    private, optimizer = attached(resume=tmp_path / "run")
    with private:
        epochs = private.epochs(2)
        assert [(epoch.number, epoch.steps) for epoch in epochs] == [(0, 2), (1, 5)]
        for epoch in epochs:
            train(private, optimizer, epoch)
    assert private.steps_done == 10


def test_an_epoch_that_is_left_early_lengthens_no_other() -> None:
    private, optimizer = attached()
    with private:
        one, other = private.epochs(2)
        for x, y in one:
            train(private, optimizer, [(x, y)])
            break
        train(private, optimizer, other)
        assert private.steps_done == 6


def test_a_run_that_is_ended_ends_its_epochs() -> None:
    private, optimizer = attached()
    with private:
        for epoch in private.epochs(2):
            for x, y in epoch:
                train(private, optimizer, [(x, y)])
                if private.steps_done == 2:
                    private.finish()
    assert private.steps_done == 2


def test_a_step_that_is_left_out_is_refused() -> None:
    private, _ = attached()
    with private, pytest.raises(PrivacyError, match=r"optimizer\.step\(\) was not called"):
        for epoch in private.epochs(2):
            for x, y in epoch:
                private.backward(F.cross_entropy(private.model(x), y, reduction="none"))


def test_an_epoch_is_gone_through_once() -> None:
    private, optimizer = attached()
    with private:
        epoch = private.epochs(2)[0]
        train(private, optimizer, epoch)
        with pytest.raises(PrivacyError, match="asked for twice"):
            train(private, optimizer, epoch)


def test_numbers_of_batches_that_are_private_are_not_told() -> None:
    private, _ = attached()
    with private:
        epoch = private.epochs(2, private.batches(physical_batch_size=3))[0]
        with pytest.raises(TypeError, match="private"):
            len(epoch)


@pytest.mark.parametrize("count", [0, 11, 1.5])
def test_a_wrong_number_of_epochs_is_named(count: float) -> None:
    private, _ = attached()
    with private, pytest.raises(ValueError, match="count must be a whole number from 1 to 10"):
        private.epochs(count)  # type: ignore[arg-type]


def test_the_usual_two_loops_are_told_of_epochs() -> None:
    private, optimizer = attached()
    with private:
        train(private, optimizer, private.batches())
        with pytest.raises(PrivacyError, match=r"private\.epochs\(\)"):
            train(private, optimizer, private.batches())


def test_epochs_are_of_the_plans_own_batches() -> None:
    private, _ = attached()
    with private, pytest.raises(TypeError, match=r"batches must be private\.batches"):
        private.epochs(2, [])  # type: ignore[arg-type]
