"""Time of a private step on this machine, measured on made-up records."""

import itertools
import time

import torch

from dpoptim.accounting.ledger import Ledger
from dpoptim.clipping import Clipping
from dpoptim.gate import Gate
from dpoptim.gradients.engine import Engine
from dpoptim.methods import DPSGD
from dpoptim.noise.stream import KeyStream
from dpoptim.planning import StepCost
from dpoptim.runs.models import build_model
from dpoptim.runs.train import batch_losses

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
    """Time of forward pass, backward pass, clipping, noise and update, without a data loader.

    By the engine and the gate themselves: `attach` and torch's optimizers import torch's compiler,
    which takes longer than the rest of a plan.
    """
    network = build_model(model, shape, outputs)
    x = torch.full((size, *shape), 0.5)
    y = torch.zeros(size, dtype=torch.int64 if outputs > 1 else torch.float32)
    plan = DPSGD(clip_norm=1.0).plan(
        n=size, batch_size=size, steps=STEPS, noise_multiplier=1.0, delta=1e-5
    )
    engine = Engine(network, Clipping(1.0), capacity=size)
    gate = Gate(
        event=plan.event,
        neighboring=plan.neighboring,
        query=plan.query,
        releases=STEPS,
        ledger=Ledger(neighboring=plan.neighboring),
        noise=KeyStream(),
        label="made-up records",
    )
    ends = []
    engine.attach()
    for _ in range(STEPS):
        engine.begin_microbatch(size)
        batch_losses(network, (x, y)).mean().backward()
        noisy = engine.split(gate.release_sum(engine.take()))
        with torch.no_grad():
            for p, released in zip(network.parameters(), noisy, strict=True):
                p.add_(released, alpha=-0.1 / size)
        ends.append(time.perf_counter())
    engine.detach()
    return min(b - a for a, b in itertools.pairwise(ends))
