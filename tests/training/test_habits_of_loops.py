"""Habits of plain loops that have another way here, and a data set that grows: errors say which."""

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.errors import PrivacyError, SamplesInteractError


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def run(step: Callable[..., Any], train_set: Any = None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = dpoptim.DPSGD(clip_norm=0.5).plan(
        n=24, batch_size=24, steps=3, noise_multiplier=0.0, delta=1e-5
    )
    data = TensorDataset(torch.randn(24, 6), torch.randint(0, 3, (24,)))
    how = {"loss": loss, "noise_seed": 1}
    with dpoptim.attach(plan, model, optimizer, train_set or data, **how) as private:  # type: ignore[arg-type]
        for batch in private.batches():
            step(private, model, batch)
            optimizer.step()
            optimizer.zero_grad()


def hooked(private: Any, model: nn.Module, batch: Any) -> None:
    handle = model[0].weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[index]
    try:
        private.backward(loss(model, batch))
    finally:
        handle.remove()


def vector(private: Any, model: nn.Module, batch: Any) -> None:
    loss(model, batch).backward()


def by_hand(private: Any, model: nn.Module, batch: Any) -> None:
    private.backward(loss(model, batch))
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)  # type: ignore[arg-type]


def differentiated(private: Any, model: nn.Module, batch: Any) -> None:
    torch.autograd.grad(loss(model, batch).sum(), [*model.parameters()])


@pytest.mark.parametrize(
    ("step", "fix"),
    [
        (hooked, "optimizer.register_step_pre_hook(hook)"),
        (vector, "private.backward(losses)"),
        (by_hand, "after optimizer.step(), before zero_grad()"),
        (differentiated, "optimizer.register_step_pre_hook"),
    ],
)
def test_raw_errors_say_what_there_is_instead(step: Callable[..., Any], fix: str) -> None:
    with pytest.raises((RuntimeError, TypeError)) as caught:
        run(step)
    assert "dpoptim: " in "".join(traceback.format_exception(caught.value))
    assert fix in " ".join(caught.value.__notes__)


def test_own_chunks_of_a_batch_are_told_of_physical_batches() -> None:
    def chunks(private: Any, model: nn.Module, batch: Any) -> None:
        for x, y in zip(*(t.chunk(2) for t in batch), strict=True):
            F.cross_entropy(model(x), y).backward()

    with pytest.raises(SamplesInteractError, match="physical_batch_size"):
        run(chunks)


@pytest.mark.parametrize("grows", [True, False])
def test_a_data_set_that_changes_its_length_is_refused(grows: bool) -> None:
    items = [(torch.randn(6), torch.tensor(i % 3)) for i in range(24)]

    def step(private: Any, model: nn.Module, batch: Any) -> None:
        private.backward(loss(model, batch))
        items.append(items.pop()) if not grows else items.append((torch.randn(6), items[0][1]))

    if grows:
        with pytest.raises(PrivacyError, match="train_set has another length") as caught:
            run(step, items)
        assert not any(digit in str(caught.value) for digit in "0123456789")
    else:
        run(step, items)
