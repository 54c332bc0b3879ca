"""Nothing is spent only where nobody, in no process, has begun a release of the run."""

from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.accounting.ledger_charge import Charge

PLAN = dpoptim.DPSGD(clip_norm=1.0).plan(n=40, batch_size=8, steps=8, epsilon=1.0, delta=1e-5)


def attached(ledger: dpoptim.Ledger | None, resume: Path | None = None) -> Any:
    model = torch.nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(
        torch.randn(40, 5, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    )
    return dpoptim.attach(
        PLAN, model, optimizer, data, ledger=ledger, resume=resume, loss_reduction="mean"
    )


def saved_then_killed(ledger: dpoptim.Ledger | None, path: Path, steps: int) -> None:
    """A process saves before its first step, and dies after so many."""
    with pytest.raises(KeyboardInterrupt), attached(ledger) as private:
        private.save(path)
        for x, y in private.batches():
            if private.steps_done == steps:
                raise KeyboardInterrupt
            F.cross_entropy(private.model(x), y).backward()
            private.optimizers[0].step()


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kept", [True, False])
def test_a_run_taken_up_counts_what_a_killed_process_released(
    steps: int, kept: bool, tmp_path: Path
) -> None:
    """The whole plan counts also where the ledger at hand has no charge: another one may."""
    path = tmp_path / "run.secret"
    ledger = dpoptim.Ledger(tmp_path / "own.sqlite", epsilon=3.0, delta=1e-4) if kept else None
    saved_then_killed(ledger, path, steps)
    with attached(ledger, resume=path) as private:
        private.finish(refund=kept)
        spent = private.spent()
    assert private.steps_done == 0
    assert spent.epsilon == PLAN.guarantee.epsilon
    assert private.spent() == spent  # after the loop is left, too


def test_before_its_first_release_a_run_has_spent_nothing(tmp_path: Path) -> None:
    with dpoptim.Ledger(tmp_path / "own.sqlite", epsilon=3.0, delta=1e-4) as ledger:
        with attached(ledger) as private:
            private.save(tmp_path / "run.secret")
            assert private.spent().epsilon == 0
        with attached(ledger, resume=tmp_path / "run.secret") as other:
            for x, y in other.batches():  # one step of somebody else's counts for both
                F.cross_entropy(other.model(x), y).backward()
                other.optimizers[0].step()
                break
        assert private.spent().epsilon == PLAN.guarantee.epsilon


def test_what_was_reserved_and_never_begun_is_nothing() -> None:
    charge = Charge(
        dpoptim.Ledger(neighboring="zero-out"),
        dp_accounting.GaussianDpEvent(1.0),
        "zero-out",
        "run",
    )
    charge.take_up("0" * 32, 0, "0" * 64)
    assert not charge.nothing_begun  # nobody knows
    charge.open()
    assert charge.nothing_begun
    charge.announce(0, 3)
    assert not charge.nothing_begun
