"""Time and memory of one private step as multiples of the plain PyTorch step on the same model and
batch.

Variants take turns in one process, and medians are compared, because machines are noisy. "ours"
has everything but the noise (gradients, clipping, summing, optimizer), "ours, noise" also draws
it, in float64 with a full tail; the peers draw theirs in float32. "ours, MKL" multiplies matrices
as plain PyTorch does, where ours would take a faster library on this processor (see
`dpoptim.gradients.multiplication`). "closed form" is the path of generalised linear models. Opacus
trains the models as it asks for them: with its own LSTM, and with a table and a mean in the place
of a bag.

``--alone`` also gives each variant processes of its own, as users do: peak memory above the model
and its batch, and the time of a step, which differs because the allocator gives memory back
between a step's peaks, and fresh pages cost time.

Run: ``python benchmarks/step_time.py [--workload GPT ...] [--alone] [--out benchmarks/results]``.
Opacus takes part where it is installed (extra ``bench``).
"""

import argparse
import gc
import math
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.func import functional_call, grad, vmap

from dpoptim.clipping import Clipping
from dpoptim.gradients import multiplication
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.linear import LinearModel
from dpoptim.noise.gaussian import add_normal
from dpoptim.noise.stream import KeyStream
from dpoptim.training.isolation import choose_isolation
from dpoptim.training.probe import positions_per_layer
from saving import save_csv
from workloads import WORKLOADS, Workload

Step = Callable[[], None]
PLAIN = "plain"
RATE = 1e-4
PROCESSES = 3  # of a variant alone


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)


def made(work: Workload, device: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Model and batch."""
    model = work.build().to(device)
    x, y = work.data()
    return model, x.to(device), y.to(device)


def plain(
    work: Workload,
    *,
    compiled: bool = False,
    device: str = "cpu",
    narrow: torch.dtype | None = None,
) -> Step:
    """``narrow``: what torch.autocast computes in, if it does."""
    model, x, y = made(work, device)
    optimizer = sgd(model)
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, narrow) if narrow else nullcontext():
            loss = work.loss(forward(x), y, "mean")
        loss.backward()
        optimizer.step()

    return step


def by_mkl(step: Step) -> Step:
    """The same with the library that plain PyTorch multiplies with."""

    def slower() -> None:
        with patch.object(multiplication, "onednn_is_faster", lambda: False):
            step()

    return slower


def ours(
    work: Workload,
    *,
    noise: bool = False,
    compiled: bool = False,
    device: str = "cpu",
    narrow: torch.dtype | None = None,
) -> Step:
    """``narrow``: as for `plain`."""
    model, x, y = made(work, device)
    optimizer, stream = sgd(model), KeyStream()
    chosen = choose_isolation(model, torch.utils.data.TensorDataset(x, y))
    positions = positions_per_layer(model, chosen.sample)
    engine = Engine(
        model,
        Clipping(1.0),
        capacity=len(x),
        reduction="sum",
        positions=positions,
        isolation=chosen.isolation,
    )
    engine.attach()
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        engine.begin_microbatch(len(x))
        with torch.autocast(device, narrow) if narrow else nullcontext():
            loss = work.loss(forward(x), y, "none").sum()
        loss.backward()
        sums = engine.take()
        if noise:
            for buffer in sums:
                add_normal(stream, buffer, 1.0)
        engine.write_means(sums, len(x))
        optimizer.step()
        optimizer.zero_grad()

    return step


def closed_form(work: Workload) -> Step:
    """Softmax regression as the estimators train it, without autograd; the norms of the records
    are measured once.
    """
    model, (x, y) = work.build(), work.data()
    layers = [
        module
        for module in model.modules()
        if not list(module.children()) and not isinstance(module, nn.Flatten)
    ]
    if len(layers) != 1 or not isinstance(layers[0], nn.Linear):
        raise TypeError("for generalised linear models")
    layer, x = layers[0], x.flatten(1)
    regression = LinearModel(
        "softmax", layer.in_features, layer.out_features, intercept=layer.bias is not None
    )
    w = torch.zeros(regression.dimension, dtype=torch.float64)
    norms = regression.squared_row_norms(x)

    def step() -> None:
        total = regression.clipped_sum(
            x, y, [(1.0, w)], 1.0, capacity=len(x), squared_row_norms=norms
        )
        w.sub_(total, alpha=RATE / len(x))

    return step


def vmapped(work: Workload) -> Step:
    """torch.func: every gradient formed, clipped and summed; no noise."""
    if work.huge_table:
        raise MemoryError("per-record gradients of the table")
    model, (x, y) = work.build(), work.data()
    optimizer = sgd(model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def loss(given: dict[str, torch.Tensor], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return work.loss(functional_call(model, given, (a[None],)), b[None], "mean")

    per_record = vmap(grad(loss), (None, 0, 0))

    def step() -> None:
        gradients = per_record({name: p.detach() for name, p in parameters.items()}, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        factors = (1 / norms).clamp(max=1) / len(x)
        for name, p in parameters.items():
            p.grad = torch.einsum("b,b...->...", factors, gradients[name])
        optimizer.step()

    return step


def opacus(work: Workload, *, ghost: bool) -> Step:
    """Opacus with hooks, or ghost clipping; with its float32 noise."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
    from opacus.validators import ModuleValidator

    if work.huge_table and not ghost:
        raise MemoryError("per-record gradients of the table")
    model, (x, y) = (
        ModuleValidator.fix(work.looked_up() if work.looked_up else work.build()),
        work.data(),
    )
    common = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": len(x)}
    if not ghost:
        wrapped: nn.Module = GradSampleModule(model)
        optimizer = DPOptimizer(sgd(model), **common)

        def step() -> None:
            optimizer.zero_grad()
            work.loss(wrapped(x), y, "mean").backward()
            optimizer.step()

        return step
    fast = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0)
    optimizer = DPOptimizerFastGradientClipping(sgd(model), **common)

    class Criterion:
        reduction = "mean"

        def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return work.loss(output, target, self.reduction)

    criterion = DPLossFastGradientClipping(fast, optimizer, Criterion())

    def ghost_step() -> None:
        optimizer.zero_grad()
        criterion(fast(x), y).backward()
        optimizer.step()

    return ghost_step


VARIANTS: dict[str, Callable[[Workload], Step]] = {
    PLAIN: plain,
    "ours": ours,
    "ours, MKL": lambda work: by_mkl(ours(work)),
    "ours, closed form": closed_form,
    "ours, noise": lambda work: ours(work, noise=True),
    "plain, compiled": lambda work: plain(work, compiled=True),
    "ours, compiled": lambda work: ours(work, compiled=True),
    "vmap(grad)": vmapped,
    "Opacus hooks": lambda work: opacus(work, ghost=False),
    "Opacus ghost": lambda work: opacus(work, ghost=True),
}


def seconds(step: Step, repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - started) / repeats


def measure(
    work: Workload, names: list[str], rounds: int
) -> tuple[dict[str, float], dict[str, str]]:
    """Median seconds of a step by variant, and why the others are missing."""
    steps: dict[str, Step] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            torch.manual_seed(0)
            step = VARIANTS[name](work)
            for _ in range(2):
                step()
            steps[name] = step
        except Exception as error:  # a peer may refuse a model in any way
            missing[name] = (
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]
            )
    repeats = max(1, int(0.05 / seconds(steps[PLAIN], 3)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(seconds(step, repeats))
    return {name: statistics.median(values) for name, values in times.items()}, missing


def resident(which: str) -> float:
    """MiB of this process that are in memory now ("VmRSS"; "RssFile": code and other files), or
    were at most ("VmHWM").
    """
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(which)
    )
    return int(line.split()[1]) / 1024


def one_alone(work: Workload, name: str) -> tuple[float, float]:
    """MiB at the peak above the process after model and batch exist, and seconds a step; in a
    process of its own.

    Pages of files that a step reads in are left out: they are the libraries' code, which all
    processes share.
    """
    torch.manual_seed(0)
    VARIANTS[PLAIN](work)  # the allocator's and libraries' own
    square = torch.ones(64, 64)
    multiplication.by_onednn(square, square @ square)
    gc.collect()
    step = VARIANTS[name](work)
    before, files = resident("VmRSS"), resident("RssFile")
    taken = [seconds(step, 1) for _ in range(3)]
    # getrusage's would begin with that of the process that started this one
    peak = resident("VmHWM") - before
    peak -= resident("RssFile") - files
    repeats = min(200, max(5, int(1 / min(taken))))
    return peak, statistics.median(seconds(step, 1) for _ in range(repeats))


def alone(work: str, names: list[str]) -> dict[str, tuple[float, float]]:
    """Medians of `one_alone` over several processes, which take turns: the system's counts differ
    from one to the next.
    """
    found: dict[str, list[list[str]]] = {name: [] for name in names}
    for _ in range(PROCESSES):
        for name, measured in found.items():
            command = [sys.executable, __file__, "--one", work, name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                measured.append(done.stdout.split()[-2:])
            else:
                print(
                    f"{work}, {name}, alone: "
                    f"{(done.stderr.splitlines() or ['no reason given'])[-1]}",
                    file=sys.stderr,
                )
    return {
        name: (
            statistics.median(float(peak) for peak, _ in measured),
            statistics.median(float(s) for _, s in measured),
        )
        for name, measured in found.items()
        if len(measured) == PROCESSES
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--variant", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--alone",
        action="store_true",
        help="also each variant in processes of its own, and peak memory",
    )
    parser.add_argument("--out", type=Path, help="folder for step_time.csv and step_time.png")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.one:
        print(*one_alone(WORKLOADS[options.one[0]], options.one[1]))
        return
    names = [PLAIN, *(name for name in options.variant if name != PLAIN)]
    rows: list[dict[str, object]] = []
    console = Console(width=160)
    for title in options.workload:
        work = WORKLOADS[title]
        found, missing = measure(work, names, options.rounds)
        records = len(work.data()[0])
        lonely = alone(title, list(found)) if options.alone else {}
        for name in names:
            taken, (peak, apart) = found.get(name), lonely.get(name, (math.nan, math.nan))
            rows.append(
                {
                    "workload": title,
                    "variant": name,
                    "milliseconds": f"{taken * 1e3:.4g}" if taken else "",
                    "ratio": f"{taken / found[PLAIN]:.3g}" if taken else "",
                    "samples_per_second": f"{records / taken:.4g}" if taken else "",
                    "alone_milliseconds": "" if math.isnan(apart) else f"{apart * 1e3:.4g}",
                    "alone_ratio": "" if math.isnan(apart) else f"{apart / lonely[PLAIN][1]:.3g}",
                    "peak_mib": "" if math.isnan(peak) else f"{peak:.0f}",
                    "missing": missing.get(name, ""),
                }
            )
        if options.out is not None:
            save(rows, options.out)
        line = ", ".join(
            f"{name} {value / found[PLAIN]:.2f}" for name, value in found.items() if name != PLAIN
        )
        console.print(f"{title}: plain {found[PLAIN] * 1e3:.2f} ms; {line}")
    console.print(table_of(rows, names))


def save(rows: list[dict[str, object]], out: Path) -> None:
    save_csv(rows, out / "step_time.csv")
    draw(rows, out / "step_time.png")


def table_of(rows: list[dict[str, object]], names: list[str]) -> Table:
    table = Table(
        title=f"multiples of the plain step, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}"
    )
    table.add_column("workload")
    for name in names:
        table.add_column(name, justify="right")
    for title in dict.fromkeys(row["workload"] for row in rows):
        cells = {row["variant"]: row for row in rows if row["workload"] == title}
        table.add_row(str(title), *(str(cells[name]["ratio"] or "-") for name in names))
    return table


def draw(rows: list[dict[str, object]], path: Path) -> None:
    """Ratios to plain, a group for each workload."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    titles = list(dict.fromkeys(str(row["workload"]) for row in rows))
    names = [name for name in dict.fromkeys(str(row["variant"]) for row in rows) if name != PLAIN]
    figure, axis = plt.subplots(figsize=(1.5 + 1.1 * len(titles), 3.8), layout="constrained")
    for i, name in enumerate(names):
        found = {
            row["workload"]: float(str(row["ratio"]))
            for row in rows
            if row["variant"] == name and row["ratio"]
        }
        places = [
            titles.index(str(title)) + (i - len(names) / 2) * 0.8 / len(names) for title in found
        ]
        axis.bar(places, list(found.values()), 0.8 / len(names), label=name)
    axis.axhline(1, color="#6b7280", linewidth=0.8)
    axis.set_yscale("log")
    axis.set_xticks(range(len(titles)), titles, rotation=35, ha="right")
    axis.set_ylabel("times the plain step")
    axis.legend(fontsize=7, frameon=False, ncols=9, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
