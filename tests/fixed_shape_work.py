"""What ranks do that train on physical batches of a fixed shape."""

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import dpoptim
from distributed_work import METHODS, model_of, plan_for, records, spread, whole
from dpoptim.training.batches import slots

N = 60


def trained(rank: int, way: str, *, sharded: bool = False, narrow: bool = False) -> dict[str, Any]:
    """Parameters after a run, the physical batches' numbers of rows, and what it rests on.

    Args:
        narrow: whether batches outgrow their slots.
    """
    model = model_of()
    called = spread(model, way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    x, y = records(N)
    own = slice(rank, None, dist.get_world_size()) if sharded else slice(None)
    data = TensorDataset(x[own], y[own])
    rows: list[list[int]] = []
    needed = slots.slots_needed if not narrow else lambda *_, **__: 3
    with (
        patch.object(slots, "slots_needed", needed),
        dpoptim.attach(
            plan_for(METHODS["flat"]()), called, optimizer, data, noise_seed=5, sharded=sharded
        ) as private,
    ):
        for step in private.steps(fixed_shape=True):
            rows.append([])
            for a, b in step:
                rows[-1].append(len(a))
                private.backward(F.cross_entropy(called(a), b, reduction="none"))
            optimizer.step()
            optimizer.zero_grad()
        basis = private.describe()
    return {
        "parameters": whole(model),
        "rows": rows,
        "rests on": basis,
    }


def with_options(rank: int, way: str, options: dict[str, Any]) -> dict[str, Any]:
    return trained(rank, way, **options)
