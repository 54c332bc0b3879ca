"""What a loop does to the loss that was checked, after it: told by its last operation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.training.assumptions import ADDED

N = 24


def each(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def mean(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def squares(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - 1).square().mean(1)


own = dpoptim.per_sample(mean)


def adds(
    hand: Callable[[dpoptim.PrivateTraining, nn.Module, Any], None], loss: Any, **options: Any
) -> bool:
    """Whether the guarantee's basis says that the loop adds to the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(N, 6), torch.randint(3, (N,)))
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=8, steps=2, noise_multiplier=0, delta=1e-3
    )
    with dpoptim.attach(plan, model, optimizer, data, loss=loss, **options) as private:
        assert ADDED not in [item.text for item in private.basis]
        for batch in private.batches():
            hand(private, model, batch)
            optimizer.step()
        found = [item.kind for item in private.basis if item.text == ADDED]
        assert found in ([], ["trusted"])
        return bool(found)


def by_their_mean(losses: Tensor) -> Tensor:
    return losses * losses.detach() / losses.detach().mean()


def hardest(losses: Tensor) -> Tensor:
    chosen = losses.detach().topk(max(1, len(losses) // 2)).indices
    return losses * torch.zeros_like(losses).index_fill(0, chosen, 1.0)


def over_a_sum(losses: Tensor) -> Tensor:
    """As of all processes."""
    return losses / losses.detach().sum()


@pytest.mark.parametrize("change", [by_their_mean, hardest, over_a_sum])
@pytest.mark.parametrize("loss", [each, squares])
def test_factors_of_the_batch_are_named(change: Callable[[Tensor], Tensor], loss: Any) -> None:
    assert adds(lambda private, model, batch: private.backward(change(loss(model, batch))), loss)


@pytest.mark.parametrize("loss", [each, squares])
def test_in_the_loss_itself_they_are_refused(loss: Any) -> None:
    with pytest.raises(dpoptim.SamplesInteractError):
        adds(lambda *_: None, lambda model, batch: by_their_mean(loss(model, batch)))


def under_autocast(private: dpoptim.PrivateTraining, model: nn.Module, batch: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        losses = each(model, batch)
    private.backward(losses)


@pytest.mark.parametrize(
    ("hand", "loss"),
    [
        (lambda private, model, batch: private.backward(each(model, batch)), each),
        (lambda private, model, batch: private.backward(each(model, batch).mean()), each),
        (lambda private, model, batch: mean(model, batch).backward(), mean),
        (lambda private, model, batch: each(model, batch).sum().backward(), each),
        (lambda private, model, batch: private.backward(squares(model, batch)), squares),
        (lambda private, model, batch: private.backward(own(model, batch)), own),
        (under_autocast, each),
    ],
    ids=[
        "vector",
        "mean of a vector",
        "bare mean",
        "bare sum",
        "squares",
        "per_sample",
        "autocast",
    ],
)
@pytest.mark.parametrize("isolation", ["auto", "vmap"])
def test_the_loss_that_was_checked_adds_nothing(hand: Any, loss: Any, isolation: str) -> None:
    assert not adds(hand, loss, isolation=isolation)
