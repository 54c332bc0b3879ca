"""Losses and collate functions that draw random numbers are compared with numbers that each record
has for itself, and with rare ones: masks that are counted over a batch, coins that mix it.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.training.trials.fixed_noise import FixedNoise, drawn_by, drawn_for

N, FEATURES, ROWS = 24, 6, 5
Loss = Callable[[nn.Module, Any], Tensor]


def attach(loss: Loss, between: type[nn.Module] = nn.Tanh, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), between(), nn.Linear(8, FEATURES))
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=6, steps=2, noise_multiplier=1.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(N, FEATURES))
    return dpoptim.attach(plan, model, optimizer, data, loss=loss, **options)


def alone(private: Any) -> bool:
    return any("every microbatch has one record" in item.text for item in private.basis)


def errors(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x).square()


# ---- what is counted over a batch ---------------------------------------------------------------


def masked(model: nn.Module, b: Any) -> tuple[Tensor, Tensor]:
    mask = torch.rand(b[0].shape) < 0.5
    return errors(model, b[0]) * mask, mask


def weighted(model: nn.Module, b: Any) -> tuple[Tensor, Tensor]:
    times = torch.randint(0, 1000, (len(b[0]),))
    return errors(model, b[0]).mean(1), 1.0 + times


BY_RECORD: dict[str, Loss] = {
    "masks": lambda m, b: (of := masked(m, b))[0].sum(1) / of[1].sum(1).clamp(min=1),
    "masks in a mean": lambda m, b: masked(m, b)[0].mean(),
    "weights": lambda m, b: (of := weighted(m, b))[0] * of[1] / 1000,
    "noise": lambda m, b: errors(m, b[0] + torch.randn_like(b[0])).mean(1),
    "gates": lambda m, b: errors(m, b[0] * torch.rand(len(b[0]), 1)).mean(1),
    "a scale of the batch": lambda m, b: errors(m, b[0] * torch.rand(())).mean(1),
}
BY_BATCH: dict[str, Loss] = {
    "masks": lambda m, b: (of := masked(m, b))[0].sum() / of[1].sum(),
    "masks, a record's": lambda m, b: (
        (of := masked(m, b))[0].sum(1) * len(b[0]) / of[1].sum()
    ),
    "weights": lambda m, b: (of := weighted(m, b))[0] * of[1] / of[1].mean(),
    "noise": lambda m, b: errors(
        m, b[0] + (e := torch.randn_like(b[0])) / e.norm(dim=0)
    ).mean(1),
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", BY_RECORD)
def test_random_numbers_of_records_are_served(name: str) -> None:
    with attach(BY_RECORD[name]) as private:
        assert not alone(private)


@pytest.mark.parametrize("name", BY_BATCH)
def test_random_numbers_that_are_added_up_are_refused(name: str) -> None:
    with pytest.raises(dpoptim.SamplesInteractError):
        attach(BY_BATCH[name])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("draw", [torch.bernoulli, lambda p: (torch.rand_like(p) < p).float()])
def test_masks_of_a_collate_function_that_are_added_up_are_refused(draw: Any) -> None:
    def collate(rows: list[Any]) -> tuple[Tensor, Tensor]:
        x = torch.stack([x for (x,) in rows])
        return x, draw(torch.full(x.shape, 0.5))

    def own(model: nn.Module, b: Any) -> Tensor:
        return (errors(model, b[0]) * b[1]).sum(1) / b[1].sum(1).clamp(min=1)

    def over_the_batch(model: nn.Module, b: Any) -> Tensor:
        return (errors(model, b[0]) * b[1]).sum() / b[1].sum()

    attach(own, collate_fn=collate).detach()
    with pytest.raises(dpoptim.SamplesInteractError):
        attach(over_the_batch, collate_fn=collate)


class AtSampledPlaces(nn.Module):
    """Adds what it finds at places that it draws for all records, as many as a trial has."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.randint(x.shape[1], (ROWS, 2))
        return x + x[:, places].mean((1, 2))[:, None]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("isolation", ["auto", "vmap"])
def test_as_many_numbers_as_records_need_not_be_theirs(
    isolation: Any,
) -> None:
    """Informer samples as many keys for all records as a trial has records, say."""
    seen = set[int]()

    def loss(model: nn.Module, b: Any) -> Tensor:
        seen.add(len(b[0]))
        return errors(model, b[0]).mean(1)

    with attach(loss, AtSampledPlaces, isolation=isolation) as private:
        assert not alone(private)
    assert ROWS in seen


# ---- coins --------------------------------------------------------------------------------------


def mixing(coin: Callable[[], float], share: float) -> Loss:
    def loss(model: nn.Module, b: Any) -> Tensor:
        x = b[0]
        if coin() < share:
            x = 0.5 * x + 0.5 * x[torch.randperm(len(x))]
        return errors(model, x).mean(1)

    return loss


@pytest.mark.parametrize("share", [0.02, 0.98])
def test_losses_that_mix_now_and_then_are_refused(share: float) -> None:
    with pytest.raises(dpoptim.SamplesInteractError):
        attach(mixing(lambda: float(torch.rand(())), share))


def test_losses_that_mix_in_one_of_several_ways_are_refused() -> None:
    with pytest.raises(dpoptim.SamplesInteractError):
        attach(mixing(lambda: 2 - int(torch.randint(3, ())), 0.5))


@pytest.mark.parametrize("coin", [random.random, np.random.rand])
def test_losses_that_nobody_can_compare_go_by_records_alone(coin: Callable[[], float]) -> None:
    loss = mixing(coin, 0.02)
    with pytest.warns(UserWarning, match="numpy's or Python's"), attach(loss) as private:
        assert alone(private)
    with pytest.raises(dpoptim.SamplesInteractError, match="Fix: draw from torch's generator"):
        attach(loss, isolation="rules")


class ManifoldMixup(nn.Module):
    """Mixes what its first layer made, in training, where a coin says so."""

    def __init__(self, coin: Callable[[], float]) -> None:
        super().__init__()
        self.first, self.second, self.coin = nn.Linear(FEATURES, 8), nn.Linear(8, FEATURES), coin

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if self.training and self.coin() < 0.5:
            hidden = 0.5 * hidden + 0.5 * hidden[torch.randperm(len(hidden))]
        return self.second(hidden)


class LayerDrop(ManifoldMixup):
    """Leaves a layer out where a coin says so: records meet layers, and not each other."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        dropped = self.training and self.coin() < 0.5
        return self.second(hidden if dropped else hidden.tanh())


COINS = {
    "torch": lambda: float(torch.rand(())),
    "Python": random.random,
    "numpy": np.random.rand,
    "the last of three": lambda: 2 - int(torch.randint(3, ())),
    "the second of three": lambda: abs(1 - int(torch.randint(3, ()))),
    "tails": lambda: int(torch.bernoulli(torch.tensor(0.9))),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("coin", COINS.values(), ids=COINS)
def test_models_that_mix_now_and_then_are_refused(coin: Callable[[], float]) -> None:
    def attached(model: nn.Module) -> None:
        data, optimizer = (
            TensorDataset(torch.randn(N, FEATURES)),
            torch.optim.SGD(model.parameters()),
        )
        plan = dpoptim.DPSGD(clip_norm=1.0).plan(
            n=N, batch_size=6, steps=2, noise_multiplier=1.0, delta=1e-5
        )
        dpoptim.attach(plan, model, optimizer, data).detach()

    attached(LayerDrop(coin))
    with pytest.raises(dpoptim.SamplesInteractError, match="now and then"):
        attached(ManifoldMixup(coin))


# ---- the numbers --------------------------------------------------------------------------------


def test_a_row_draws_the_same_in_any_batch() -> None:
    rows = [4, 0, 7, 2, 9]
    draws: list[Callable[[int, int], Tensor]] = [
        lambda rows, length: torch.rand(rows, length),
        lambda rows, length: torch.randn(rows, 2, length),
        lambda rows, length: torch.empty(length, rows).uniform_(-1, 1).T,
        lambda rows, length: torch.randint(5, 1000, (rows, length)),
        lambda rows, length: torch.bernoulli(torch.full((rows, length), 0.5)),
    ]
    for draw in draws:
        with FixedNoise(own_coins=True):
            with drawn_for(rows):
                whole = draw(5, 11)
            assert len(whole.unique(dim=0)) > 3
            for place, row in enumerate(rows):
                with drawn_for([row]):
                    torch.testing.assert_close(draw(1, 8)[0], whole[place][..., :8])


def test_numbers_of_any_batch_are_no_rows() -> None:
    with FixedNoise():
        for rows in ([0], [0, 1, 2]):
            with drawn_for(rows):
                shared, own = torch.rand(3, 2), torch.rand(len(rows), 4)
            assert (shared == shared[0]).all()
        assert len(own.unique(dim=0)) == 3


def test_what_is_computed_with_random_numbers_depends_on_what_is_given() -> None:
    """Or else nothing that mixes records before it would be seen."""
    x = torch.randn(4, 5)
    for training in (True, False):
        with FixedNoise():
            found = F.rrelu(x, 0.2, 0.4, training=training)
        torch.testing.assert_close(found, F.leaky_relu(x, 0.3))
    assert not drawn_by(torch.ops.aten._cudnn_rnn.default)  # an LSTM on a GPU
    assert drawn_by(torch.ops.aten.rand_like.default)


def test_a_layer_that_draws_its_slopes_goes_by_rules() -> None:
    with attach(lambda m, b: errors(m, b[0]).mean(1), nn.RReLU) as private:
        assert not alone(private)
