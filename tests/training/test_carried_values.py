"""Trials leave nothing in plain attributes of a model; what passes leave there, no other reads."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim

N = 12
generator = torch.Generator().manual_seed(1)
DATA = TensorDataset(torch.randn(N, 6, generator=generator), torch.arange(N) % 3)


class Settings:
    """As a configuration is, outside of any module."""

    def __init__(self) -> None:
        self.scale, self.mode = 1.0, "fast"


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.settings = Settings()
        self.most, self.scale, self.passes, self.mode = 1.0, None, 0, "fast"
        self.last: Tensor | None = None
        self.seen: list[float] = []
        self.mean = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class RunningMaximum(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.most = max(self.most, float(x.detach().abs().max()))
        return self.layer(x / self.most)


class FirstBatch(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = float(x.detach().abs().mean()) + 0.1
        return self.layer(x / self.scale)


class Flagged(Keeps):
    """Keeps what the first batch initialises where nothing is put back, and a flag beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.ready, self.large = False, torch.zeros(1 << 17)

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.large.fill_(float(x.detach().abs().mean()))
            self.ready = True
        return self.layer(x - self.large[0])


class Tabled(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.ready, self.table = False, OrderedDict[str, float]()

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.table["mean"] = float(x.detach().abs().mean())
            self.ready = True
        return self.layer(x - self.table["mean"])


class InConfiguration(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.settings.scale = max(self.settings.scale, float(x.detach().abs().max()))
        return self.layer(x / self.settings.scale)


class RunningMean(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        centred = self.layer(x - self.mean)
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return centred


class Switch(Keeps):
    """Stays where one batch has set it, as BigBird's kind of attention."""

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().abs().max()) > 100:
            self.mode = "slow"
        return self.layer(x) * (2 if self.mode == "slow" else 1)


class Swapped(Keeps):
    """Puts another layer into a place."""

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().abs().max()) > 100:
            self.layer = Doubled.of(self.layer)
        return self.layer(x)


class Doubled(nn.Linear):
    @classmethod
    def of(cls, layer: nn.Linear) -> "Doubled":
        found = layer if isinstance(layer, cls) else cls(6, 3)
        found.weight, found.bias = layer.weight, layer.bias
        return found

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Watched(Keeps):
    """Keeps what it saw last for others to look at, and how often it ran; reads none of it."""

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.last = x.detach().abs().amax(1)
        self.most = max(self.most, float(self.last.max()))
        self.seen.append(self.most)
        self.settings.mode = f"after {self.passes}"
        return self.layer(x)


class Counts(Keeps):
    """Does something else in its first pass, whatever its records are."""

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.layer(x) * (2 if self.passes == 1 else 1)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def attach(model: nn.Module, **options: Any) -> dpoptim.PrivateTraining:
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=N, steps=2, noise_multiplier=0.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return dpoptim.attach(plan, model, optimizer, DATA, **options)


CARRY = {
    RunningMaximum: "'most'",
    FirstBatch: "'scale'",
    InConfiguration: "'settings.scale'",
    RunningMean: "'mean'",
    Switch: "'mode'",
    Swapped: "'layer'",
}
FLAGS = {Flagged: "'ready'", Tabled: "'ready'"}
WAYS: dict[str, dict[str, Any]] = {
    "rules": {"loss": loss},
    "alone": {"loss": loss, "isolation": "alone"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [RunningMaximum, FirstBatch, InConfiguration, *FLAGS])
def test_what_a_later_pass_reads_is_refused_by_name(kind: type[Keeps], way: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(dpoptim.SamplesInteractError, match=(CARRY | FLAGS)[kind]):
        attach(kind(), **WAYS[way])


@pytest.mark.parametrize("kind", [RunningMean, Switch, Swapped])
def test_so_is_it_without_a_loss(kind: type[Keeps]) -> None:
    torch.manual_seed(0)
    with pytest.raises(dpoptim.PrivacyError):
        attach(kind())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Watched, Counts])
def test_what_no_later_pass_reads_is_put_back(kind: type[Keeps], way: str) -> None:
    torch.manual_seed(0)
    model = kind()
    settings, mean = model.settings, model.mean
    with attach(model, **WAYS[way]):
        assert (model.most, model.scale, model.passes, model.mode) == (1.0, None, 0, "fast")
        assert model.last is None
        assert model.seen == []
        assert vars(settings) == {"scale": 1.0, "mode": "fast"}
        assert model.settings is settings
        assert model.mean is mean
        assert not mean.any()


@pytest.mark.parametrize("kind", CARRY)
def test_a_refusal_leaves_the_model_as_it_was(kind: type[Keeps]) -> None:
    torch.manual_seed(0)
    model = kind()
    before = {key: each for key, each in vars(model).items() if not key.startswith("_")}
    layer = model.layer
    with pytest.raises(dpoptim.PrivacyError):
        attach(model, loss=loss)
    assert {key: each for key, each in vars(model).items() if not key.startswith("_")} == before
    assert model.layer is layer
