"""What the ranks of the tests in tests/distributed do. Every function takes its rank first, and returns plain values."""

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset

import dpoptim
from dpoptim.plan import Plan

N, FEATURES = 60, 5
torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first optimizer imports half of torch: before ranks are forked


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def records(n: int = N) -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    return torch.randn(n, FEATURES, dtype=torch.float64) * 3, torch.randint(0, 3, (n,))


def plan_for(method: Any, *, noise_multiplier: float = 0.0, steps: int = 6, n: int = N, batch_size: int = 20) -> Plan:
    return method.plan(n=n, batch_size=batch_size, steps=steps, noise_multiplier=noise_multiplier, delta=1e-5)


def train(
    plan: Plan,
    *,
    wrapped: bool = False,
    data: Dataset[Any] | None = None,
    physical_batch_size: int | None = None,
    several: bool = False,
    look: Callable[[Any], None] = lambda private: None,
    **options: Any,
) -> dict[str, Any]:
    """A whole run: the final parameters as one vector, and public numbers of the run."""
    model = model_of()
    called = DistributedDataParallel(model) if wrapped else model
    halves = [list(model.parameters())[:2], list(model.parameters())[2:]] if several else [list(model.parameters())]
    optimizers = [torch.optim.SGD(half, lr=0.3, momentum=0.5) for half in halves]
    data = TensorDataset(*records(plan.n)) if data is None else data
    with dpoptim.attach(plan, called, optimizers, data, **options) as private:
        for x, y in private.batches(physical_batch_size=physical_batch_size):
            private.backward(F.cross_entropy(called(x), y, reduction="none"))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            look(private)
        reservation, clip_norm = private.reservation, private.clip_norm
    return {
        "parameters": torch.cat([p.detach().flatten() for p in model.parameters()]),
        "reservation": reservation,
        "clip_norm": clip_norm,
        "entries": len(options["ledger"].entries()) if "ledger" in options else None,
    }


METHODS: dict[str, Callable[[], Any]] = {
    "flat": lambda: dpoptim.DPSGD(clip_norm=0.7),
    "automatic": lambda: dpoptim.DPSGD(clip_norm=0.7, clipping="automatic"),
    "per-layer": lambda: dpoptim.DPSGD(clip_norm=0.7, clipping="per-layer"),
    "quantile first": lambda: dpoptim.DPSGD(clip_norm=dpoptim.PrivateQuantile(0.5, share=0.3)),
    "quantile along": lambda: dpoptim.DPSGD(clip_norm=dpoptim.PrivateQuantile(0.5, when="all along")),
    "dice": lambda: dpoptim.DiceSGD(clip_norm=0.5, reset_each_epoch=False),
    "ftrl": lambda: dpoptim.DPFTRL(clip_norm=0.7),
    "value": lambda: dpoptim.ValueClippedSGD(clip_norm=2.0),
}
WAYS: dict[str, dict[str, Any]] = {
    "bare": {},
    "wrapped": {"wrapped": True},
    "pieces": {"physical_batch_size": 4, "wrapped": True},
    "several": {"several": True},
}


def without_noise(rank: int, methods: list[str], ways: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method, way): train(plan_for(METHODS[method]()), noise_seed=5, **WAYS[way]) for method in methods for way in ways
    }


# ---- what goes wrong ------------------------------------------------------------------------------------------


def caught(what: Callable[[], Any]) -> str:
    """The error's class and message; raises AssertionError if there is none."""
    try:
        what()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def differing(rank: int) -> dict[str, str]:
    """Errors of `attach` on ranks that do not agree, one after the other in the same processes."""
    plan = plan_for(METHODS["flat"](), noise_multiplier=1.0)
    other = plan_for(METHODS["flat"](), noise_multiplier=1.0 + rank)
    x, y = records()

    def attach(
        plan: Plan = plan, model: nn.Module | None = None, *, data: Any = None, kind: Any = torch.optim.SGD, **more: Any
    ) -> None:
        model = model_of() if model is None else model
        optimizer = kind(model.parameters(), lr=more.pop("lr", 0.1))
        with dpoptim.attach(plan, model, optimizer, TensorDataset(x, y) if data is None else data, **more):
            pass

    def other_values() -> nn.Module:
        model = model_of()
        with torch.no_grad():
            model[0].bias[0] += rank * 1e-9
        return model

    frozen = model_of()
    frozen[0].requires_grad_(rank == 0)
    broken = model_of() if rank == 0 else nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4)).double()
    return {
        "plan": caught(lambda: attach(other)),
        "values": caught(lambda: attach(model=other_values())),
        "optimizer": caught(lambda: attach(kind=torch.optim.SGD if rank == 0 else torch.optim.Adagrad)),
        "settings": caught(lambda: attach(lr=0.1 * (1 + rank))),
        "reduction": caught(lambda: attach(loss_reduction="mean" if rank == 0 else "sum")),
        "data": caught(lambda: attach(data=TensorDataset(x + rank, y))),
        "order": caught(lambda: attach(data=TensorDataset(x.roll(rank, 0), y.roll(rank, 0)))),
        "frozen": caught(lambda: attach(model=frozen)),
        "refused": caught(lambda: attach(model=broken)),
        "number of records": caught(lambda: attach(plan_for(METHODS["ftrl"](), noise_multiplier=1.0), sharded=True)),
        "works after all that": "" if attach() is None else "no",
    }


def budget(rank: int, path: str) -> dict[str, Any]:
    """Rank 0's ledger admits one run; only rank 0 has the file."""
    plan = plan_for(METHODS["flat"](), noise_multiplier=3.0)
    ledger = dpoptim.Ledger(path, epsilon=plan.epsilon(1e-5) * 1.3, delta=1e-5) if rank == 0 else None
    options = {"ledger": ledger} if rank == 0 else {}
    first = train(plan, **options)["reservation"]
    second = caught(lambda: train(plan, **options))
    left = "" if ledger is None else [(entry.state, entry.id) for entry in ledger.entries()]
    return {"first": first, "second": second, "entries": left}


def one_raises(rank: int, where: str, wrapped: bool) -> str:
    """Rank 1 fails in its loop, or leaves it early, or steps once more; what each rank hears."""
    plan = plan_for(METHODS["flat"](), noise_multiplier=1.0)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        with dpoptim.attach(
            plan, DistributedDataParallel(model) if wrapped else model, optimizer, TensorDataset(*records())
        ) as private:
            for x, y in private.batches():
                if rank == 1 and private.steps_done == 2 and where == "raises":
                    raise KeyError("of rank 1 alone")
                private.backward(F.cross_entropy(model(x), y, reduction="none"))
                optimizer.step()
                if where == "leaves" and rank == 1 and private.steps_done == 2:
                    break
                if where == "ahead" and rank == 1 and private.steps_done == 2:
                    private._steps.done += 1  # a step that it did not share

    return caught(run)


def dies(rank: int) -> str:
    """The last rank is killed after its second step."""
    plan = plan_for(METHODS["flat"](), noise_multiplier=1.0)

    def look(private: Any) -> None:
        if rank == dist.get_world_size() - 1 and private.steps_done == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    return caught(lambda: train(plan, look=look))
