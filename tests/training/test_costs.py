"""A slower way's price is told at the batch that the plan expects, beside what would spare it."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.placement import IN_PLACE
from dpoptim.training.trials import costs
from dpoptim.training.trials.made_up_records import Sample

N, BATCH, D = 60, 40, 6


def sample() -> Sample:
    model = nn.Linear(D, 2)
    return Sample((torch.randn(5, D),), {}, 5).tried(model)


def test_records_alone_cost_their_number_times_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary pass takes 1 ms and 1 us a record; a record alone 2 ms, a vectorised 10 us."""
    timed = []

    def ordinary(model: nn.Module, placement: Any, some: Sample) -> float:
        timed.append(some.rows)
        return 1e-3 * (1 + some.rows / 1000)

    def private(model: nn.Module, placement: Any, isolation: Isolation, some: Sample) -> float:
        return 2e-3 if isolation.alone else 1e-3 * (1 + some.rows / 100)

    monkeypatch.setattr(costs, "ordinary_pass", ordinary)
    monkeypatch.setattr(costs, "private_pass", private)
    for batch in (3, BATCH, 5000):
        given = nn.Linear(D, 2), sample(), IN_PLACE
        alone = costs.slowdown(*given, Isolation.of("alone"), batch, 1)
        vectorised = costs.slowdown(*given, Isolation.of("vmap"), batch, 1)
        assert alone is not None
        assert vectorised is not None
        assert alone.times == pytest.approx(2 * batch / (1 + batch / 1000))
        assert vectorised.times == pytest.approx((1 + batch / 100) / (1 + batch / 1000))
        assert alone.timed
        assert vectorised.timed == (batch <= costs.MOST)
        assert vectorised.rows is None
    assert max(timed) == costs.MOST


def quadratic(model: nn.Module, placement: Any, isolation: Isolation, some: Sample) -> float:
    """As where rows of the parameters fit no cache."""
    return 0.04 * (1 + (some.rows / 10) ** 2)


@pytest.mark.parametrize("steps", [1, costs.LONG_RUN])
def test_batches_that_cost_more_than_their_records_are_timed_in_long_runs(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "ordinary_pass", lambda model, placement, some: 1e-2)
    monkeypatch.setattr(costs, "private_pass", quadratic)
    given = nn.Linear(D, 2), sample(), IN_PLACE, Isolation.of("vmap"), BATCH
    found = costs.slowdown(*given, steps)
    assert found is not None
    if steps == 1:
        assert not found.timed
        assert "at least about" in found.words(BATCH)
        assert "physical_batch_size" not in found.words(BATCH)
    else:
        assert found.timed
        assert found.times == pytest.approx(4 * 17)
        assert "physical_batch_size=5), about 40 " in found.words(BATCH)
        monkeypatch.setattr(costs, "MEMORY", 0)
        again = costs.slowdown(*given, steps)
        assert again is not None
        assert not again.timed


def test_passes_are_timed_as_they_run() -> None:
    model = nn.Linear(D, 2)
    for tier in ("rules", "vmap", "alone"):
        found = costs.slowdown(model, sample(), IN_PLACE, Isolation.of(tier), 20, 1)
        assert found is not None
        assert found.times > 0
    assert costs.slowdown(nn.Linear(D + 1, 2), sample(), IN_PLACE, Isolation(), 20, 1) is None


@pytest.mark.parametrize(
    ("times", "large", "told"), [(4, True, True), (2, True, False), (4, False, False)]
)
def test_rules_that_cost_much_in_a_large_run_are_told(
    times: float, large: bool, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "LARGE_RUN", 0 if large else math.inf)
    monkeypatch.setattr(costs, "ordinary_pass", lambda model, placement, some: 1e-5 * some.rows)
    monkeypatch.setattr(costs, "private_pass", lambda *given: 1e-5 * times * given[-1].rows)
    found = said_of(nn.Linear(D, 2), entropies)
    assert bool(found) == told
    if told:
        assert found[0].startswith("rules for layers keep records apart, and take long")
        assert f"A step of {BATCH} records, as the plan expects, takes about 4 times" in found[0]


def said_of(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> list[str]:
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=BATCH, steps=1, noise_multiplier=0.0, delta=1e-5
    )
    records = TensorDataset(torch.randn(N, D), torch.randint(2, (N,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        dpoptim.attach(plan, model, optimizer, records, loss=loss)
    return [str(w.message) for w in found if w.category is dpoptim.IsolationWarning]


def said(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> str:
    (message,) = said_of(model, loss)
    return message


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(D, 2), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * g


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(x)


def slopes(model: nn.Module, batch: Any) -> Tensor:
    """A gradient penalty, which vectorised models serve."""
    x = batch[0].clone().requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return g.square().sum(1)


def entropies(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize(
    ("model", "loss", "instead"),
    [
        (
            nn.Linear(D, 2),
            lambda m, b: entropies(m, b) + 1e-3 * sum(p.pow(2).sum() for p in m.parameters()),
            "in place of a penalty, c * p.square().sum(), the optimizer's weight_decay=2 * c",
        ),
        (
            Temperature(),
            lambda m, b: entropies(m, b) * m.scale,
            "else dpoptim.per_sample(loss), in which each record has a row of what the loss reads",
        ),
        (
            nn.Sequential(nn.Linear(D, 2), Squares()),
            slopes,
            "setup_context and generate_vmap_rule = True in the custom autograd.Function",
        ),
    ],
    ids=["penalty", "temperature", "second gradients"],
)
def test_a_loss_that_needs_records_alone_is_told_the_price(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], instead: str
) -> None:
    torch.manual_seed(0)
    message = said(model, loss)
    assert "records pass alone, one in each microbatch, because with the loss" in message
    price = f"A step of {BATCH} records, as the plan expects, takes "
    assert message.index("To be faster: ") < message.index(instead) < message.index(price)
    assert message.endswith("isolation='alone' takes this way without a warning.")
