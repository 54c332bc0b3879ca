"""What error feedback costs: a step of DiceSGD against one of DP-SGD, through `attach`, noise and
batches included.

The two take turns, step by step; medians of processor time. Records that clipping leaves alone,
and those that are also cut to R, share one product for both sums; "at worst" no record does,
because R is beyond all of them. Memory counts tensors at the peak of a step, in sizes of the
model's parameters in float64.

Run: ``python benchmarks/error_feedback.py [--steps 9] [--workload GPT ...] --out
benchmarks/results``.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from dpoptim import DPSGD, DiceSGD, attach
from dpoptim.training.trials.memory import LiveTensors
from saving import save_csv
from workloads import WORKLOADS, Workload

BATCHES = 20  # of the data set
NAMES = (
    "softmax 785-10",
    "softmax 513-257",
    "MLP 784-256-10",
    "small CNN",
    "GPT",
    "GPT, LoRA",
    "ViT",
)
# measured at this many times their batch, too
SMALL = ("softmax 785-10", "softmax 513-257", "MLP 784-256-10")
LARGER = 8
WARM_UP = 3  # steps
Method = DPSGD | DiceSGD
METHODS: dict[str, Method] = {
    "DP-SGD": DPSGD(1.0),
    "DiceSGD": DiceSGD(1.0),
    "at worst": DiceSGD(1.0, residual_clip=1e9),
}


def records(work: Workload, times: int) -> TensorDataset:
    """The workload's batch, repeated."""
    x, y = work.data()
    return TensorDataset(torch.cat([x] * times), torch.cat([y] * times))


def steps(work: Workload, method: Method, data: TensorDataset, batch_size: int) -> Iterator[float]:
    """Processor seconds of one step after the other."""
    model = work.build()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    plan = method.plan(
        n=len(data),
        batch_size=batch_size,
        epochs=100,
        noise_multiplier=1.0,
        delta=1e-5,
        neighboring="zero-out",
    )
    with attach(plan, model, optimizer, data, loss_reduction="sum") as private:
        waiting = iter(private.batches())
        while True:
            started = time.process_time()
            x, y = next(waiting)
            work.loss(model(x), y, "none").sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            yield time.process_time() - started


def peak(work: Workload, method: Method, data: TensorDataset) -> float:
    """Of three steps on the same full batch, in float64 tensors of the parameters' size."""
    size = 8 * sum(p.numel() for p in work.build().parameters() if p.requires_grad)
    with LiveTensors() as live:
        for _ in itertools.islice(steps(work, method, data, len(data)), 3):
            pass
    return live.peak / size


def measure(work: Workload, times: int, count: int) -> dict[str, object]:
    batch = records(work, times)
    data = records(work, times * BATCHES)
    running = {name: steps(work, method, data, len(batch)) for name, method in METHODS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(WARM_UP + count):
        for name, each in running.items():
            taken = next(each)
            if turn >= WARM_UP:
                seconds[name].append(taken)
    plain, dice, worst = (statistics.median(times) for times in seconds.values())
    peaks = [peak(work, METHODS[name], batch) for name in ("DP-SGD", "DiceSGD")]
    return {
        "work": work.name,
        "batch": len(batch),
        "DP-SGD, ms": round(1000 * plain, 2),
        "DiceSGD, ms": round(1000 * dice, 2),
        "ratio": round(dice / plain, 2),
        "ratio at worst": round(worst / plain, 2),
        "parameter-sized tensors more": round(peaks[1] - peaks[0], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workload", nargs="*", default=NAMES, choices=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in asked.workload:
        for times in (1, LARGER) if name in SMALL else (1,):
            rows.append(measure(WORKLOADS[name], times, asked.steps * (10 if name in SMALL else 1)))
            print(rows[-1], flush=True)
    save_csv(rows, asked.out / "error_feedback.csv")


if __name__ == "__main__":
    main()
