"""Dropout and augmentation do not follow a seed that everybody can read, such as 0."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import dpoptim

RECORDS = 60


class Jittered(Dataset[tuple[Tensor, Tensor]]):
    """Augmentation by each of the usual generators."""

    def __init__(self, data: TensorDataset, kind: str) -> None:
        self.data, self.kind = data, kind

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.data[index]
        draw = {
            "torch": lambda: float(torch.rand(())),
            "numpy": np.random.rand,
            "python": random.random,
        }
        return x + draw[self.kind](), y


def released_sum(kind: str, seed: int, noise_seed: int | None = None) -> tuple[Tensor, list[str]]:
    """What one step of all records adds up to, and what is taken on trust."""
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(RECORDS, 6), torch.randint(0, 3, (RECORDS,)))
    middle = nn.Dropout(0.5) if kind == "dropout" else nn.Identity()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), middle, nn.Linear(8, 3))
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=RECORDS, batch_size=RECORDS, steps=1, noise_multiplier=0, delta=1e-5
    )
    records = data if kind in ("dropout", "nothing") else Jittered(data, kind)
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    with dpoptim.attach(plan, model, optimizer, records, noise_seed=noise_seed) as private:
        for inputs, labels in private.batches(fixed_shape=False):
            private.backward(nn.functional.cross_entropy(model(inputs), labels, reduction="none"))
            optimizer.step()
        trusted = [item.text for item in private.basis if item.kind == "trusted"]
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    return before - after, trusted


@pytest.mark.parametrize("kind", ["dropout", "torch", "numpy", "python"])
def test_a_public_seed_decides_nothing(kind: str) -> None:
    first, trusted = released_sum(kind, 0)
    assert not torch.equal(first, released_sum(kind, 0)[0])
    assert any("no torch.manual_seed inside the loop" in text for text in trusted)
    seeded = [released_sum(kind, 0, noise_seed=3)[0] for _ in range(2)]  # not for release
    torch.testing.assert_close(*seeded, rtol=0, atol=0)


def test_without_random_numbers_nothing_changes() -> None:
    torch.testing.assert_close(released_sum("nothing", 0)[0], released_sum("nothing", 1)[0])


def test_the_program_has_its_generators_back() -> None:
    released_sum("dropout", 5)
    found = float(torch.rand(())), np.random.rand(), random.random()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    assert found == (float(torch.rand(())), np.random.rand(), random.random())


def test_a_loop_that_is_held_somewhere_gives_nothing_back_later() -> None:
    """Forgotten in the middle of another loop, it must not bring the public seed back; left at the
    end of the run, it has given it back.
    """
    model, data = nn.Linear(6, 3), TensorDataset(torch.randn(60, 6), torch.zeros(60).long())
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=60, batch_size=30, steps=3, noise_multiplier=0, delta=1e-5
    )
    torch.manual_seed(7)
    after = torch.random.get_rng_state()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan, model, sgd, data) as private:
        held = private.batches()
        next(held)
        for _ in (other := private.batches()):
            hidden = torch.random.get_rng_state()
            del held
            assert torch.equal(torch.random.get_rng_state(), hidden)
            assert not torch.equal(hidden, after)
            break
        assert other is not None
    assert torch.equal(torch.random.get_rng_state(), after)


@pytest.mark.parametrize("ends_first", [0, 1])
def test_a_run_that_ends_shows_no_other_runs_numbers(ends_first: int) -> None:
    """Two runs in turns, as of two models that learn from each other, or in two threads."""
    data = TensorDataset(torch.randn(60, 6), torch.zeros(60).long())
    runs, loops = [], []
    for i in range(2):
        plan = dpoptim.DPSGD(clip_norm=1.0).plan(
            n=60, batch_size=30, steps=1 if i == ends_first else 3, noise_multiplier=0, delta=1e-5
        )
        model = nn.Linear(6, 3)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        runs.append((dpoptim.attach(plan, model, sgd, data), model, sgd))
        loops.append(runs[i][0].batches())
    torch.manual_seed(7)
    np.random.seed(7)
    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist()
    going_on = 0
    while any(private.steps_done < private.plan.steps for private, _, _ in runs):
        for (private, model, sgd), batches in zip(runs, loops, strict=True):
            for x, y in batches:
                private.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
                sgd.step()
                break
        if runs[ends_first][0].steps_done == 1:
            list(loops[ends_first])  # to its end
            going_on += 1
            assert not torch.equal(torch.random.get_rng_state(), before[0])
            assert np.random.get_state()[1].tolist() != before[1]
    assert going_on > 1
    for private, _, _ in runs:
        private.detach()
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
