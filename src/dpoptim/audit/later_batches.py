"""Loops that begin to leak, or to tell, after their first batch."""

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpoptim.audit.finding import refuted_by
from dpoptim.audit.refused_loops import FEATURES, RECORDS, refused
from dpoptim.audit.small_runs import CLIP_NORM, linear_of_zeros, parameters_of
from dpoptim.gradients.isolation import Choice
from dpoptim.methods import DPSGD
from dpoptim.training.attach import attach
from dpoptim.training.private_training import PrivateTraining


class FailsOnce(torch.optim.Optimizer):
    """Runs out of memory in its first step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 1.0})
        self.failed = False

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if not self.failed:
            self.failed = True
            raise MemoryError
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.data -= p.grad


class HandsOn(nn.Module):
    """Begins each sequence in the state in which the last one has ended.

    Args:
        evaluated: in evaluation mode, too.
    """

    def __init__(self, *, evaluated: bool) -> None:
        super().__init__()
        self.memory, self.head = nn.GRU(1, 3, batch_first=True), nn.Linear(3, 1)
        self.evaluated, self.state = evaluated, None

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor | None = self.state if self.training or self.evaluated else None
        same = kept is not None and kept.shape[1] == len(x)
        states, last = self.memory(x[..., None], kept if same else None)
        self.state = last.detach()
        return self.head(states[:, -1])


def later_batches() -> str:
    """Loops to be refused, and an update that is done again."""
    refusals = (
        weights_of_a_later_term,
        rests_by_microbatches,
        decays_by_microbatches,
        moves_to_another_group_by_microbatches,
        hands_states_on,
        hands_states_on_in_training,
    )
    found = [f"accepted {f.__name__}" for f in refusals if not refused(f)]
    found += filter(None, [another_gradient()])
    return refuted_by(found)


def run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[[PrivateTraining, Tensor], None],
    physical_batch_size: int | None = None,
    isolation: Choice = "auto",
) -> None:
    """Two steps on all records without noise."""
    plan = DPSGD(CLIP_NORM).plan(
        n=RECORDS, batch_size=RECORDS, steps=2, noise_multiplier=0.0, delta=1e-3
    )
    data = TensorDataset(torch.ones(RECORDS, FEATURES))
    with attach(plan, model, optimizer, data, noise_seed=1, isolation=isolation) as private:
        for (x,) in private.batches(physical_batch_size=physical_batch_size):
            step(private, x)
            optimizer.step()


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x)[:, 0] - 1).square()


def weights_of_a_later_term() -> None:
    """A term with weights of its own from the second step on: nobody clips their gradients."""
    model, own = linear_of_zeros(FEATURES, 1), linear_of_zeros(1, 1)

    def step(private: PrivateTraining, x: Tensor) -> None:
        losses = losses_of(model, x)
        private.backward(losses + own(model(x))[:, 0] if private.steps_done else losses)

    run(model, torch.optim.SGD(model.parameters(), lr=1.0), step)


def rests_by_microbatches() -> None:
    """A layer frozen from the third microbatch on: how many a step has is private."""
    model = nn.Sequential(linear_of_zeros(FEATURES, 1), linear_of_zeros(1, 1))
    seen = []

    def step(private: PrivateTraining, x: Tensor) -> None:
        seen.append(x)
        model[0].requires_grad_(len(seen) < 3)
        private.backward(losses_of(model, x))

    run(model, torch.optim.SGD(model.parameters(), lr=1.0), step, physical_batch_size=4)


def decays_by_microbatches() -> None:
    """A schedule of weight decay that counts microbatches."""
    model = linear_of_zeros(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(private: PrivateTraining, x: Tensor) -> None:
        optimizer.param_groups[0]["weight_decay"] += 0.1
        private.backward(losses_of(model, x))

    run(model, optimizer, step, physical_batch_size=4)


def moves_to_another_group_by_microbatches() -> None:
    """Parameters that learn at another rate from one microbatch to the next."""
    model = nn.Sequential(linear_of_zeros(FEATURES, 1), linear_of_zeros(1, 1))
    groups = [{"params": layer.parameters(), "lr": rate} for rate, layer in enumerate(model)]
    optimizer = torch.optim.SGD(groups)

    def step(private: PrivateTraining, x: Tensor) -> None:
        first, second = optimizer.param_groups
        first["params"], second["params"] = second["params"], first["params"]
        private.backward(losses_of(model, x))

    run(model, optimizer, step, physical_batch_size=4)


def hands_states_on() -> None:
    """A recurrent model that keeps its state, with one record in each microbatch."""
    run_on(HandsOn(evaluated=True), "alone")


def hands_states_on_in_training() -> None:
    """One that does so in training only, whatever its batches are."""
    run_on(HandsOn(evaluated=False), "auto")


def run_on(model: nn.Module, isolation: Choice) -> None:
    def step(private: PrivateTraining, x: Tensor) -> None:
        private.backward(losses_of(model, x))

    run(model, torch.optim.SGD(model.parameters(), lr=1.0), step, isolation=isolation)


def another_gradient() -> str:
    """Put something into ``.grad`` before a failed update is done again: it must not move."""
    model = linear_of_zeros(FEATURES, 1)
    optimizer = FailsOnce(model)

    def step(private: PrivateTraining, x: Tensor) -> None:
        if private.steps_done:
            raise InterruptedError  # once is enough
        private.backward(losses_of(model, x))
        try:
            optimizer.step()
        except MemoryError:
            for p in model.parameters():
                p.grad = torch.full_like(p, 1e3)

    before = parameters_of(model)
    with suppress(InterruptedError):
        run(model, optimizer, step)
    moved = float((parameters_of(model) - before).norm())
    return "" if 0 < moved <= CLIP_NORM * (1 + 1e-6) else f"an update moved by {moved:.4g}"
