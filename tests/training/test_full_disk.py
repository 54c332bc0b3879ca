"""A disk that is full when a checkpoint is written: what was saved before is whole, the run goes
on, and so does a later one from the older checkpoint, on one charge.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.training.private_training import PrivateTraining

resource = pytest.importorskip("resource")
STEPS, N, WIDE = 6, 40, 400


@contextmanager
def no_room_for(size: int) -> Iterator[None]:
    """The system cuts every write off at this size of a file, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def attached(ledger: dpoptim.Ledger, resume: Path | None = None) -> PrivateTraining:
    torch.manual_seed(0)
    model = nn.Linear(WIDE, WIDE)  # 640 kB
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=10, steps=STEPS, noise_multiplier=1.0, delta=1e-4
    )
    data = TensorDataset(torch.randn(N, WIDE), torch.randint(0, WIDE, (N,)))
    return dpoptim.attach(plan, model, optimizer, data, ledger=ledger, resume=resume)


def train(private: PrivateTraining, until: int) -> None:
    for x, y in private.batches():
        private.backward(F.cross_entropy(private.model(x), y, reduction="none"))
        private.optimizers[0].step()
        if private.steps_done == until:
            return


@pytest.mark.parametrize("dies", [False, True])
def test_a_full_disk_costs_no_checkpoint_and_no_second_charge(dies: bool, tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    path, ledger = tmp_path / "secrets" / "run.checkpoint", dpoptim.Ledger(tmp_path / "runs.sqlite")
    private = attached(ledger)
    with pytest.raises(OSError, match=r".") if dies else no_room_for(10**9), private:
        train(private, until=2)
        private.save(path)
        saved = path.read_bytes()
        train(private, until=3)
        with no_room_for(300_000):
            if dies:
                private.save(path)
            with pytest.raises(OSError, match=r"."):
                private.save(path)
        assert path.read_bytes() == saved
        train(private, until=4)
        private.save(path)
        assert path.read_bytes() != saved
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    again = attached(ledger, resume=path)
    assert again.steps_done == (2 if dies else 4)
    with again:
        train(again, until=STEPS)
    (entry,) = ledger.entries()
    assert (entry.state, entry.resumed) == ("committed", 1)
    assert entry.repeated >= dies  # the third step was done twice


def test_a_ledger_that_cannot_be_written_refuses_the_first_step_and_is_asked_again(
    tmp_path: Path,
) -> None:
    """Nothing is released before the charge is on disk; and nothing is lost."""
    ledger = dpoptim.Ledger(tmp_path / "runs.sqlite")
    private = attached(ledger)
    before = private.model.weight.detach().clone()
    with private:
        with no_room_for(0), pytest.raises(dpoptim.LedgerError, match="disk"):
            train(private, until=1)
        assert private.steps_done == 0
        assert torch.equal(private.model.weight, before)
        assert private.model.weight.grad is None
        assert not ledger.entries()
        train(private, until=2)
        assert [entry.state for entry in ledger.entries()] == ["open"]
        with no_room_for(0), pytest.raises(dpoptim.LedgerError, match="disk"):
            train(private, until=3)
        done = private.steps_done
        train(private, until=STEPS)
        assert done in (2, 3)
    (entry,) = ledger.entries()
    assert entry.state == "committed"
    ledger.verify()
