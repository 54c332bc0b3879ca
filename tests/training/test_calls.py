"""The call by which a loss trains a model, among others before it, or under torch.func."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.training.trials.calls import call_of_loss

N, FEATURES = 8, 5
X = torch.randn(N, FEATURES, generator=torch.Generator().manual_seed(1))
Loss = Callable[[nn.Module, Any], Tensor]


class WithTeacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(FEATURES, 3), nn.Linear(FEATURES, 3)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor, teaches: bool = False) -> Tensor:
        return self.teacher(x) if teaches else self.student(x)


def under_no_grad(model: nn.Module, batch: Any) -> Tensor:
    with torch.no_grad():
        target = model(batch[0], teaches=True)
    return F.mse_loss(model(batch[0] + 1), target)


def frozen(model: nn.Module, batch: Any) -> Tensor:
    target = model(batch[0], teaches=True)
    return F.mse_loss(model(batch[0] + 1), target)


def vectorised(model: nn.Module, batch: Any) -> Tensor:
    return torch.vmap(lambda x: model(x[None])[0])(batch[0]).square().mean()


def way_of(loss: Loss) -> str:
    torch.manual_seed(0)
    model = WithTeacher()
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=N, steps=1, noise_multiplier=0.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.student.parameters(), lr=0.1)
    with dpoptim.attach(plan, model, optimizer, TensorDataset(X), loss=loss) as private:
        for batch in private.batches():
            private.backward(loss(model, batch))
            optimizer.step()
        return private.describe()


@pytest.mark.parametrize("loss", [under_no_grad, frozen])
def test_the_call_that_trains_counts(loss: Loss) -> None:
    [(args, kwargs)] = call_of_loss(loss, WithTeacher(), [X])
    assert torch.equal(args[0], X + 1)
    assert not kwargs
    assert "every microbatch has one record" not in way_of(loss)  # nor is anybody warned


def test_of_calls_that_train_nothing_the_first_counts() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            return model(batch[0]) + model(batch[0] + 1)

    [(args, _)] = call_of_loss(loss, WithTeacher(), [X])
    assert torch.equal(args[0], X)


def test_a_call_that_raises_is_one() -> None:
    """Models raise that want autocast."""
    [(args, _)] = call_of_loss(lambda m, b: m(b[0].half()), WithTeacher(), [X])
    assert args[0].dtype == torch.half


class OwnLoss(nn.Module):
    """Returns its loss, as masked autoencoders do; positions that are as many as records may be."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.out = nn.Parameter(torch.randn(1, 16, 3)), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        errors = (self.out(x[:, :1, None] + self.places)[..., 0] - x[:, 1:2]).square()
        mask = (torch.arange(16) < 8).expand_as(errors)
        return (errors * mask).sum() / mask.sum()


@pytest.mark.parametrize("way", ["auto", "vmap"])
def test_models_that_return_their_loss_go_by_rules(way: Any) -> None:
    model = OwnLoss()
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=N, steps=1, noise_multiplier=0.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = plan, model, optimizer, TensorDataset(X)
    loss: Loss = lambda m, batch: m(batch[0])  # noqa: E731
    if way == "auto":
        assert "every microbatch" not in dpoptim.attach(*given, loss=loss).describe()
        return
    with pytest.raises(
        dpoptim.PrivacyError, match="returns the loss of a batch as one number"
    ) as e:
        dpoptim.attach(*given, loss=loss, isolation="vmap")
    assert ". Or attach" in str(e.value)


def test_no_tensor_leaves_torch_func() -> None:
    assert call_of_loss(vectorised, WithTeacher(), [X]) == []
    with pytest.warns(dpoptim.IsolationWarning, match=r"torch\.func ran the attached model"):
        assert "every microbatch has one record" in way_of(vectorised)
