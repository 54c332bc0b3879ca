"""Between two microbatches of a step no optimizer runs: how many there are is private."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import dpoptim

N, STEPS = 64, 3


class InState(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        moved = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["calls"] = self.state[p].get("calls", 0) + 1
        return moved

    @property
    def calls(self) -> int:
        return max(kept["calls"] for kept in self.state.values())


class InAnAttribute(torch.optim.SGD):
    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure)


class InAList(torch.optim.SGD):
    """In something that a copy of the optimizer would share."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kept: list[int] = []

    def step(self, closure: Any = None) -> Any:
        self.kept.append(1)
        return super().step(closure)

    @property
    def calls(self) -> int:
        return len(self.kept)


class ByHooks(torch.optim.SGD):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.before = self.after = 0
        self.register_step_pre_hook(self.count_before)
        self.register_step_post_hook(self.count_after)

    def count_before(self, *_: Any) -> None:
        self.before += 1

    def count_after(self, *_: Any) -> None:
        self.after += 1

    @property
    def calls(self) -> int:
        assert self.before == self.after
        return self.before


class Decays(torch.optim.SGD):
    """Moves weights without a gradient, too."""

    calls = STEPS

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.9)
        return super().step(closure)


class Run:
    def __init__(self, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = kind(self.model.parameters(), lr=0.1)  # type: ignore[call-arg]
        self.data = TensorDataset(torch.randn(N, 3), torch.randint(2, (N,)))
        self.plan = dpoptim.DPSGD(clip_norm=1.0).plan(
            n=N, batch_size=16, steps=STEPS, epsilon=4.0, delta=1e-3
        )
        self.microbatches = 0

    def losses(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1], reduction="none")

    def train(self, size: int, step: Callable[[Any], Any] | None = None, **given: Any) -> Tensor:
        with dpoptim.attach(
            self.plan, self.model, self.optimizer, self.data, noise_seed=3
        ) as private:
            for batch in private.batches(physical_batch_size=size, **given):
                self.microbatches += 1
                if step is None:
                    private.backward(self.losses(batch))
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                else:
                    step((private, batch))
        return self.model.weight.detach().clone()


@pytest.mark.parametrize("kind", [InState, InAnAttribute, InAList, ByHooks, Decays])
def test_nothing_counts_microbatches(kind: type[torch.optim.Optimizer]) -> None:
    ends = []
    for size in (2, N):
        run = Run(kind)
        ends.append(run.train(size))
        assert run.optimizer.calls == STEPS  # type: ignore[attr-defined]
        assert (run.microbatches > STEPS) is (size == 2)
    torch.testing.assert_close(*ends)


def test_by_closures() -> None:
    run = Run(InState)

    def step(given: Any) -> None:
        private, batch = given

        def closure() -> Tensor:
            losses = run.losses(batch)
            private.backward(losses)
            return losses.mean()

        run.optimizer.step(closure)

    run.train(2, step)
    assert run.optimizer.calls == STEPS < run.microbatches  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("when", ["before", "in the loop"])
def test_schedulers_wrap_and_are_wrapped(when: str) -> None:
    """They look for marks on `step`, and put their own around it."""
    run, schedulers = Run(InState), list[LambdaLR]()
    if when == "before":
        schedulers.append(LambdaLR(run.optimizer, lambda step: 0.5**step))
    own = vars(run.optimizer).get("step")

    def step(given: Any) -> None:
        private, batch = given
        if not schedulers:
            schedulers.append(LambdaLR(run.optimizer, lambda step: 0.5**step))
        private.backward(run.losses(batch))
        run.optimizer.step()
        if private.finished_step:
            schedulers[0].step()

    run.train(2, step)
    assert run.optimizer.calls == STEPS  # type: ignore[attr-defined]
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**STEPS)
    if when == "before":
        assert vars(run.optimizer)["step"] is own
    for p in run.model.parameters():
        p.grad = torch.ones_like(p)
    run.optimizer.step()  # as a plain one
    assert run.optimizer.calls == STEPS + 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["taken before", "by its class"])
def test_what_passes_by_is_refused(how: str) -> None:
    run = Run()
    own = run.optimizer.step

    def step(given: Any) -> None:
        private, batch = given
        private.backward(run.losses(batch))
        if how == "taken before":
            own()
        else:
            torch.optim.SGD.step(run.optimizer)  # type: ignore[arg-type]

    with pytest.raises(dpoptim.PrivacyError, match="taken before dpoptim.attach, or is called by"):
        run.train(2, step)


def test_whole_batches_may_pass_by() -> None:
    run = Run()
    own = run.optimizer.step

    def step(given: Any) -> None:
        private, batch = given
        private.backward(run.losses(batch))
        own()

    usual = Run().train(N)
    torch.testing.assert_close(run.train(N, step), usual)


def test_nothing_stays_on_the_optimizer() -> None:
    run = Run()
    run.train(2)
    assert "step" not in vars(run.optimizer)
    gone = weakref.ref(run.optimizer)
    del run
    gc.collect()
    assert gone() is None
