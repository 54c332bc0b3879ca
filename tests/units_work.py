"""What the ranks of tests/distributed/test_units_under_wrappers.py do: two worlds that differ in
one record or person, in models that processes wrap.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset

import dpoptim
from distributed_work import caught, whole
from dpoptim.training import agreed, prepared
from tried_once import models_tried_once

FEATURES, CLIP, VIEWS, MOST = 6, 0.7, 3, 3
WHO = 7  # the record, or the person, that differs
HUGE = 1e6


def plain(model: nn.Module) -> nn.Module:
    return model


def in_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model)


def sharded_by_layers(model: nn.Module) -> nn.Module:
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer)
    return fully_shard(model)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": plain,
    "DDP": in_ddp,
    "fully_shard": sharded,
    "fully_shard by layers": sharded_by_layers,
}


def several_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class Loaded(Dataset[Any]):
    """Records that are read by index, as from files, and are dictionaries."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.rows[index]}


def records(rank: int, world: int, *, views: int, in_shards: bool) -> dict[str, Any]:
    """20 records, of whom one differs, all of its views enormous."""
    draws = np.random.default_rng(3)
    x = draws.normal(size=(20, views, FEATURES)).astype(np.float32)
    x[WHO] = (-HUGE if world else HUGE) * (1 + np.abs(x[WHO]))
    mine = np.arange(rank, 20, several_ranks()) if in_shards else np.arange(20)
    rows = torch.from_numpy(x[mine] if views > 1 else x[mine][:, 0])
    data = TensorDataset(rows) if in_shards else Loaded(rows)
    return {"n": 20, "data": data, "rows_per_record": views, "sharded": in_shards}


def persons(rank: int, world: int, *, how: str) -> dict[str, Any]:
    """24 persons with 2 to 5 rows, of whom one differs; shards keep persons together, or do not."""
    draws = np.random.default_rng(4)
    owners = np.repeat(np.arange(24), draws.integers(2, 6, 24))
    draws.shuffle(owners)
    x = draws.normal(size=(len(owners), FEATURES)).astype(np.float32)
    x[owners == WHO] = -HUGE if world else HUGE
    by = {"whole": np.zeros(len(x), int), "persons": owners, "split": np.arange(len(x))}[how]
    mine = np.flatnonzero(by % several_ranks() == (0 if how == "whole" else rank))
    return {
        "n": 24,
        "data": TensorDataset(torch.from_numpy(x[mine])),
        "persons": owners[mine].tolist(),
        "rows_per_record": MOST,
        "sharded": how != "whole",
    }


UNITS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "records": lambda rank, world: records(rank, world, views=1, in_shards=False),
    "records in shards": lambda rank, world: records(rank, world, views=1, in_shards=True),
    "views": lambda rank, world: records(rank, world, views=VIEWS, in_shards=False),
    "views in shards": lambda rank, world: records(rank, world, views=VIEWS, in_shards=True),
    "persons": lambda rank, world: persons(rank, world, how="whole"),
    "persons in shards": lambda rank, world: persons(rank, world, how="persons"),
    "persons split": lambda rank, world: persons(rank, world, how="split"),
}


def the_sum(rank: int, wrapper: str, unit: str, world: int, physical: int | None) -> Tensor:
    """Everybody's clipped gradients, without noise, in clip norms: a step of SGD at rate 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))
    wrapped = WRAPPERS[wrapper](model)
    before = whole(wrapped).double()
    given = UNITS[unit](rank, world)
    plan = dpoptim.DPSGD(clip_norm=CLIP).plan(
        n=given["n"], batch_size=given["n"], steps=1, noise_multiplier=0.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    more = {key: value for key, value in given.items() if key not in ("n", "data")}
    with dpoptim.attach(plan, wrapped, optimizer, given["data"], noise_seed=1, **more) as private:
        for batch in private.batches(physical_batch_size=physical):
            x = batch["x"] if isinstance(batch, dict) else batch[0]
            private.backward(wrapped(x)[:, 0])
            optimizer.step()
            optimizer.zero_grad()
    return (before - whole(wrapped).double()) * given["n"] / CLIP


def moved(rank: int, wrapper: str, unit: str, physical: int | None = None) -> float:
    """By how much the sum of all ranks moves with the one who differs, in clip norms."""
    with models_tried_once({}):
        one, other = (the_sum(rank, wrapper, unit, world, physical) for world in (0, 1))
    return float((one - other).norm())


def all_moved(rank: int, wrappers: Sequence[str]) -> dict[str, float]:
    return {
        f"{wrapper}, {unit}, {physical}": moved(rank, wrapper, unit, physical)
        for wrapper in wrappers
        for unit in UNITS
        if "split" not in unit
        for physical in ((4,) if wrapper == "DDP" else (None,))
    }


def sums(rank: int, wrappers: Sequence[str]) -> dict[str, Tensor]:
    """Of the units that one process has as well."""
    return {
        f"{wrapper}, {unit}": the_sum(rank, wrapper, unit, 0, None)
        for wrapper in wrappers
        for unit in ("records", "records in shards", "views", "views in shards")
    }


def refused(rank: int) -> dict[str, str]:
    return {each: caught(lambda each=each: moved(rank, each, "persons split")) for each in WRAPPERS}


def unchecked(rank: int) -> dict[str, float]:
    """Under the bug that nobody looks where persons' rows are."""
    with patch.object(agreed, "one_rank_a_person", lambda *a, **k: nullcontext()):
        return {each: moved(rank, each, "persons split") for each in WRAPPERS}


class Folds(nn.Module):
    """Folds records and positions together for a layer, which rules see of records that have some
    positions, and not of those that have one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(FEATURES, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows, positions, _ = x.shape
        h = self.into(x.reshape(rows * positions, FEATURES)).reshape(rows, positions, 5)
        there = x.abs().sum(2, keepdim=True) > 0  # padding is not
        return self.out((torch.tanh(h) * there).sum(1))[:, 0]


class Unsendable(Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("no pickle of it")


def padded(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence([row.as_subclass(Tensor) for row in rows], batch_first=True)


def of_unequal_shards(rank: int, kind: type[Tensor] = Tensor) -> tuple[str, Tensor]:
    """How records are kept apart, and a step, where the first one of each shard has another form.

    In one process, of all shards.
    """
    draws = torch.Generator().manual_seed(5)
    shards = [
        [torch.randn(first if i == 0 else 3, FEATURES, generator=draws) for i in range(6)]
        for first in (4, 1)
    ]
    several = dist.is_initialized()
    data = [row.as_subclass(kind) for row in (shards[rank] if several else shards[0] + shards[1])]
    torch.manual_seed(0)
    model = Folds()
    plan = dpoptim.DPSGD(clip_norm=CLIP).plan(
        n=12, batch_size=12, steps=1, noise_multiplier=0.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with dpoptim.attach(
        plan, model, optimizer, data, collate_fn=padded, sharded=several
    ) as private:
        for x in private.batches():
            private.backward(model(x))
            optimizer.step()
        basis = " ".join(each.text for each in private.basis)
    return basis, whole(model).double()


def by_own_rows(rank: int) -> str:
    """Under the bug that each rank tries the model on its own first record."""
    with patch.object(prepared, "as_bytes", lambda row: None):
        return caught(lambda: of_unequal_shards(rank))


def that_cannot_be_sent(rank: int) -> str:
    return caught(lambda: of_unequal_shards(rank, Unsendable))
