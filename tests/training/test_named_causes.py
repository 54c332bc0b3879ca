"""Habits of loops that are refused, or served, by what they are."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.training.private_schedules import PrivateScheduleWarning

N = 32


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Loop:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.data = TensorDataset(torch.randn(N, 3), torch.randint(2, (N,)))
        self.plan = dpoptim.DPSGD(clip_norm=1.0).plan(
            n=N, batch_size=8, steps=3, epsilon=4.0, delta=1e-3
        )

    def attach(self, **options: Any) -> dpoptim.PrivateTraining:
        options = {"loss": losses} | options
        return dpoptim.attach(self.plan, self.model, self.optimizer, self.data, **options)


@pytest.mark.parametrize("before", [None, 0.0])
def test_zeros_that_a_trial_leaves_are_taken_away(before: float | None) -> None:
    """As a DistributedDataParallel writes them that the loss names."""
    loop, tried = Loop(), list[int]()

    def leaving(model: nn.Module, batch: Any) -> Tensor:
        for p in loop.model.parameters():
            if not tried or p.grad is None:
                p.grad = torch.zeros_like(p)
        tried.append(1)
        return losses(model, batch)

    for p in loop.model.parameters():
        p.grad = None if before is None else torch.full_like(p, before)
    held = [p.grad for p in loop.model.parameters()]
    with loop.attach(loss=leaving) as private:
        assert tried
        for p, grad in zip(loop.model.parameters(), held, strict=True):
            assert p.grad is grad
        loop.optimizer.zero_grad()
        for batch in private.batches():
            private.backward(losses(loop.model, batch))
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert private.steps_done == loop.plan.steps


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """As the one of torch.distributed.optim, which initialises no optimizer of its own."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self.optim, self.param_groups = optim, optim.param_groups


def test_an_optimizer_that_averages_models_is_refused_by_name() -> None:
    loop = Loop()
    loop.optimizer = PostLocalSGDOptimizer(loop.optimizer)
    with pytest.raises(dpoptim.PrivacyError, match="PostLocalSGDOptimizer.*optimizer.optim"):
        loop.attach()


def test_gradients_that_autograd_was_asked_for_are_named() -> None:
    loop = Loop()
    with (
        pytest.raises(dpoptim.PrivacyError, match="torch.autograd.grad"),
        loop.attach() as private,
    ):
        for batch in private.batches():
            found = losses(loop.model, batch)
            torch.autograd.grad(
                found.sum(), [*loop.model.parameters()], retain_graph=True, allow_unused=True
            )
            private.backward(found)


def trained_with(loop: Loop, measure: Any) -> None:
    with loop.attach() as private:
        scheduler = ReduceLROnPlateau(loop.optimizer, patience=0)
        for batch in private.batches():
            found = losses(loop.model, batch)
            private.backward(found)
            loop.optimizer.step()
            scheduler.step(measure(found))


def test_a_rate_follows_no_loss_of_the_batch() -> None:
    loop = Loop()
    with pytest.raises(dpoptim.PrivacyError, match="ReduceLROnPlateau was given a loss"):
        trained_with(loop, lambda found: found.mean())
    assert loop.optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("measure", [lambda found: found.mean().item(), lambda found: 0.5])
def test_a_number_of_unknown_origin_is_warned_of_once(measure: Any) -> None:
    with pytest.warns(PrivateScheduleWarning, match="if it was measured on private") as said:
        trained_with(Loop(), measure)
    assert len([each for each in said if each.category is PrivateScheduleWarning]) == 1
    assert said[0].filename == __file__


def test_rates_of_other_optimizers_and_later_ones_are_nobodys_business() -> None:
    loop = Loop()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with loop.attach() as private:
        scheduler = ReduceLROnPlateau(other)
        for batch in private.batches():
            private.backward(losses(loop.model, batch))
            loop.optimizer.step()
            scheduler.step(1.0)
    ReduceLROnPlateau(loop.optimizer).step(1.0)
