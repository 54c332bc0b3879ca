"""Runs in which a record's place says when it takes part again: the place must stay its own."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

import dpoptim
from dpoptim.assumptions import PLACES_ARE_KEPT
from dpoptim.distributed.agreement import sample_of
from dpoptim.training.batches.privacy_units import Units

N, STEPS, SAVED = 24, 9, 4
generator = torch.Generator().manual_seed(0)
X, NUMBERS = torch.randn(30, 3, generator=generator), torch.arange(30)

BY_PLACE: dict[str, Any] = {
    "fixed": dpoptim.DPFTRL(1.0),
    "cyclic Poisson": dpoptim.DPFTRL(1.0, sampling="cyclic-poisson", bands=3),
    "bins": dpoptim.DPFTRL(1.0, sampling="balls-in-bins", bands=3),
    "b-min-sep": dpoptim.DPFTRL(1.0, sampling="b-min-sep", bands=3),
    "error feedback": dpoptim.DiceSGD(1.0),
}


def plan_of(method: Any, n: int = N) -> dpoptim.Plan:
    return dpoptim.Plan(method, n, n // 3, STEPS, 1.0, "zero-out", 1e-3)


def split(seed: int) -> Any:
    """What `random_split` makes without a generator: another split each time."""
    shuffled = torch.Generator().manual_seed(seed)
    return random_split(TensorDataset(X, NUMBERS), [N, 30 - N], shuffled)[0]


def interrupted(
    plan: dpoptim.Plan, first: Any, then: Any, path: Path, **both: Any
) -> tuple[dict[int, list[int]], dpoptim.PrivateTraining]:
    """A run that goes on with another data set; at which steps each record took part."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taken: dict[int, list[int]] = defaultdict(list)

    def go_on(private: dpoptim.PrivateTraining, until: int) -> None:
        for x, numbers in private.batches():
            for number in {*numbers.tolist()}:
                taken[number].append(private.steps_done)
            private.backward(model(x).sum(1))
            optimizer.step()
            if private.steps_done == until:
                return

    begun, resumed = ({**both, **given} for given in (first[1], then[1]))
    with dpoptim.attach(plan, model, optimizer, first[0], noise_seed=1, **begun) as private:
        go_on(private, SAVED)
        private.save(path)
    with dpoptim.attach(
        plan, model, optimizer, then[0], noise_seed=1, resume=path, **resumed
    ) as private:
        go_on(private, STEPS)
    return taken, private


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", BY_PLACE)
def test_a_run_does_not_go_on_with_another_split(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take records more often, or sooner again, than it is charged for."""
    plan = plan_of(BY_PLACE[name])
    path = tmp_path / "run"
    with pytest.raises(ValueError, match="other places of records.*seeded"):
        interrupted(plan, (split(0), {}), (split(1), {}), path)
    _, private = interrupted(plan, (split(0), {}), (split(0), {}), path)
    assert PLACES_ARE_KEPT in private.basis
    monkeypatch.setattr(Units, "places_in", lambda *_: "")  # as if nobody looked
    taken, _ = interrupted(plan, (split(0), {}), (split(1), {}), path)
    apart = min(int(np.diff(steps).min(initial=STEPS)) for steps in taken.values())
    often = max(map(len, taken.values()))
    assert apart < plan.sampler.separation or often > plan.sampler.participations(STEPS)


def test_coins_tossed_anew_in_each_step_need_no_places(tmp_path: Path) -> None:
    plan = plan_of(dpoptim.DPSGD(1.0))
    _, private = interrupted(plan, (split(0), {}), (split(1), {}), tmp_path / "run")
    assert PLACES_ARE_KEPT not in private.basis


def test_a_run_for_persons_goes_on_with_the_same_persons_alone(tmp_path: Path) -> None:
    """Rows that were drawn before the pause would be other persons', by any sampler."""
    plan = plan_of(dpoptim.DPSGD(1.0), N // 2)
    data, owners = split(0), np.arange(N) // 2
    same = {"persons": owners}
    options = {"rows_per_record": 2}
    interrupted(plan, (data, same), (data, same), tmp_path / "run", **options)
    others = {"persons": np.roll(owners, 1)}
    with pytest.raises(ValueError, match="the same persons"):
        interrupted(plan, (data, same), (data, others), tmp_path / "run", **options)


class Augmented(Dataset[Any]):
    """Code of its own, which never reads the same twice."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index] + float(np.random.default_rng().normal()), NUMBERS[index]


def hugging_face(order: Tensor) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": X.tolist(), "number": NUMBERS.tolist()}).select(order)


STORED: dict[str, Callable[[Tensor], Any]] = {
    "tensors": lambda order: TensorDataset(X[order], NUMBERS[order]),
    "subset": lambda order: Subset(Augmented(), order.tolist()),
    "list of dictionaries": lambda order: [{"x": X[i].numpy(), "text": str(i)} for i in order],
    "parts": lambda order: ConcatDataset(
        [TensorDataset(X[order]), TensorDataset(X[order.flip(0)])]
    ),
    "table": hugging_face,
}


@pytest.mark.parametrize("name", STORED)
def test_stored_records_are_told_by_their_order(name: str) -> None:
    make, order = STORED[name], torch.arange(N)
    assert sample_of(make(order)) == sample_of(make(order))
    assert sample_of(make(order)) != sample_of(make(order.roll(1)))
    assert sample_of(make(order)).startswith(f"{N * (1 + (name == 'parts'))} records")


def test_what_never_reads_the_same_is_not_read(tmp_path: Path) -> None:
    assert sample_of(Augmented()) == sample_of(Augmented())
    plan = plan_of(BY_PLACE["fixed"])
    interrupted(plan, (Augmented(), {}), (Augmented(), {}), tmp_path / "run")
