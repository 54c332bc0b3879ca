"""What the ranks of tests/distributed/test_tables.py do with models that have embedding tables."""

import math
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import dpoptim
from distributed_work import caught, whole
from dpoptim.distributed.process_group import ProcessGroup

N, ROWS = 40, 31  # rows that no number of ranks here divides


class Clicks(nn.Module):
    """Two tables, the smaller with fewer rows than there are ranks, and a head."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(rows, 3, mode="mean", padding_idx=0)
        self.sites = nn.Embedding(2, 3)
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.words(x), self.sites(x[:, 0] % 2)], 1))[:, 0]


def model_of(rows: int = ROWS) -> Clicks:
    torch.manual_seed(1)
    return Clicks(rows).double()


def clicks(rows: int = ROWS) -> TensorDataset:
    torch.manual_seed(2)
    return TensorDataset(torch.randint(0, rows, (N, 5)), torch.ones(N))


def train(
    rank: int,
    noise: float = 0.0,
    optimizer: str = "SGD",
    wrapped: bool = False,
    save: str = "",
    resume: str | None = None,
    **batches: Any,
) -> Tensor:
    """The parameters after some steps, as one vector; ``save``: where to, after two of them."""
    method = dpoptim.SparseSGD(0.7, share=0.3, false_positives=0.1)
    plan = dpoptim.Plan(method, N, 10, 4, noise, "add-or-remove-one", 1e-5)
    model = model_of()
    called = DistributedDataParallel(model) if wrapped and dist.is_initialized() else model
    moved = getattr(torch.optim, optimizer)(model.parameters(), lr=0.5)
    with dpoptim.attach(plan, called, moved, clicks(), noise_seed=0, resume=resume) as private:
        for x, weight in private.batches(**batches):
            private.backward(called(x) * weight)
            moved.step()
            if save and private.steps_done == 2:
                private.save(save)
                break
    return whole(model)


WAYS: dict[str, dict[str, Any]] = {
    "sparse": {},
    "dense": {"optimizer": "Adam"},
    "wrapped": {"wrapped": True, "physical_batch_size": 3},
}


def without_noise(rank: int) -> dict[str, Tensor]:
    return {way: train(rank, **given) for way, given in WAYS.items()}


def others_forgotten(rank: int) -> str:
    """Why it is refused where a rank leaves out what the others have looked up of its rows."""
    swap = ProcessGroup.swap

    def without_others(self: ProcessGroup, given: Sequence[Tensor]) -> list[Tensor]:
        return [
            each if rank == self.rank else each[:0] for rank, each in enumerate(swap(self, given))
        ]

    with patch.object(ProcessGroup, "swap", without_others):
        try:
            train(rank)
        except dpoptim.PrivacyError as error:
            return str(error)
    return ""


def fully_sharded(rank: int) -> str:
    """Why a model whose parameters are cut is refused."""
    model = model_of()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    plan = dpoptim.Plan(dpoptim.SparseSGD(0.7), N, 10, 4, 1.0, "add-or-remove-one", 1e-5)
    moved = torch.optim.SGD(model.parameters(), lr=0.5)
    return caught(lambda: dpoptim.attach(plan, model, moved, clicks()))


def with_noise(rank: int) -> Tensor:
    return train(rank, 1.0)


def law(rank: int) -> tuple[float, float, bool]:
    """How far one step without gradients is from the law of noise on every row and its threshold.

    Returns:
        standard deviations by which the number of rows that moved, and the squares of their
        entries, are off; and whether the row that all records look up moved.
    """
    rows, proportion, noise, share = 200_000, 0.01, 2.0, 0.5
    method = dpoptim.SparseSGD(1.0, share=share, false_positives=proportion)
    plan = dpoptim.Plan(method, N, N, 1, noise, "zero-out", 1e-5)
    model = model_of(rows)
    before = model.words.weight.detach().clone()
    moved = torch.optim.SGD(model.parameters(), lr=float(N))
    one = TensorDataset(torch.full((N, 5), rows - 1), torch.zeros(N))  # of the last rank's rows
    with dpoptim.attach(plan, model, moved, one, noise_seed=3) as private:
        for x, weight in private.batches():
            private.backward(model(x) * weight)
            moved.step()
    change = (model.words.weight.detach() - before) / noise * math.sqrt(1 - share)
    seen = change[:-1][change[:-1].any(1)]
    off = (len(seen) - rows * proportion) / math.sqrt(rows * proportion)
    spread = (float(seen.square().sum()) - seen.numel()) / math.sqrt(2 * seen.numel())
    return off, spread, bool(change[-1].any())
