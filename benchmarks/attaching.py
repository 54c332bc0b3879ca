"""How long `attach` tries a model and its loss, beside plain steps on the same batch.

Prints a table: the plain step, attaching with ``loss=`` in seconds and in such steps, and how often
the model is run meanwhile, on one record or a few.

Run: ``OMP_NUM_THREADS=1 python benchmarks/attaching.py [--rows GPT ...]``.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from steps import plain, sgd
from workloads import WORKLOADS, Workload

ROWS = ("softmax 785-10", "MLP 784-256-10", "small CNN", "GPT", "ViT", "ResNet, GroupNorm", "LSTM")
TIMES = 3


def median_seconds(run: Callable[[], object]) -> float:
    run()
    found = []
    for _ in range(TIMES):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def attached(work: Workload) -> tuple[float, int]:
    """Seconds that attaching takes, and runs of the model meanwhile."""
    data, runs = TensorDataset(*work.data()), []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return work.loss(model(batch[0]), batch[1], "none")

    def attach() -> None:
        model = work.build()
        model.register_forward_pre_hook(lambda *_: runs.append(model))
        plan = dpoptim.DPSGD(clip_norm=1.0).plan(
            n=len(data), batch_size=len(data) // 2, steps=1, noise_multiplier=1.0, delta=1e-3
        )
        with dpoptim.attach(plan, model, sgd(model), data, loss=loss, ledger=dpoptim.Ledger()):
            pass

    return median_seconds(attach), len(runs) // (TIMES + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(WORKLOADS))
    warnings.simplefilter("ignore")
    print("| work | plain step, ms | attach, s | in plain steps | runs of the model |")
    print("|---" * 5 + "|")
    for title in parser.parse_args().rows:
        torch.manual_seed(0)
        step = median_seconds(plain(WORKLOADS[title]))
        seconds, runs = attached(WORKLOADS[title])
        print(f"| {title} | {1e3 * step:.3g} | {seconds:.2f} | {seconds / step:.3g} | {runs} |")


if __name__ == "__main__":
    main()
