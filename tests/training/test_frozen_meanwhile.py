"""Parameters that are frozen and unfrozen during a run: as in a plain loop, they rest meanwhile."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.gradients.isolation import Choice

N, STEPS = 24, 7
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.05),
}


class Model(nn.Module):
    """Parameters of layers, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(4, 3), nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.into(x)) * self.scale)
        return out


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(N, 4), torch.randint(0, 2, (N,))


def freeze(model: Model, step: int) -> None:
    """Before the forward pass of a step: the first layer in two steps, another weight in one."""
    model.into.requires_grad_(step not in (2, 3))
    model.scale.requires_grad_(step != 3)
    model.out.bias.requires_grad_(step != 5)


def plan(noise_multiplier: float, clip_norm: float) -> dpoptim.Plan:
    return dpoptim.DPSGD(clip_norm=clip_norm).plan(
        n=N, batch_size=N, steps=STEPS, noise_multiplier=noise_multiplier, delta=1e-3
    )


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.filterwarnings("ignore::dpoptim.training.trials.isolation.IsolationWarning")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("isolation", ["rules", "vmap", "alone"])
@pytest.mark.parametrize("physical", [None, 7])
@pytest.mark.thinned(2)
def test_without_noise_it_is_the_plain_loop(
    isolation: Choice, name: str, physical: int | None
) -> None:
    x, y = data()
    plain, model = Model(), Model()
    reference = OPTIMIZERS[name](list(plain.parameters()))
    for step in range(STEPS):
        freeze(plain, step)
        F.cross_entropy(plain(x), y).backward()
        reference.step()
        reference.zero_grad()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    with dpoptim.attach(
        plan(0.0, float("inf")), model, optimizer, TensorDataset(x, y), isolation=isolation
    ) as private:
        for a, b in private.batches(physical_batch_size=physical):
            freeze(model, private.steps_done)
            private.backward(F.cross_entropy(model(a), b, reduction="none"))
            optimizer.step()
            optimizer.zero_grad()
        freeze(model, STEPS)
    torch.testing.assert_close(flat(model), flat(plain), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("when", ["before the batch", "before forward", "before step"])
def test_noise_does_not_move_what_is_frozen(when: str) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moments = {
        each: number
        for number, each in enumerate(("before the batch", "before forward", "before step"))
    }
    with dpoptim.attach(plan(1.0, 1.0), model, optimizer, TensorDataset(*data())) as private:
        model.into.requires_grad_(when != "before the batch")
        x, y = next(private.batches())
        rests, moves = model.into.weight.detach().clone(), model.out.weight.detach().clone()
        model.into.requires_grad_(moments[when] > 1)
        losses = F.cross_entropy(model(x), y, reduction="none")
        private.backward(losses)
        model.into.requires_grad_(False)
        optimizer.step()
        assert private.steps_done == 1
        assert model.into.weight.grad is None
        assert torch.equal(model.into.weight, rests)
        assert not torch.equal(model.out.weight, moves)
        model.into.requires_grad_(True)


@pytest.mark.parametrize("moment", [0, 1])
def test_one_record_moves_what_trains_by_the_clip_norm(moment: int) -> None:
    """An enormous one, in microbatches between which a layer is frozen, or not."""
    x, y = data()
    moved = []
    for sign in (1.0, -1.0):
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=float(N))
        other = x.clone()
        other[5] = sign * 1e6
        before = flat(model)
        with dpoptim.attach(
            plan(0.0, 0.1), model, optimizer, TensorDataset(other, y), noise_seed=1
        ) as private:
            for number, (a, b) in enumerate(private.batches(physical_batch_size=10)):
                model.into.requires_grad_(number < moment)
                private.backward(F.cross_entropy(model(a), b, reduction="none"))
                model.into.requires_grad_(True)
                optimizer.step()
                if private.finished_step:
                    break
            model.into.requires_grad_(True)
        moved.append(before - flat(model))
    assert 0 < float((moved[0] - moved[1]).norm()) <= 2 * 0.1 * (1 + 1e-5)


def test_what_moves_does_not_tell_how_many_microbatches_a_step_has() -> None:
    """A layer frozen at the fifth microbatch rested from a step on that private counts decided."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan(1.0, 1.0), model, optimizer, TensorDataset(*data())) as private:
        batches = private.batches(physical_batch_size=7)
        with pytest.raises(dpoptim.PrivacyError, match="between two microbatches"):
            for number, (x, y) in enumerate(batches):
                model.into.requires_grad_(number < 5)
                private.backward(F.cross_entropy(model(x), y, reduction="none"))
                optimizer.step()
        assert private.steps_done == 1
        model.into.requires_grad_(True)


def test_two_optimizers_of_whom_one_rests() -> None:
    """As under Lightning's toggle_optimizer."""
    model = Model()
    halves = [
        torch.optim.SGD([*model.into.parameters(), model.scale], lr=0.1),
        torch.optim.SGD(model.out.parameters(), lr=0.1),
    ]
    with dpoptim.attach(plan(1.0, 1.0), model, halves, TensorDataset(*data())) as private:
        for x, y in private.batches():
            model.out.requires_grad_(private.steps_done % 2 == 0)
            before = model.out.weight.detach().clone()
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            for half in halves:
                half.step()
            assert torch.equal(before, model.out.weight) != model.out.weight.requires_grad
        model.out.requires_grad_(True)
    assert private.steps_done == STEPS


@pytest.mark.filterwarnings("ignore::dpoptim.training.trials.isolation.IsolationWarning")
@pytest.mark.parametrize(
    ("method", "isolation"),
    [
        (dpoptim.ValueClippedSGD, "auto"),
        (dpoptim.DPSGD, "rules"),
        (dpoptim.DPSGD, "vmap"),
        (dpoptim.DPSGD, "alone"),
    ],
)
def test_a_bound_counts_what_is_frozen_while_it_is_taken(method: Any, isolation: Choice) -> None:
    """Layers that are frozen for the backward pass alone, and then train on that sum."""
    x, y = data()
    clip_norm, moved = 0.1, []
    planned = method(clip_norm).plan(n=N, batch_size=N, steps=1, noise_multiplier=0.0, delta=1e-3)
    for sign in (1.0, -1.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        other = x.clone()
        other[5] = sign * torch.tensor([30.0, 0.0, 0.0, 0.0])
        before = flat(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=float(N))
        records = TensorDataset(other, y)
        with dpoptim.attach(planned, model, optimizer, records, isolation=isolation) as private:
            for a, b in private.batches():
                losses = F.cross_entropy(model(a), b, reduction="none")
                for layer in (model[0], model[2]):
                    layer.weight.requires_grad_(False)
                private.backward(losses)
                model.requires_grad_(True)
                optimizer.step()
        moved.append(before - flat(model))
    assert 0 < float((moved[0] - moved[1]).norm()) <= 2 * clip_norm * (1 + 1e-5)
