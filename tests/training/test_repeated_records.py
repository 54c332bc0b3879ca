"""A record at several places of a data set counts as several: refused where that can be seen."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

import dpoptim
from dpoptim.audit.units import REPEATS, repeated_records
from dpoptim.training import hold_out_scores
from dpoptim.training.batches import privacy_units
from dpoptim.training.batches.repeated_records import refuse_repeated_records

N = 12
X, Y = torch.randn(N, 3, generator=torch.Generator().manual_seed(0)), torch.arange(N)


class OwnCode(Dataset[Any]):
    """Whose records nobody reads to compare them."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        raise AssertionError("read")


def table() -> TensorDataset:
    return TensorDataset(X, Y)


def items() -> list[dict[str, Any]]:
    return [{"x": [float(i)] * 3, "y": i} for i in range(N)]


def own() -> OwnCode:
    return OwnCode()


def halves(data: Any) -> Any:
    return random_split(data, [N // 2, N // 2], torch.Generator().manual_seed(1))


some, rows = own(), items()
TWICE: dict[str, Callable[[], Any]] = {
    "minority oversampled": lambda: Subset(own(), [*range(N), 0, 1, 0, 1]),
    "bootstrapped": lambda: Subset(table(), torch.arange(N) // 2),  # type: ignore[arg-type]
    "a place from the end": lambda: Subset(own(), [*range(N), -1]),
    "joined to itself": lambda: ConcatDataset([some, some]),
    "joined to the same tensors": lambda: ConcatDataset([table(), table()]),
    "joined to a part of itself": lambda: ConcatDataset([some, Subset(some, [3])]),
    "parts that overlap": lambda: ConcatDataset([Subset(some, [0, 1]), Subset(some, [1, 2])]),
    "a part of a part": lambda: Subset(Subset(own(), [4, 4, 5]), [0, 1]),
    "from two parts of a whole": lambda: Subset(ConcatDataset([some, own()]), [1, N + 1, 1]),
    "a list twice": lambda: rows * 2,
    "a list and some of it": lambda: ConcatDataset([rows, rows[:1]]),  # type: ignore[list-item]
    "seen by views": lambda: dpoptim.data.views(Subset(own(), [0, 0]), lambda x: x, 2),
}
ONCE: dict[str, Callable[[], Any]] = {
    "tensors": table,
    "equal rows": lambda: TensorDataset(torch.ones(N, 3)),
    "a list of equal items": lambda: [{"x": [0.0]} for _ in range(N)],
    "a list of numbers": lambda: [1.0, 1.0, 2.0],
    "code of its own": own,
    "a split": lambda: halves(own())[0],
    "both parts of a split": lambda: ConcatDataset(halves(own())),
    "two data sets": lambda: ConcatDataset([own(), own(), table()]),
    "parts of parts": lambda: Subset(Subset(own(), [4, 4, 5]), [1, 2]),
    "no record": lambda: Subset(own(), []),
    "shuffled": lambda: Subset(own(), np.random.default_rng(0).permutation(N)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", TWICE)
def test_a_record_at_two_places_is_refused(name: str) -> None:
    with pytest.raises(dpoptim.PrivacyError, match="a record more than once.*persons="):
        refuse_repeated_records(TWICE[name]())


@pytest.mark.parametrize("name", ONCE)
def test_records_at_one_place_each_are_served_unread(name: str) -> None:
    refuse_repeated_records(ONCE[name]())


@pytest.mark.parametrize("way", REPEATS)
def test_attach_refuses_before_anything_is_charged(way: str) -> None:
    model, ledger = nn.Linear(2, 1), dpoptim.Ledger(epsilon=5.0, delta=1e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = dpoptim.DPSGD(1.0).plan(n=8, batch_size=4, steps=2, epsilon=3.0, delta=1e-3)
    with pytest.raises(dpoptim.PrivacyError, match="more than once"):
        dpoptim.attach(plan, model, optimizer, REPEATS[way](torch.randn(6, 2)), ledger=ledger)
    assert not ledger.entries()


def test_as_rows_of_their_records_they_are_served_and_move_the_sum_by_one_bound() -> None:
    """The fix that the message names."""

    def grad(first: float) -> Tensor:
        x = X.clone()
        x[0] *= first
        places = [*range(N), 0, 0, 0]
        model = nn.Linear(3, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        plan = dpoptim.DPSGD(0.1).plan(n=N, batch_size=N, steps=1, noise_multiplier=0.0, delta=1e-3)
        with dpoptim.attach(
            plan,
            model,
            optimizer,
            Subset(TensorDataset(x), places),
            persons=places,
            rows_per_record=4,
        ) as private:
            for (inputs,) in private.batches():
                private.backward(model(inputs)[:, 0])
                optimizer.step()
        return -N * model.weight.detach()

    moved = float((grad(50.0) - grad(0.0)).norm())
    assert 0.09 < moved <= 0.1


class Mixes(Dataset[Any]):
    """Mixup inside of a data set: half of each record, and half of one drawn for its place."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor]:
        drawn = torch.Generator().manual_seed(index)
        other = int(torch.randint(N, (), generator=drawn))
        return ((self.x[index] + self.x[other]) / 2,)


class Standardises(Mixes):
    """By the mean and deviation of its own records."""

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return ((self.x[index] - self.x.mean(0)) / self.x.std(0),)


@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [(TensorDataset, 0.9, 1.0), (Mixes, 2.75, 2.85), (Standardises, 3.35, 3.45)],
)
def test_a_data_set_that_reads_other_records_is_on_trust(
    kind: Callable[[Tensor], Dataset[Any]], least: float, most: float
) -> None:
    """One record moves the sum by more than its bound, by what docs/limits.md says."""

    def sums(x: Tensor) -> Tensor:
        model = nn.Linear(3, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        plan = dpoptim.DPSGD(1.0).plan(n=N, batch_size=N, steps=1, noise_multiplier=0.0, delta=1e-3)
        with dpoptim.attach(plan, model, optimizer, kind(x)) as private:
            for (inputs,) in private.batches():
                private.backward(model(inputs)[:, 0])
                optimizer.step()
        return -N * model.weight.detach()

    x = X.clone()
    x[0] = 5.0
    without = x.clone()
    without[0] = 0.0  # whose gradient is none, where nobody else reads it
    moved = float((sums(x) - sums(without)).norm())
    assert least < moved <= most


def test_without_the_check_a_record_would_count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert repeated_records() == ""
    monkeypatch.setattr(privacy_units, "refuse_repeated_records", lambda train_set: None)
    assert repeated_records().count("clip norms") == len(REPEATS)
    monkeypatch.setattr(hold_out_scores, "refuse_repeated_records", lambda data, name: None)
    assert repeated_records().count("count of scores by 2") == len(REPEATS)


SERIES = torch.arange(40.0)
WINDOWS: dict[str, tuple[Callable[[], Dataset[Any]], bool]] = {
    "one after the other": (lambda: TensorDataset(SERIES.unfold(0, 7, 1)), True),
    "by threes": (lambda: TensorDataset(SERIES.unfold(0, 7, 3)), True),
    "of several numbers": (lambda: TensorDataset(SERIES.view(20, 2).unfold(0, 4, 1)), True),
    "beside labels": (lambda: TensorDataset(Y, SERIES.unfold(0, 7, 1)[:N]), True),
    "apart": (lambda: TensorDataset(SERIES.unfold(0, 7, 7)), False),
    "taken apart": (lambda: Subset(TensorDataset(SERIES.unfold(0, 7, 1)), range(0, 34, 7)), False),
    "taken": (lambda: Subset(TensorDataset(SERIES.unfold(0, 7, 1)), range(0, 34, 5)), True),
    "within each": (lambda: TensorDataset(SERIES.view(4, 10).unfold(1, 3, 1)), False),
    "turned": (lambda: TensorDataset(SERIES.view(4, 10).T), False),
    "cut": (lambda: TensorDataset(SERIES.view(4, 10)[:, :3]), False),
    "one number for all": (lambda: TensorDataset(X, torch.zeros(1).expand(N)), False),
    "images": (
        lambda: TensorDataset(torch.zeros(4, 3, 5, 5).to(memory_format=torch.channels_last)),
        False,
    ),
    "copies": (lambda: TensorDataset(SERIES.unfold(0, 7, 1).contiguous()), False),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_that_overlap_are_named(name: str) -> None:
    build, overlap = WINDOWS[name]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        privacy_units.units_of(build(), 1, "mean", None)
    assert ["persons=" in str(each.message) for each in told] == [True] * overlap


def test_windows_of_known_persons_are_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        privacy_units.units_of(TensorDataset(SERIES.unfold(0, 7, 1)), 1, "mean", [0] * 34)
