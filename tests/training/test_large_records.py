"""Losses in which one large record takes away what others weigh are found when attaching."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim

N, FEATURES, CLASSES = 24, 6, 3
Loss = Callable[[nn.Module, Any], Tensor]


def attach(loss: Loss) -> None:
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, CLASSES)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=6, steps=2, noise_multiplier=1.0, delta=1e-5
    )
    data = TensorDataset(torch.randn(N, FEATURES), torch.arange(N) % CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dpoptim.attach(plan, model, optimizer, data, loss=loss).detach()


def each(model: nn.Module, b: Any) -> Tensor:
    return F.cross_entropy(model(b[0]), b[1], reduction="none")


def by_hand(model: nn.Module, b: Any, largest: Callable[[Tensor], Tensor]) -> Tensor:
    scores = model(b[0])
    scores = scores - largest(scores)
    return scores.exp().sum(1).log() - scores.gather(1, b[1][:, None])[:, 0]


def of_all(scores: Tensor) -> Tensor:
    return scores.max()


def of_each(scores: Tensor) -> Tensor:
    return scores.amax(1, keepdim=True)


BY_OTHERS: dict[str, Loss] = {
    "largest score of the batch": lambda m, b: by_hand(m, b, of_all),
    "its mean": lambda m, b: by_hand(m, b, of_all).mean(),
    "spikes left out": lambda m, b: (found := each(m, b)) * (found.mean() < 5),
    "outliers by the median": lambda m, b: (
        (found := each(m, b)) * (found.detach() < 2 * found.detach().median() + 5)
    ),
}
OWN: dict[str, Loss] = {
    "own largest score": lambda m, b: by_hand(m, b, of_each),
    "outliers by a threshold": lambda m, b: (found := each(m, b)) * (found.detach() < 5),
    "a mean": lambda m, b: F.cross_entropy(m(b[0]), b[1]),
    "infinite of large ones": lambda m, b: m(b[0]).exp().sum(1),
}


@pytest.mark.parametrize("name", BY_OTHERS)
def test_what_a_large_record_does_to_others_is_refused(name: str) -> None:
    with pytest.raises(dpoptim.SamplesInteractError, match="one of them large"):
        attach(BY_OTHERS[name])


@pytest.mark.parametrize("name", OWN)
def test_large_records_by_themselves_are_served(name: str) -> None:
    attach(OWN[name])
