"""Where the loss has chosen another way, a record moves a sum by at most C on every path of a run:
other methods, physical batches, a run that is left, or that goes on from a checkpoint.

Noise is off, the learning rate 0, and the first record's loss is there or 0.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from loop_networks import CLASSES, FEATURES, perceptron

N, KEY = 12, bytes(range(32))
generator = torch.Generator().manual_seed(1)
X, Y = torch.randn(N, FEATURES, generator=generator), torch.arange(N) % CLASSES
X[0] *= 5
METHODS: dict[str, tuple[Any, int, int]] = {  # with the batch size, and the number of steps
    "DP-SGD": (dpoptim.DPSGD(clip_norm=1.0), N, 3),
    "DP-FTRL": (dpoptim.DPFTRL(clip_norm=1.0), 6, 2),
    "DiceSGD": (dpoptim.DiceSGD(clip_norm=1.0), N, 3),
}


def two_views(model: nn.Module, batch: Any) -> Tensor:
    x, y, there = batch
    a, b = model(torch.cat([x, 0.5 * x])).split(len(x))
    return there * (F.cross_entropy(a, y, reduction="none") + (a - b).square().sum(1))


def penalised(model: nn.Module, batch: Any) -> Tensor:
    x, y, there = batch
    x = x.clone().requires_grad_()
    losses = F.cross_entropy(model(x), y, reduction="none")
    (g,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    return there * (losses + g.square().sum(1))


def beside_weights(model: nn.Module, batch: Any) -> Tensor:
    x, y, there = batch
    squares = torch.stack([p.square().sum() for p in model.parameters()]).sum()
    return there * (F.cross_entropy(model(x), y, reduction="none") + 1e-2 * squares)


WAYS = {"alone": beside_weights, "vmap": penalised, "joined": two_views}


class Run:
    """One run, whose sums are kept as they leave it."""

    def __init__(self, way: str, method: str, first: float) -> None:
        torch.manual_seed(0)
        self.way, self.loss, self.sums = way, WAYS[way], list[Tensor]()
        self.model = perceptron()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.optimizer.register_step_pre_hook(self.look)
        there = torch.ones(N)
        there[0] = first
        self.data = TensorDataset(X, Y, there)
        made, self.size, steps = METHODS[method]
        self.plan = made.plan(
            n=N, batch_size=self.size, steps=steps, noise_multiplier=0.0, delta=1e-5
        )

    def look(self, *step: Any) -> None:
        parts = [p.grad for p in self.model.parameters() if p.grad is not None]
        if parts:  # not between parts of a batch
            self.sums.append(self.size * torch.cat([part.double().flatten() for part in parts]))

    def attached(self, **options: Any) -> Any:
        private = dpoptim.attach(
            self.plan,
            self.model,
            self.optimizer,
            self.data,
            loss=self.loss,
            noise_seed=3,
            checkpoint_key=KEY,
            **options,
        )
        told = {
            "alone": "every microbatch has one record",
            "vmap": "its forward pass is vectorised",
            "joined": "several inputs in one call of the model",
        }
        assert any(told[self.way] in item.text for item in private.basis)
        return private

    def train(self, private: Any, batches: Iterator[Any]) -> None:
        for batch in batches:
            private.backward(self.loss(self.model, batch))
            self.optimizer.step()
            if private.steps_done == 1 and private.finished_step:
                return

    def go(self, path: str, file: Path) -> list[Tensor]:
        with self.attached() as private:
            if path == "in parts":
                for step in private.steps(physical_batch_size=5):
                    for batch in step:
                        private.backward(self.loss(self.model, batch))
                    self.optimizer.step()
                return self.sums
            self.train(private, private.batches(physical_batch_size=5))
            private.save(file)
        again = private if path == "left" else self.attached(resume=file)
        with again as private:
            self.train(private, private.batches())
        return self.sums


@pytest.mark.usefixtures("tried_once_a_file")
@pytest.mark.filterwarnings("ignore::dpoptim.training.trials.isolation.IsolationWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", ["in parts", "left", "resumed"])
@pytest.mark.thinned(4)
def test_a_record_moves_a_sum_by_the_bound_at_most(
    way: str, method: str, path: str, tmp_path: Path
) -> None:
    whole, less = (Run(way, method, first).go(path, tmp_path / f"{first}") for first in (1.0, 0.0))
    assert len(whole) == len(less) == METHODS[method][2]
    moved = [float((a - b).norm()) for a, b in zip(whole, less, strict=True)]
    assert 0.5 < max(moved) <= 1.0
