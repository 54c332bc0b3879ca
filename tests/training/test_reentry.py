"""A run that was left is entered again where it stopped: the same end, one charge, and never twice
at once.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.accounting.ledger import Ledger
from dpoptim.training.private_training import PrivateTraining

STEPS, N = 6, 60
METHODS = {
    "DP-SGD": dpoptim.DPSGD(clip_norm=1.0),
    "correlated noise": dpoptim.DPFTRL(clip_norm=1.0),
    "error feedback": dpoptim.DiceSGD(clip_norm=1.0),
    "quantile": dpoptim.DPSGD(clip_norm=dpoptim.PrivateQuantile(0.5, when="all along")),
}


def plan(method: Any = METHODS["DP-SGD"]) -> dpoptim.Plan:
    relation = {"neighboring": "zero-out"} if isinstance(method, dpoptim.DPFTRL) else {}
    return method.plan(
        n=N, batch_size=15, steps=STEPS, noise_multiplier=1.0, delta=1e-4, **relation
    )


def attached(
    chosen: dpoptim.Plan | None = None, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, PrivateTraining]:
    torch.manual_seed(0)
    x = torch.randn(N, 4)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    private = dpoptim.attach(chosen or plan(), model, optimizer, data, noise_seed=3, **options)
    return model, optimizer, private


def train(
    model: nn.Module, optimizer: Any, private: PrivateTraining, until: int = STEPS, cut: int = 4
) -> None:
    for x, y in private.batches(physical_batch_size=cut):
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
        if private.steps_done == until and private.finished_step:
            return


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Stop(Exception):
    pass


@pytest.mark.one_in(2)
@pytest.mark.parametrize("method", METHODS)
def test_parts_end_where_the_whole_does(method: str, tmp_path: Path) -> None:
    """Left after a step, then by an exception in the middle of one; between, a look at the
    model.
    """
    chosen = plan(METHODS[method])
    model, optimizer, private = attached(chosen)
    with private:
        train(model, optimizer, private)
    whole = weights(model)

    ledger = Ledger(tmp_path / "parts.sqlite", neighboring=chosen.neighboring)
    model, optimizer, private = attached(chosen, ledger=ledger)
    with private:
        train(model, optimizer, private, until=2)
    keys = list(model.state_dict())
    assert model(torch.zeros(1, 4)).shape == (1, 2)
    with pytest.raises(Stop) as stopped, private:
        for x, y in private.batches(physical_batch_size=4):
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            if private.steps_done == 3:
                raise Stop
            optimizer.step()
    assert stopped.value.__notes__[0].startswith("dpoptim: 3 of 6 steps are done, and the whole")
    with private:
        train(model, optimizer, private)
        assert any("entering it again" in item.text for item in private.basis)
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(weights(model), whole, rtol=1e-5, atol=1e-6)
    (entry,) = ledger.entries()
    assert (entry.state, entry.resumed, entry.repeated) == ("committed", 0, 0)
    assert ledger.verify()
    with pytest.raises(dpoptim.PrivacyError, match="all 6 planned steps are done"), private:
        pass


def test_a_run_that_was_left_is_saved_and_goes_on_elsewhere(tmp_path: Path) -> None:
    ledger, path = Ledger(tmp_path / "runs.sqlite"), tmp_path / "run.checkpoint"
    model, optimizer, private = attached(ledger=ledger)
    with pytest.raises(Stop), private:
        train(model, optimizer, private, until=2)
        next(private.batches())
        raise Stop
    private.save(path)
    _, _, again = attached(ledger=ledger, resume=path)
    assert again.steps_done == 2
    with again:
        train(again.model, again.optimizers[0], again)
    (entry,) = ledger.entries()
    assert (entry.state, entry.resumed) == ("committed", 1)


def test_two_cannot_go_on_with_one_run(tmp_path: Path) -> None:
    """The one that was left and a copy of its checkpoint, whichever comes first."""
    ledger, path = Ledger(tmp_path / "runs.sqlite"), tmp_path / "run.checkpoint"
    model, optimizer, private = attached(ledger=ledger)
    with private:
        train(model, optimizer, private, until=2)
        private.save(path)
    other_model, other_optimizer, other = attached(ledger=ledger, resume=path)
    with other:
        train(other_model, other_optimizer, other, until=3)
        elsewhere = pytest.raises(dpoptim.LedgerError, match="taken up from a checkpoint meanwhile")
        with elsewhere, private:
            train(model, optimizer, private)
        assert private.steps_done == 2


def test_checkpoints_before_a_completed_part_are_void(tmp_path: Path) -> None:
    """Who left the run without saving has seen what it released: it may not be done again."""
    ledger, path = Ledger(tmp_path / "runs.sqlite"), tmp_path / "run.checkpoint"
    model, optimizer, private = attached(ledger=ledger)
    with private:
        train(model, optimizer, private, until=1)
        private.save(path)
        train(model, optimizer, private, until=3)
    with private:
        train(model, optimizer, private, until=4)
        with pytest.raises(dpoptim.LedgerError, match="knows of no such checkpoint"):
            attached(ledger=ledger, resume=path)
        private.save(path)
    assert attached(ledger=ledger, resume=path)[2].steps_done == 4


def test_a_checkpoint_that_became_void_while_it_was_taken_up_does_not_go_on(tmp_path: Path) -> None:
    ledger, path = Ledger(tmp_path / "runs.sqlite"), tmp_path / "run.checkpoint"
    model, optimizer, private = attached(ledger=ledger)
    with private:
        train(model, optimizer, private, until=1)
        private.save(path)
        other_model, other_optimizer, other = attached(ledger=ledger, resume=path)
        train(model, optimizer, private, until=3)
    with private:
        with pytest.raises(dpoptim.LedgerError, match="earlier checkpoints cannot go on"), other:
            train(other_model, other_optimizer, other)
        assert other.steps_done == 1
        train(model, optimizer, private)
    (entry,) = ledger.entries()
    assert (entry.state, entry.resumed, entry.repeated) == ("committed", 0, 0)


def test_what_was_changed_meanwhile_is_named() -> None:
    model, optimizer, private = attached()
    with private:
        train(model, optimizer, private, until=1)
    model[0].weight.requires_grad_(False)
    with pytest.raises(dpoptim.PrivacyError, match=r"0\.weight.*frozen"), private:
        pass
    model[0].weight.requires_grad_(True)
    mixing = model[1].register_forward_hook(lambda module, x, y: y - y.mean(0))
    with pytest.raises(dpoptim.PrivacyError, match="records are mixed"), private:
        pass
    mixing.remove()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    other = dpoptim.attach(plan(), model, sgd, private._prepared.train_set)
    with other, pytest.raises(dpoptim.PrivacyError, match="attached elsewhere"), private:
        pass
    with private:
        train(model, optimizer, private)
    assert private.steps_done == STEPS


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_cannot_enter_the_run_again() -> None:
    model, optimizer, private = attached()
    with private:
        train(model, optimizer, private, until=1)
    child = os.fork()
    if not child:
        try:
            private.__enter__()
        except dpoptim.PrivacyError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


OPEN = """
import torch, dpoptim
from torch.utils.data import TensorDataset

data = TensorDataset(torch.randn(200, 4), torch.zeros(200, dtype=torch.long))
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
plan = dpoptim.DPSGD(1.0).plan(n=200, batch_size=20, epochs=1, noise_multiplier=1.0, delta=1e-4)
private = dpoptim.attach(plan, model, optimizer, data, loss=lambda m, b: m(b[0]).square().sum(1))
private.__enter__()
batches = iter(private.batches())
next(batches)
"""


def test_a_loop_still_open_when_python_ends_says_nothing() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", OPEN],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
