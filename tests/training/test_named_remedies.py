"""Refusals and warnings name what to do in its place, for what vision models are made of."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim

N, FEATURES = 8, 5
DATA = TensorDataset(torch.randn(N, FEATURES, generator=torch.Generator().manual_seed(1)))
Loss = Callable[[nn.Module, Any], Tensor]


def attached(model: nn.Module, loss: Loss, **options: Any) -> Any:
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=N, steps=2, noise_multiplier=0.0, delta=1e-5
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return dpoptim.attach(plan, model, optimizer, DATA, loss=loss, **options), optimizer


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean(1)


def test_a_teacher_goes_outside_of_the_model() -> None:
    model = nn.ModuleDict({"a": nn.Linear(FEATURES, 3), "b": nn.Linear(FEATURES, 3)})
    model["b"].requires_grad_(False)
    loss: Loss = lambda m, batch: (m["a"](batch[0]) - m["b"](batch[0])).square().mean(1)  # noqa: E731
    training, optimizer = attached(model, loss)

    def train() -> None:
        with training as private:
            for batch in private.batches():
                private.backward(loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    model["b"].weight.lerp_(model["a"].weight, 0.1)

    with pytest.raises(dpoptim.PrivacyError, match="plain object outside of it, updated after"):
        train()


class Masked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= torch.tensor(0.5)
        return super().forward(x)


def test_masked_weights_are_computed_anew() -> None:
    with pytest.raises(dpoptim.PrivacyError, match=r"self\.weight \* self\.mask"):
        attached(Masked(FEATURES, 3), squares)


def test_pairs_may_have_been_meant() -> None:
    def ranked(model: nn.Module, batch: Any) -> Tensor:
        return F.softplus(model(batch[0]) - batch[0][:, 0]).mean()

    with pytest.raises(dpoptim.PrivacyError, match="If all pairs are meant"):
        attached(nn.Linear(FEATURES, 1), ranked)


def test_derivatives_by_inputs_are_not_to_be_left_out() -> None:
    def penalty(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].requires_grad_()
        first = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        second = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)[0]
        return second.square().sum(1)

    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))
    with pytest.warns(dpoptim.IsolationWarning) as found:
        attached(model, penalty)
    assert "leave it out" not in str(found[0].message)


def test_draws_for_the_whole_batch_are_each_records_own() -> None:
    def stratified(model: nn.Module, batch: Any) -> Tensor:
        rows = len(batch[0])
        times = (torch.arange(rows) + torch.rand(rows)) / rows
        return squares(model, [batch[0] * times[:, None]])

    with pytest.raises(dpoptim.PrivacyError, match="draw each record's own"):
        attached(nn.Linear(FEATURES, 3), stratified)


def test_a_check_for_huge_losses_is_left_out() -> None:
    model = nn.Linear(FEATURES, 3)
    training, _ = attached(model, squares)
    with training as private, pytest.raises(dpoptim.PrivacyError, match="NaN counts as zero"):
        for batch in private.batches():
            private.backward(squares(model, batch))


def test_detectors_may_be_trained_as_of_batches_of_one() -> None:
    """Boxes by how many the batch has, classes by how many records."""

    def detected(model: nn.Module, batch: Any) -> Tensor:
        out, boxes = model(batch[0]), (batch[0] > 0).float()
        of_boxes = (out - batch[0]).abs().mul(boxes).sum() / boxes.sum().clamp(min=1)
        return of_boxes + out.logsumexp(1).mean()

    with pytest.raises(dpoptim.SamplesInteractError, match='DETR.*isolation="alone"'):
        attached(nn.Linear(FEATURES, FEATURES), detected)
    with pytest.warns(dpoptim.IsolationWarning, match="as if it were the batch"):
        attached(nn.Linear(FEATURES, FEATURES), detected, isolation="alone")
