"""Losses that leave out what is not known are tried on records of which something is missing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim

N, FEATURES = 24, 6
X = torch.randn(N, FEATURES)
Loss = Callable[[nn.Module, Any], Tensor]


def attach(loss: Loss, labels: Tensor) -> str:
    """What is said of the loss. No record of the data set has anything missing."""
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 3)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=6, steps=2, noise_multiplier=1.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan, model, optimizer, TensorDataset(X, labels), loss=loss) as private:
        return next(item.text for item in private.basis if "was checked" in item.text)


def findings(model: nn.Module, b: Any) -> tuple[Tensor, Tensor]:
    """Of several diseases, some of which nobody looked for."""
    known = ~b[1].isnan()
    found = F.binary_cross_entropy_with_logits(model(b[0]), b[1].nan_to_num(0), reduction="none")
    return found * known, known


def classes(model: nn.Module, b: Any) -> tuple[Tensor, Tensor]:
    known = b[1] >= 0
    return F.cross_entropy(model(b[0]), b[1].clamp(min=0), reduction="none") * known, known


def filled(model: nn.Module, b: Any) -> tuple[Tensor, Tensor]:
    """What was observed, from what was."""
    known = ~b[0].isnan()
    x = b[0].nan_to_num(0)
    return (model(x) - x[:, :3]).square() * known[:, :3], known[:, :3]


def over_the_batch(of: Any) -> Loss:
    return lambda m, b: (found := of(m, b))[0].sum() / found[1].sum().clamp(min=1)


def own(of: Any) -> Loss:
    return lambda m, b: (
        (found := of(m, b))[0].reshape(len(b[0]), -1).sum(1)
        / found[1].reshape(len(b[0]), -1).sum(1).clamp(min=1)
    )


CASES = [
    (findings, torch.ones(N, 3)),
    (classes, torch.arange(N) % 3),
    (filled, torch.ones(N)),
]


@pytest.mark.parametrize(("of", "labels"), CASES)
def test_means_over_what_is_known_in_a_batch_are_refused(of: Any, labels: Tensor) -> None:
    with pytest.raises(dpoptim.SamplesInteractError, match="with missing numbers"):
        attach(over_the_batch(of), labels)
    assert "made-up records" in attach(own(of), labels)


def test_losses_that_want_all_numbers_are_served() -> None:
    def plain(model: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(model(b[0]), b[1])

    def masked(model: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(model(b[0]), b[1], ignore_index=-1)

    for loss in (plain, masked):
        assert "made-up records" in attach(loss, torch.arange(N) % 3)


def test_missing_numbers_are_tried_on_cpus_and_it_is_said_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On accelerators an index that is no number ends all work of the process."""
    loss, labels = own(classes), torch.arange(N) % 3
    assert "not on ones with missing numbers" not in attach(loss, labels)
    monkeypatch.setattr("dpoptim.training.trials.loss_check.tries_missing", lambda model: False)
    assert "not on ones with missing numbers" in attach(loss, labels)


class InTraining(nn.Linear):
    """Notes in which modes it runs: in evaluation timm's LeViT keeps what it made of weights."""

    modes: set[bool]

    def forward(self, x: Tensor) -> Tensor:
        self.modes.add(self.training)
        return super().forward(x)


def test_losses_that_are_no_numbers_are_not_taken_for_random_ones() -> None:
    """They differ from themselves: models would be compared in evaluation mode from then on."""
    model = InTraining(FEATURES, 3)
    model.modes = set()
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=6, steps=2, noise_multiplier=1.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(X, torch.randn(N, 3))

    def loss(m: nn.Module, b: Any) -> Tensor:
        return (m(b[0]) - b[1]).square().mean(1)

    with dpoptim.attach(plan, model, optimizer, data, loss=loss):
        assert model.modes == {True}
