"""What a private step takes on this machine, measured on made-up records."""

import itertools
import time

import torch
from torch.utils.data import TensorDataset

from dpoptim.methods import DPSGD
from dpoptim.planning import StepCost
from dpoptim.runs.models import build_model
from dpoptim.runs.train import batch_losses
from dpoptim.training.attach import attach

SIZES = (64, 1024)
STEPS = 4  # of which the first is not timed


def measured_cost(model: str, shape: tuple[int, ...], outputs: int) -> StepCost:
    """The time of a step of DP-SGD, and of each record in it; from batches of two sizes.

    Args:
        model, shape, outputs: as for `build_model`.

    **Guarantee.** None is needed: the records are made up.
    """
    times = [seconds_of_a_step(model, shape, outputs, size) for size in SIZES]
    per_record = max((times[1] - times[0]) / (SIZES[1] - SIZES[0]), 1e-9)
    return StepCost(max(times[0] - SIZES[0] * per_record, 1e-5), per_record)


def seconds_of_a_step(model: str, shape: tuple[int, ...], outputs: int, size: int) -> float:
    network = build_model(model, shape, outputs)
    data = TensorDataset(
        torch.full((size, *shape), 0.5),
        torch.zeros(size, dtype=torch.int64 if outputs > 1 else torch.float32),
    )
    plan = DPSGD(clip_norm=1.0).plan(
        n=size, batch_size=size, steps=STEPS, noise_multiplier=1.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    ends = []
    with attach(plan, network, optimizer, data) as private:
        for batch in private.batches():
            private.backward(batch_losses(network, batch))
            optimizer.step()
            ends.append(time.perf_counter())
    return min(b - a for a, b in itertools.pairwise(ends))
