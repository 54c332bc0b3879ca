"""What the ranks of tests/distributed/test_apart.py do: ranks that reach into each other, or drift
apart. Every function takes its rank first, and returns plain values.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import dpoptim
from distributed_work import N, model_of, plan_for, records, spread
from dpoptim.training.batches.same_order import digest_of

Loss = Callable[[nn.Module, Any], Tensor]


@contextmanager
def said(errors: dict[str, str], case: str) -> Iterator[None]:
    try:
        errors[case] = ""
        yield
    except Exception as error:
        errors[case] = f"{type(error).__name__}: {error}"


def own(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def of_all_ranks(rows: int) -> Tensor:
    total = torch.tensor(float(rows))
    dist.all_reduce(total)
    return total


def over_rows_of_all(model: nn.Module, batch: Any) -> Tensor:
    losses = own(model, batch)
    return losses.sum() * dist.get_world_size() / of_all_ranks(len(losses))


def each_over_rows_of_all(model: nn.Module, batch: Any) -> Tensor:
    losses = own(model, batch)
    return losses * len(losses) / of_all_ranks(len(losses))


def functional(model: nn.Module, batch: Any) -> Tensor:
    from torch.distributed._functional_collectives import all_reduce

    losses = own(model, batch)
    return losses / all_reduce(losses.detach().mean(), "sum", dist.group.WORLD)


def in_tensors_of_meshes(model: nn.Module, batch: Any) -> Tensor:
    losses = own(model, batch)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    mean = losses.detach().mean()
    return losses / DTensor.from_local(mean, mesh, [Partial()]).full_tensor()


def differentiated(model: nn.Module, batch: Any) -> Tensor:
    losses = own(model, batch)
    return losses / differentiable.all_reduce(losses.mean())


def of_objects(model: nn.Module, batch: Any) -> Tensor:
    losses = own(model, batch)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, len(losses))
    return losses / sum(found)


LOSSES: dict[str, Loss] = {
    each.__name__: each
    for each in (
        *(over_rows_of_all, each_over_rows_of_all, functional, in_tensors_of_meshes),
        *(differentiated, of_objects),
    )
}


class Centred(nn.Module):
    """Subtracts the mean over all ranks, once it is told to."""

    def __init__(self, *, centres: bool) -> None:
        super().__init__()
        self.inner, self.centres = model_of(), centres

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        if self.centres:
            total = out.detach().mean(0)
            dist.all_reduce(total)
            out = out - total
        return out


def train(
    model: nn.Module,
    loss: Loss = own,
    *,
    wrapper: str = "",
    data: Any = None,
    plan: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    after: Callable[[Any], Any] = lambda private: None,
    **options: Any,
) -> None:
    plan = plan or plan_for(dpoptim.DPSGD(clip_norm=1.0), steps=3)
    called = spread(model, wrapper)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(*records(plan.n)) if data is None else data
    with dpoptim.attach(
        plan, called, optimizer, data, loss=loss, noise_seed=1, **options
    ) as private:
        for batch in private.batches():
            private.backward(loss(called, batch))
            optimizer.step()
            optimizer.zero_grad()
            after(private)


def communicating(rank: int) -> dict[str, str]:
    """Losses and models that ask other ranks, and loops that may."""
    errors: dict[str, str] = {}
    for name, loss in LOSSES.items():
        with said(errors, name):
            train(model_of(), loss)
    with said(errors, "forward"):
        train(Centred(centres=True))
    with said(errors, "forward later"):
        model = Centred(centres=False)
        train(model, after=lambda private: setattr(model, "centres", True))
    for wrapper in ("fully_shard", "DistributedDataParallel"):
        with said(errors, wrapper):
            train(model_of(), wrapper=wrapper)
    with said(errors, "after a step"):
        train(model_of(), after=lambda private: str(of_all_ranks(1)))
    total = of_all_ranks(1)  # as before, once nothing is attached
    errors["afterwards"] = "" if int(total) == dist.get_world_size() else str(total)
    return errors


class OwnCode(Dataset[Any]):
    """Reads records in this order, with noise of a generator if told, or torch's."""

    def __init__(self, order: list[int], noise: float = 0.0) -> None:
        self.x, self.y = records()
        self.order, self.noise = order, noise

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> Any:
        x = self.x[self.order[place]]
        return x + self.noise * torch.randn_like(x), self.y[self.order[place]]


class Part(IterableDataset[Any]):
    """Every so manieth record, from this one on."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def __iter__(self) -> Iterator[Any]:
        yield from zip(*(t[self.rank :: self.size] for t in records()), strict=True)


def ordered(rank: int) -> dict[str, str]:
    """Data sets with code of their own, and streams."""
    errors: dict[str, str] = {}
    places = list(range(N))
    torch.manual_seed(rank)  # as programs do that draw other noise on each rank
    with said(errors, "reversed"):
        train(model_of(), data=OwnCode(places[::-1] if rank else places))
    with said(errors, "same"):
        train(model_of(), data=OwnCode(places))
    with said(errors, "noisy"):
        train(model_of(), data=OwnCode(places, noise=0.1))
    with said(errors, "noisy and reversed"):
        train(model_of(), data=OwnCode(places[::-1] if rank else places, noise=0.1))
    noisy, before = OwnCode(places, noise=0.1), torch.get_rng_state()
    digests = {digest_of(noisy, 3, bytes(32)) for _ in range(2)}
    same = len(digests) == 1 and torch.equal(torch.get_rng_state(), before)
    errors["generators"] = "" if same else "moved"
    stream = dpoptim.DPFTRL(clip_norm=1.0, order="given").plan(
        n=N - 1, batch_size=20, epochs=1, noise_multiplier=0.0, delta=1e-5, neighboring="zero-out"
    )
    with said(errors, "sharded stream"):
        train(model_of(), data=Part(rank, dist.get_world_size()), plan=stream, sharded=True)
    with said(errors, "one too short"):
        size = dist.get_world_size()
        train(model_of(), data=Part(rank, size + rank), plan=stream, sharded=True)
    return errors


def drifting(rank: int) -> dict[str, str]:
    """Ranks that change weights or settings each in its own way."""
    errors: dict[str, str] = {}

    def case(
        name: str, change: Callable[[nn.Module, torch.optim.Optimizer], Any], **how: Any
    ) -> None:
        model = model_of()
        called = spread(model, how.pop("wrapper", ""))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with said(errors, name):
            after = lambda private: change(model, optimizer)  # noqa: E731
            train(called, optimizer=optimizer, after=after, **how)

    def rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)

    def same_rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    @torch.no_grad()
    def perturb(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for p in model.parameters():
            p.data[0] += 1e-9 * rank

    @torch.no_grad()
    def perturb_and_broadcast(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        perturb(model, optimizer)
        for p in model.parameters():
            dist.broadcast(p, 0)

    case("rate", rate)
    case("rate under fully_shard", rate, wrapper="fully_shard")
    case("same rate", same_rate)
    case("weights", perturb)
    case("weights from rank 0", perturb_and_broadcast)
    return errors
