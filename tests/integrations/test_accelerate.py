"""Accelerate's schedulers, checkpoints and loaders in a private loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 5
DATA = TensorDataset(torch.randn(50, 6), torch.arange(50) % 3)


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


class Loop:
    """A model and a schedule that halves the rate at each step, prepared as usual."""

    def __init__(self, dropout: float = 0.0) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True)
        model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(dropout))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(
            model, optimizer, schedule
        )

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def attach(self) -> dpoptim.PrivateTraining:
        plan = dpoptim.DPSGD(clip_norm=1.0).plan(
            n=50, batch_size=25, steps=STEPS, noise_multiplier=1.0, delta=1e-4
        )
        return dpoptim.attach(plan, self.model, self.optimizer, DATA, loss=loss)

    def step(self, private: dpoptim.PrivateTraining, batch: Any) -> None:
        with self.accelerator.accumulate(self.model):
            private.backward(loss(self.model, batch))
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()


@pytest.mark.parametrize("scaled", [False, True])
def test_a_prepared_scheduler_waits_for_the_last_microbatch(scaled: bool) -> None:
    loop = Loop()
    if scaled:  # as prepared for mixed_precision="fp16" on a GPU
        loop.optimizer = type(loop.optimizer)(
            loop.optimizer.optimizer, scaler=torch.amp.GradScaler("cpu")
        )
        loop.schedule.optimizers = [loop.optimizer]
    skipped = []
    with loop.attach() as private:
        for batch in private.batches(physical_batch_size=5):
            loop.step(private, batch)
            skipped.append(loop.optimizer.step_was_skipped)
            assert skipped[-1] == (not private.finished_step)
            assert loop.rate == 0.5**private.steps_done
    assert skipped.count(False) == private.steps_done == STEPS
    assert any(skipped)


def test_after_a_run_that_was_left_midway_schedulers_go_on() -> None:
    loop = Loop()
    with pytest.raises(KeyError), loop.attach() as private:
        for batch in private.batches(physical_batch_size=5):
            loop.step(private, batch)
            if not private.finished_step:
                raise KeyError
    assert not loop.optimizer.step_was_skipped


def test_a_scheduler_that_was_not_prepared_is_refused_there() -> None:
    loop = Loop()
    loop.schedule = loop.schedule.scheduler
    with pytest.raises(dpoptim.PrivacyError, match="lr was changed"), loop.attach() as private:
        for batch in private.batches(physical_batch_size=5):
            loop.step(private, batch)


def states(folder: Path) -> dict[str, Any]:
    found = torch.load(folder / "random_states_0.pkl", weights_only=False)
    assert isinstance(found, dict)
    return found


def test_saved_states_hold_no_secret_generators(tmp_path: Path) -> None:
    """Whoever had one could draw each record's mask of dropout."""
    save_state = accelerate.Accelerator.save_state
    loop = Loop(dropout=0.5)
    torch.manual_seed(3)
    loop.accelerator.save_state(tmp_path / "before")
    with loop.attach() as private:
        for batch in private.batches():
            masks = torch.get_rng_state()
            loop.accelerator.save_state(tmp_path / "inside")
            assert torch.equal(torch.get_rng_state(), masks)  # the run's own go on
            loop.step(private, batch)
    before, inside = states(tmp_path / "before"), states(tmp_path / "inside")
    assert not torch.equal(masks, before["torch_manual_seed"])
    assert torch.equal(inside["torch_manual_seed"], before["torch_manual_seed"])
    assert inside["random_state"] == before["random_state"]
    assert all(
        (a == b) if isinstance(a, str | int | float) else (a == b).all()
        for a, b in zip(inside["numpy_random_seed"], before["numpy_random_seed"], strict=True)
    )
    assert accelerate.Accelerator.save_state is save_state


def test_two_loops_may_end_in_any_order(tmp_path: Path) -> None:
    save_state = accelerate.Accelerator.save_state
    first, second = Loop(), Loop()
    torch.manual_seed(3)
    own = torch.get_rng_state()
    with first.attach() as one, second.attach() as other:
        a, b = one.batches(), other.batches()
        first.step(one, next(a))
        second.step(other, next(b))
        for batch in a:
            first.step(one, batch)
        second.accelerator.save_state(tmp_path / "inside")
        for batch in b:
            second.step(other, batch)
    assert torch.equal(states(tmp_path / "inside")["torch_manual_seed"], own)
    assert accelerate.Accelerator.save_state is save_state


def test_skipping_first_batches_is_refused_by_name() -> None:
    loop = Loop()
    with loop.attach() as private:
        batches = private.batches()
        with pytest.raises(dpoptim.PrivacyError, match="skip_first_batches.*Fix: .*resume=path"):
            accelerate.skip_first_batches(batches, 2)
        assert not hasattr(batches, "dataset")
