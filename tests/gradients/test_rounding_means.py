"""Under a mean, gradients that anything rounds coarsely on their way are refused; vectors of losses
are served, and a record moves their sum by at most the clip norm.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.gradients import backward_pass

N, FEATURES, CLASSES = 512, 5, 3
Y = torch.zeros(N, dtype=torch.long)
X = torch.randn(FEATURES, generator=torch.Generator().manual_seed(3)).repeat(N, 1)
Pass = Callable[[Tensor], Tensor]


class RoundsItself(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def under_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ torch.eye(x.shape[1])).float()


def in_a_function(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return RoundsItself.apply(x).float()  # type: ignore[no-untyped-call]


ROUNDED: dict[str, Pass] = {
    "a cast": lambda x: torch.tanh(x.bfloat16()).float(),
    "half": lambda x: x.half().float(),
    "autocast": under_autocast,
    "a function": in_a_function,
}


class Between(nn.Module):
    """Two layers, and something between them."""

    def __init__(self, between: Pass) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(FEATURES, 7), nn.Linear(7, CLASSES), between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.between(self.first(x))))


def bare(private: Any, losses: Tensor) -> None:
    losses.mean().backward()


def scalar(private: Any, losses: Tensor) -> None:
    private.backward(losses.mean())


def vector(private: Any, losses: Tensor) -> None:
    private.backward(losses)


def released(
    between: Pass,
    after: Pass,
    backward: Callable[[Any, Tensor], None],
    rows: int,
    *,
    fixed_shape: bool | None = None,
) -> Tensor:
    torch.manual_seed(0)
    model = Between(between)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=N, steps=1, noise_multiplier=0.0, delta=1e-5
    )
    found: list[Tensor] = []
    with dpoptim.attach(plan, model, optimizer, TensorDataset(X[:rows], Y[:rows])) as private:
        optimizer.register_step_pre_hook(
            lambda *_: found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        )
        for x, y in private.batches(fixed_shape=fixed_shape):
            backward(private, F.cross_entropy(after(model(x)), y, reduction="none"))
            optimizer.step()
    return N * found[0].double()


def same(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("backward", [bare, scalar])
@pytest.mark.parametrize("name", ROUNDED)
def test_in_the_model_a_mean_is_refused(name: str, backward: Callable[[Any, Tensor], None]) -> None:
    with pytest.raises(dpoptim.PrivacyError, match=r"loss that is a mean.*Fix: private.backward"):
        released(ROUNDED[name], same, backward, N)


@pytest.mark.parametrize("name", ROUNDED)
def test_in_the_loss_a_mean_that_is_handed_over_is_refused(name: str) -> None:
    with pytest.raises(dpoptim.PrivacyError, match="loss that is a mean"):
        released(same, ROUNDED[name], scalar, N)


@pytest.mark.parametrize("name", ROUNDED)
def test_vectors_are_served_within_the_bound(name: str) -> None:
    for between, after in ((ROUNDED[name], same), (same, ROUNDED[name])):
        whole, less = (released(between, after, vector, rows) for rows in (N, N - 1))
        assert 0.9 < float((whole - less).norm()) <= 1.0


@pytest.mark.parametrize("backward", [bare, scalar])
def test_without_rounding_means_are_served(backward: Callable[[Any, Tensor], None]) -> None:
    whole, less = (released(same, torch.sigmoid, backward, rows) for rows in (N, N - 1))
    assert float((whole - less).norm()) <= 1.0


def test_who_does_not_look_lets_a_record_move_more() -> None:
    """Otherwise the refusals would be for nothing."""
    with patch.object(backward_pass, "narrow_operation", lambda results: None):
        sums = [released(ROUNDED["a cast"], same, bare, rows) for rows in range(N, N - 6, -1)]
    assert max(float((a - b).norm()) for a, b in pairwise(sums)) > 1.2


def test_a_mean_after_vectors_is_looked_at_again() -> None:
    """Models whose losses come as vectors are not looked at each time: graphs are long."""
    looked = []
    honest = backward_pass.narrow_operation
    model = Between(same)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=N, steps=6, noise_multiplier=0.0, delta=1e-5
    )
    with (
        dpoptim.attach(plan, model, optimizer, TensorDataset(X, Y)) as private,
        patch.object(
            backward_pass, "narrow_operation", lambda results: looked.append(0) or honest(results)
        ),
    ):
        for step, (x, y) in enumerate(private.batches()):
            losses = F.cross_entropy(model(x), y, reduction="none")
            (vector if step < 4 else bare)(private, losses)
            optimizer.step()
    assert len(looked) == 3  # before the first, and at each mean


def test_what_is_looked_at_need_not_be_one_tensor() -> None:
    x = torch.ones(2, requires_grad=True)
    assert backward_pass.narrow_operation({"a": [x, 3, None], "b": x * 2}) is None
    assert backward_pass.narrow_operation({"a": [x, (x * 2).half()]}) == "ToCopy"
    assert backward_pass.narrow_operation((x.half() * 2).float().sum()) == "Mul"
