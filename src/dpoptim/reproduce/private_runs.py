"""A private run on public data: the loop that the experiments share."""

from collections.abc import Callable, Iterator
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from dpoptim.plan import Plan
from dpoptim.training.attach import attach_own
from dpoptim.training.private_training import PrivateTraining
from dpoptim.training.tail_average import TailAverage

Arrays = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]  # of outputs and targets

record_losses = partial(F.cross_entropy, reduction="none")


def private_steps(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer,
    data: Arrays,
    loss: Loss,
    seed: int,
    rows: int | None = None,
) -> Iterator[PrivateTraining]:
    """Train, ``rows`` at a time; the run is yielded after each of its steps."""
    with attach_own(plan, model, optimizer, TensorDataset(*data), noise_seed=seed) as private:
        for x, y in private.batches(physical_batch_size=rows):
            private.backward(loss(model(x), y))
            optimizer.step()
            if private.finished_step:
                yield private


def train_to_tail_mean(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer,
    data: Arrays,
    loss: Loss,
    seed: int,
    rows: int | None = None,
) -> None:
    """Train, and leave the mean of the second half of the iterates in the model."""
    average = TailAverage(model, plan.steps // 2)
    for private in private_steps(plan, model, optimizer, data, loss, seed, rows):
        average.update(private.steps_done)
    average.swap()
