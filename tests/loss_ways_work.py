"""What ranks do whose loss does not suit the way found for their model."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from distributed_work import spread, whole

N, TIME, WIDTH = 7, 3, 4


def time_first(records: list[Any]) -> Tensor:
    return torch.stack([x for (x,) in records], 1)


def of_second_axis(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).tanh().sum((0, 2))
    return found


def one_by_one(model: nn.Module, batch: Any) -> Tensor:
    return torch.stack([model(x).square().mean() for x in batch[0]])


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "rules": (
        lambda: nn.Sequential(nn.Linear(WIDTH, 2), nn.Linear(2, 3)),
        of_second_axis,
        time_first,
    ),
    "alone": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True, norm_first=True),
        one_by_one,
        None,
    ),
}


def trained(rank: int, case: str, way: str) -> tuple[str, int, Tensor]:
    """How records were kept apart, on which axis they lie, and the parameters after two steps."""
    torch.manual_seed(0)
    make, loss, collate = CASES[case]
    model = make().double()
    data = TensorDataset(torch.randn(N, TIME, WIDTH, dtype=torch.float64))
    called = spread(model, way)
    plan = dpoptim.DPSGD(0.5).plan(n=N, batch_size=N, steps=2, noise_multiplier=0.0, delta=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dpoptim.IsolationWarning)
        private = dpoptim.attach(plan, called, optimizer, data, loss=loss, collate_fn=collate)
    with private:
        for batch in private.batches():
            private.backward(loss(called, batch))
            optimizer.step()
    isolation = private._chosen.isolation
    return isolation.tier, isolation.batch_axis, whole(model)
