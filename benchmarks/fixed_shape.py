"""What `batches(fixed_shape=True)` costs: private steps (forward, backward, noise, optimizer)
whose physical batches have a public number of rows, beside steps with as many rows as take part;
also under torch.compile, which likes static shapes.

Both take turns, step by step, and medians are compared. n = 60,000 made-up images of 28 x 28,
delta 1e-5, a plan of 1,000 steps.

Run: ``python benchmarks/fixed_shape.py [--batch 16 64 ...] [--compile]``
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.training.batches.slots import slots_needed

MODELS: dict[str, Callable[[], nn.Module]] = {
    "softmax": lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)),
    "MLP": lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)),
    "CNN": lambda: nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, 3), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    ),
}  # fmt: skip


def steps(
    name: str, plan: dpoptim.Plan, data: TensorDataset, *, fixed: bool, compiled: bool
) -> Iterator[float]:
    """Seconds of one step after the other."""
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    physical = 4096 if plan.batch_size > 4096 else None
    with dpoptim.attach(plan, model, optimizer, data) as private:
        called = torch.compile(model, dynamic=None) if compiled else model
        start = time.perf_counter()
        done = 0
        for x, y in private.batches(fixed_shape=fixed, physical_batch_size=physical):
            private.backward(F.cross_entropy(called(x), y, reduction="none"))
            optimizer.step()
            if private.steps_done > done:
                done = private.steps_done
                yield time.perf_counter() - start
                start = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64, 256, 1024, 4096, 16_384])
    parser.add_argument("--model", nargs="+", default=list(MODELS))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    data = TensorDataset(torch.randn(60_000, 1, 28, 28), torch.randint(0, 10, (60_000,)))
    for name in given.model:
        for batch in given.batch:
            method = dpoptim.DPSGD(clip_norm=1.0)
            plan = method.plan(
                n=60_000, batch_size=batch, steps=1000, noise_multiplier=1.0, delta=1e-5
            )
            runs = [
                steps(name, plan, data, fixed=fixed, compiled=given.compile)
                for fixed in (False, True)
            ]
            pairs = [[next(run) for run in runs] for _ in range(given.steps)][3:]
            usual, fixed = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
            slots = slots_needed(plan)
            print(f"{name:8} batch {batch:6}  slots {slots:6} ({slots / batch - 1:+.0%})  "
                  f"{usual:9.2f} ms  fixed {fixed:9.2f} ms "
                  f"({fixed / usual - 1:+.0%})", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
