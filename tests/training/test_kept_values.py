"""What a loss or collate function keeps from call to call is named in the guarantee, as a trial
does not show what it does later; and so is a model whose numbers change while it is tried.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

import dpoptim
from dpoptim.training.trials.kept_values import KeptValues

N, FEATURES, CLASSES = 12, 6, 3
generator = torch.Generator().manual_seed(1)
DATA = TensorDataset(torch.randn(N, FEATURES, generator=generator), torch.arange(N) % CLASSES)
Loss = Callable[[nn.Module, Any], Tensor]
CALLS = 0
CENTRE = torch.zeros(CLASSES)


def described(loss: Loss, model: nn.Module | None = None, **options: Any) -> str:
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, CLASSES) if model is None else model
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=N, steps=2, noise_multiplier=0.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return dpoptim.attach(plan, model, optimizer, DATA, loss=loss, **options).describe()


def plain(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def by_past_losses() -> Loss:
    """Weights by what was lost before, once there is enough of it, as time steps are drawn."""
    history = list[float]()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        losses = plain(model, batch)
        weight = sum(history[-100:]) if len(history) > 10_000 else 1.0
        history.extend(losses.detach().tolist())
        return losses * weight

    return loss


def counts_globally(model: nn.Module, batch: Any) -> Tensor:
    global CALLS
    CALLS += 1
    return plain(model, batch)


def moves_a_global(model: nn.Module, batch: Any) -> Tensor:
    CENTRE.add_(1.0)
    return plain(model, batch)


def counts_on_itself(model: nn.Module, batch: Any) -> Tensor:
    vars(counts_on_itself)["calls"] = vars(counts_on_itself).get("calls", 0) + 1
    return plain(model, batch)


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        self.seen += 1
        return plain(model, batch)

    def bound(self, model: nn.Module, batch: Any) -> Tensor:
        return self(model, batch)


KEEPING = {
    "closure": by_past_losses,
    "global": lambda: counts_globally,
    "tensor": lambda: moves_a_global,
    "attribute": lambda: counts_on_itself,
    "module": Criterion,
    "bound": lambda: Criterion().bound,
    "partial": lambda: functools.partial(Criterion().bound),
    "per_sample": lambda: dpoptim.per_sample(by_past_losses()),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", KEEPING)
def test_what_a_loss_keeps_is_named(name: str) -> None:
    assert "loss keeps numbers from call to call" in described(KEEPING[name]())


def test_records_alone_are_no_remedy() -> None:
    said = described(by_past_losses(), isolation="alone")
    assert "loss keeps numbers from call to call" in said


def test_what_keeps_nothing_is_not_named() -> None:
    held = [torch.ones(2), {"a": 1}]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return plain(model, batch) * len(held) + 0 * CENTRE.sum() + CALLS

    for each in (plain, loss):
        assert "from call to call" not in described(each, collate_fn=default_collate)


def test_what_a_collate_function_keeps_is_named() -> None:
    seen = list[int]()

    def collate(records: list[Any]) -> Any:
        seen.append(len(records))
        return default_collate(records)

    said = described(plain, collate_fn=collate)
    assert "collate_fn keeps numbers from call to call" in said
    assert "loss keeps numbers" not in said


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 10_000:  # which no trial sees
            x = x - x.mean(0, keepdim=True)
        return super().forward(x)


def test_a_count_in_the_model_limits_what_its_trial_says() -> None:
    said = described(plain, Counting(FEATURES, CLASSES))
    line = next(each for each in said.splitlines() if "treats records independently" in each)
    assert "while it was tried, numbers in its plain attributes changed" in line
    assert "while it was tried, numbers" not in described(plain)


def test_numbers_are_found_wherever_functions_hold_them() -> None:
    box: dict[str, Any] = {"deep": [({1.5}, [0])]}

    def inner() -> int:
        return len(box)

    def outer(x: int = 0, *, call: Any = inner) -> int:
        return call() + x

    kept = KeptValues({"loss": outer, "collate_fn": None}, nn.Linear(1, 1))
    assert kept.changed() == ()
    box["deep"][0][1][0] = 1
    assert kept.changed() == ("loss",)


class Store(Mapping[int, float]):
    """Values that are read from somewhere when they are asked for."""

    reads = 0

    def __len__(self) -> int:
        return 200_000

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __getitem__(self, key: int) -> float:
        self.reads += 1
        return 1.0


def test_no_store_is_read() -> None:
    store = Store()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return plain(model, batch) * store[0]

    KeptValues({"loss": loss}, nn.Linear(1, 1)).changed()
    assert store.reads == 0
    held = KeptValues({"loss": lambda model, batch: many[0]}, nn.Linear(1, 1))
    assert held.changed() == ()  # too many to look at


class Lazy(dict[str, float]):
    """Reads what it lists only when it is asked, as transformers' tables of all their models."""

    reads = 0

    def keys(self) -> Any:
        self.reads += 1
        return super().keys()

    def values(self) -> Any:
        self.reads += 1
        return super().values()


def test_no_dictionary_is_asked_for_what_it_does_not_hold() -> None:
    lazy = Lazy()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return plain(model, batch) * lazy.get("a", 1.0)

    kept = KeptValues({"loss": loss}, nn.Linear(1, 1))
    assert kept.changed() == ()
    lazy["a"] = 2.0
    assert kept.changed() == ("loss",)
    assert lazy.reads == 0


many = {i: float(i) for i in range(200_000)}
