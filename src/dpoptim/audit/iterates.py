"""Points in a ball and a point kept by chance, made again without data.

Both are free, being functions of the start, of what was released and of coins that know no record.
So this makes them again from these alone. There is no tolerance for chance: all is seeded.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from dpoptim.audit.finding import refuted_by
from dpoptim.audit.small_runs import linear_of_zeros, parameters_of
from dpoptim.methods import DPSGD
from dpoptim.noise.stream import KeyStream
from dpoptim.training.attach import attach

RECORDS, STEPS, RADIUS, SEED = 40, 12, 0.5, 1


def iterates() -> str:
    """Train by SGD, and find the last point and the one that was kept among those expected."""
    model = linear_of_zeros(3, 2, bias=True, dtype=torch.float64)
    x = torch.arange(3.0 * RECORDS, dtype=torch.float64).sin().view(RECORDS, 3)
    points = [parameters_of(model)]

    def step_again(*_: object) -> None:
        given = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        points.append(nearest(points[-1] - torch.cat(given), points[0]))

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = DPSGD(clip_norm=1.0).plan(
        n=RECORDS, batch_size=RECORDS // 4, steps=STEPS, noise_multiplier=1.0, delta=1e-5
    )
    data = TensorDataset(x, (x[:, 0] > 0).long())
    with attach(
        plan, model, optimizer, data, noise_seed=SEED, projection=RADIUS, random_iterate=True
    ) as private:
        optimizer.register_step_pre_hook(step_again)  # after the gate's
        for inputs, labels in private.batches():
            private.backward(F.cross_entropy(model(inputs), labels, reduction="none"))
            optimizer.step()
    found = []
    if not torch.allclose(parameters_of(model), points[-1], rtol=0, atol=1e-9):
        found.append("the last point is not the projection of what released gradients lead to")
    private.swap_random_iterate()
    coins = KeyStream.from_seed(SEED, "random iterate")
    kept = [k for k in range(STEPS) if len(coins.coins(1, 1 / (k + 1)))][-1]
    if not torch.allclose(parameters_of(model), points[kept], rtol=0, atol=1e-9):
        found.append("the point that was kept is not the one that coins chose")
    return refuted_by(found)


def nearest(point: Tensor, start: Tensor) -> Tensor:
    """The nearest point of the ball around the start."""
    move = point - start
    return start + move * min(1.0, RADIUS / float(move.norm()))
