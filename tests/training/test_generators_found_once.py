"""A model's generators are looked for once in its trials, and again where it has changed."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.training.trials import own_generators
from dpoptim.training.trials.own_generators import found_once, generators_of


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found, walk = list[Any](), own_generators.generators_in

    def counted(*parts: Any) -> Any:
        found.append(parts)
        return walk(*parts)

    monkeypatch.setattr(own_generators, "generators_in", counted)
    return found


def test_a_model_that_stays_the_same_is_walked_once(walks: list[Any]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    with found_once():
        for training in (True, False, True):
            model.train(training)
            assert generators_of(model) == []
    assert len(walks) == 1
    generators_of(model)
    generators_of(model)
    assert len(walks) == 3  # nothing is kept outside of trials


def test_a_generator_that_a_module_gets_is_found(walks: list[Any]) -> None:
    model, rng = nn.Sequential(nn.Linear(2, 2), nn.Dropout()), np.random.default_rng(0)
    with found_once():
        assert generators_of(model) == []
        model[1].rng = rng
        assert generators_of(model) == [rng]
    assert len(walks) == 2


def test_one_that_comes_deeper_is_found_where_it_is_asked_for() -> None:
    model, rng = nn.Linear(2, 2), np.random.default_rng(0)
    model.settings = SimpleNamespace(rng=None)  # type: ignore[assignment]
    with found_once():
        assert generators_of(model) == []
        model.settings.rng = rng
        assert generators_of(model, anew=True) == [rng]
        assert generators_of(model) == [rng]


class Late(nn.Module):
    """Makes its generator in its first pass, in what an attribute holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.settings = nn.Linear(3, 2), SimpleNamespace()

    def forward(self, x: Any) -> Any:
        if not hasattr(self.settings, "rng"):
            self.settings.rng = np.random.default_rng(0)
        return self.linear(x) + (0.0 if self.settings.rng.random() < 2 else 1.0)


def test_one_that_the_first_pass_makes_counts_as_drawn_from() -> None:
    model = Late()
    plan = dpoptim.DPSGD(1.0).plan(n=9, batch_size=3, steps=1, noise_multiplier=1.0, delta=1e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(9, 3), torch.arange(9) % 2)

    def loss(model: nn.Module, batch: Any) -> Any:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    with pytest.warns(dpoptim.IsolationWarning, match="numpy"):
        dpoptim.attach(plan, model, optimizer, data, loss=loss)
