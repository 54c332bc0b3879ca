"""Memory that runs out inside the optimizer: the step is counted, said, and its update can be done
again.
"""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim import DPSGD, Ledger
from dpoptim.training.private_training import PrivateTraining

STEPS, FAILS_AT = 4, 3
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.03)


def begin(make: Make, **options: Any) -> tuple[PrivateTraining, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,)))
    model = nn.Linear(3, 2)
    optimizer = make(list(model.parameters()))
    plan = DPSGD(1.0).plan(n=40, batch_size=10, steps=STEPS, noise_multiplier=2.0, delta=1e-5)
    return dpoptim.attach(plan, model, optimizer, data, noise_seed=1, **options), model, optimizer


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(
    private: PrivateTraining, model: nn.Module, optimizer: torch.optim.Optimizer, until: int = STEPS
) -> None:
    for x, y in private.batches():
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
        if private.steps_done == until:
            return


def fail(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("no memory")


def until_the_failure(
    make: Make, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[PrivateTraining, nn.Module, torch.optim.Optimizer]:
    """Steps 1 and 2 succeed; in step 3 the gate releases, and the optimizer fails."""
    private, model, optimizer = begin(make, **options)
    train(private, model, optimizer, FAILS_AT - 1)
    before = weights(model)
    with monkeypatch.context() as patch:
        name = type(optimizer).__name__.lower()
        patch.setattr(sys.modules[f"torch.optim.{name}"], name, fail)
        with pytest.raises(torch.OutOfMemoryError):
            train(private, model, optimizer)
    assert private.steps_done == FAILS_AT
    assert torch.equal(weights(model), before)
    return private, model, optimizer


@pytest.mark.parametrize("make", [sgd, adam])
def test_going_on_is_refused_and_stepping_again_redoes_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, expected, optimizer = begin(make)
    train(whole, expected, optimizer)
    private, model, optimizer = until_the_failure(make, monkeypatch)
    with pytest.raises(
        dpoptim.PrivacyError,
        match=r"is counted, and the weights are where they "
        r"were.*step\(\) again",
    ):
        train(private, model, optimizer)
    optimizer.step()
    assert private.steps_done == FAILS_AT
    train(private, model, optimizer)
    assert torch.equal(weights(model), weights(expected))


@pytest.mark.parametrize("make", [sgd, adam])
def test_a_resume_redoes_it(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole, expected, optimizer = begin(make)
    train(whole, expected, optimizer, FAILS_AT)
    path, ledger = tmp_path / "run.secret", Ledger(tmp_path / "ledger")
    private, model, optimizer = until_the_failure(make, monkeypatch, ledger=ledger)
    private.save(path)
    private.detach()
    private, model, optimizer = begin(make, ledger=ledger, resume=path)
    assert private.steps_done == FAILS_AT
    assert torch.equal(weights(model), weights(expected))
    assert all(p.grad is None for p in model.parameters())
    train(private, model, optimizer)
    private.detach()
    (entry,) = ledger.entries()
    assert (entry.state, entry.repeated) == ("committed", 0)


def test_a_resume_redoes_the_last_update_of_a_completed_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, ledger = tmp_path / "run.secret", Ledger(tmp_path / "ledger")
    private, model, optimizer = begin(sgd, ledger=ledger)
    train(private, model, optimizer, STEPS - 1)
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["torch.optim.sgd"], "sgd", fail)
        with pytest.raises(torch.OutOfMemoryError):
            train(private, model, optimizer)
    private.save(path)
    private.detach()
    assert ledger.entries()[0].state == "committed"
    before = weights(model)
    private, model, optimizer = begin(sgd, ledger=ledger, resume=path)
    assert not torch.equal(weights(model), before)
    assert not list(private.batches())
    private.detach()


def test_an_update_that_failed_half_way_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    private, model, optimizer = begin(sgd)
    train(private, model, optimizer, 1)

    def half(parameters: list[Tensor], *_: Any, **__: Any) -> None:
        parameters[0].add_(1.0)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["torch.optim.sgd"], "sgd", half)
        with pytest.raises(MemoryError):
            train(private, model, optimizer)
    with pytest.raises(dpoptim.PrivacyError, match="may have moved in part"):
        train(private, model, optimizer)
    private.save(tmp_path / "run.secret")
    private.detach()
    with pytest.warns(RuntimeWarning, match="may move twice"):
        private, model, optimizer = begin(sgd, resume=tmp_path / "run.secret")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(private, model, optimizer)
    private.detach()


def test_the_gradient_of_a_failed_update_is_the_released_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is stored is what the gate released, and nothing fresh is drawn for it."""
    private, model, optimizer = until_the_failure(sgd, monkeypatch)
    released = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    kept = private._released_gradients.unfinished()
    assert kept is not None
    for one, other in zip(kept["gradients"].values(), released, strict=True):
        assert torch.equal(one, other)
    drawn: list[object] = []
    monkeypatch.setattr("dpoptim.gate.planned.add_normal", lambda *a: drawn.append(a))
    optimizer.step()
    assert drawn == []
    private.detach()


@pytest.mark.parametrize("way", ["step", "resume"])
@pytest.mark.parametrize("instead", [True, False], ids=["another", "none"])
def test_another_gradient_in_its_place_moves_nothing(
    instead: bool, way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What was found in ``.grad`` was taken for the release, or left out where it was cleared."""
    whole, expected, optimizer = begin(sgd)
    train(whole, expected, optimizer, FAILS_AT)
    ledger = Ledger(tmp_path / "ledger")
    private, model, optimizer = until_the_failure(sgd, monkeypatch, ledger=ledger)
    optimizer.zero_grad()
    for p in model.parameters() if instead else ():
        p.grad = torch.full_like(p, 100.0)
    if way == "step":
        optimizer.step()
    else:
        private.save(tmp_path / "run.secret")
        private.detach()
        private, model, _ = begin(sgd, ledger=ledger, resume=tmp_path / "run.secret")
    assert torch.equal(weights(model), weights(expected))
    private.detach()
