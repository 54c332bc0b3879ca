"""Losses that a number of the whole batch decides are refused, whatever it is compared with."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.training.trials.isolation import IsolationWarning

N, FEATURES, FAR = 24, 6, 1e3
DRAWN = torch.randn(N, FEATURES, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(DRAWN, torch.arange(N) % 3)


def attach(loss: Any, model: nn.Module | None = None) -> None:
    torch.manual_seed(0)
    bounded = nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 3)  # whatever records there are
    model = nn.Sequential(*bounded) if model is None else model
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=6, steps=2, noise_multiplier=1.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan, model, optimizer, DATA, loss=loss):
        pass


def each(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def limited_norm(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch[0])
    most = (logits.detach().norm() / FAR).clamp(min=1)
    return F.cross_entropy(logits / most, batch[1], reduction="none")


def confident(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch[0])
    sure = logits.softmax(1).amax(1).min() > 0.9
    return F.cross_entropy(logits * (0.5 if sure else 1), batch[1], reduction="none")


DECIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda losses: losses * 0.01 if losses.mean() > FAR else losses,
    "max, read by Python": lambda losses: losses * 0 if losses.max().item() > FAR else losses,
    "detached": lambda losses: losses * 0.1 if float(losses.detach().norm()) > FAR else losses,
    "any": lambda losses: losses * 0.1 if (losses > FAR).any() else losses,
    "count": lambda losses: losses * 0.1 if (losses > FAR).sum() > 2 else losses,
    "no branch": lambda losses: torch.where(losses.mean() > FAR, losses * 0.02, losses),
    "median": lambda losses: losses * (losses < 80 * losses.median()),
    "divisor with a floor": lambda losses: losses / losses.detach().mean().clamp(min=FAR),
    "scalar with a ceiling": lambda losses: losses.mean().clamp(max=FAR),
    "scalar by a flag": lambda losses: losses.mean() * (losses.mean() < FAR),
    "smooth": lambda losses: losses * torch.sigmoid(40 - losses.mean()),
    "numpy": lambda losses: losses * 0.1 if losses.detach().numpy().max() > 20 else losses,
    "lists": lambda losses: losses * 0.1 if max(losses.tolist()) > 20 else losses,
}


@pytest.mark.parametrize("name", DECIDED)
def test_a_number_of_the_batch_decides(name: str) -> None:
    said = "whole batch|missing numbers|records pass alone"  # these beside what is no number
    with pytest.raises((dpoptim.SamplesInteractError, IsolationWarning), match=said):
        attach(lambda model, batch: DECIDED[name](each(model, batch)))


@pytest.mark.parametrize("loss", [limited_norm, confident])
def test_a_number_of_the_outputs_decides(loss: Any) -> None:
    with pytest.raises(dpoptim.SamplesInteractError, match="branches on a number|missing numbers"):
        attach(loss)


def checked(loss: Any, model: nn.Module | None = None) -> None:
    torch.manual_seed(0)
    bounded = nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 3)
    dpoptim.check(nn.Sequential(*bounded) if model is None else model, loss, DATA[:8])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", DECIDED)
def test_check_finds_a_number_of_the_batch(name: str) -> None:
    with pytest.raises(dpoptim.SamplesInteractError):
        checked(lambda model, batch: DECIDED[name](each(model, batch)))


LOGGED: list[float] = []


def added_up(losses: Tensor) -> Tensor:
    total = torch.zeros(2)
    total[0] = losses.mean().detach()
    total[1].add_(losses.mean().detach())
    return losses + 0 * total.numel()


def within_a_loop(losses: Tensor) -> Tensor:
    total = torch.zeros(())
    for _ in range(2):
        total += losses.mean()
    return total / 2


OWN: dict[str, Callable[[Tensor], Tensor]] = {
    "limited each": lambda losses: losses.clamp(max=1.3),
    "left out each": lambda losses: torch.where(losses > FAR, 0.01 * losses, losses),
    "logged": lambda losses: (LOGGED.append(losses.mean().item()), losses.mean())[1],
    "counted": lambda losses: losses.sum() / len(losses),
    "finite": lambda losses: losses if losses.isfinite().all() else losses.nan_to_num(),
    "added up": added_up,
    "within a loop": within_a_loop,
    "in lists": lambda losses: (LOGGED.extend(losses.tolist()), losses)[1],
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", OWN)
def test_what_each_record_decides_itself_is_served(name: str) -> None:
    for tried in attach, checked:
        tried(lambda model, batch: OWN[name](each(model, batch)))


class EarlyExit(nn.Module):
    """Leaves out a layer where the whole batch is confident."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        early = self.head(hidden)
        if early.softmax(1).amax(1).min() > 0.9:
            return early
        return self.head(self.second(hidden).tanh())


@pytest.mark.parametrize("loss", [None, each])
def test_records_pass_alone_through_a_model_that_the_batch_decides(loss: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dpoptim.LossNotCheckedWarning)
        with pytest.warns(IsolationWarning, match="number of the whole batch"):
            attach(loss, EarlyExit())


def halved(g: Tensor) -> Tensor:
    return 0.5 * g if g.norm() > FAR else g


class HalvedBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.where(g.norm() > FAR, 0.5 * g, g)


class Guarded(nn.Module):
    """Halves the gradients of a whole batch where they are large together."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.first, self.head, self.where = nn.Linear(FEATURES, 8), nn.Linear(8, 3), where
        self.bound = nn.Tanh()
        if where == "module":
            self.bound.register_full_backward_hook(lambda m, given, g: (halved(given[0]),))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.bound(self.first(x))
        if self.where == "tensor" and hidden.requires_grad:
            hidden.register_hook(halved)
        return self.head(HalvedBackwards.apply(hidden) if self.where == "function" else hidden)


@pytest.mark.parametrize("where", ["tensor", "function", "module"])
def test_records_pass_alone_where_a_backward_pass_decides_by_the_batch(where: str) -> None:
    with pytest.warns(IsolationWarning, match="number of the whole batch"):
        attach(each, Guarded(where))


def test_a_hook_that_looks_at_a_gradient_decides_nothing() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 3))
    model[1].register_full_backward_hook(lambda m, given, g: LOGGED.append(g[0].norm().item()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach(each, model)


def test_check_finds_a_model_that_the_batch_decides() -> None:
    with pytest.raises(dpoptim.PrivacyError, match="number of the whole batch"):
        checked(each, EarlyExit())


def test_gradients_that_overflow_with_larger_weights_show_nothing() -> None:
    """Of no record is the gradient finite there: scores are 0, where the root's slope is none."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        probabilities = model(batch[0]).softmax(1)
        assert probabilities.detach().numpy().min() >= 0  # what Python reads is tried there, too
        return probabilities.sqrt().sum(1) + each(model, batch)

    attach(loss)
