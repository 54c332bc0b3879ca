"""Gradient against value clipping: clipped shares, accuracy, time (Fang et al. 2023)."""

import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpoptim.methods import DPSGD, PrivateQuantile, ValueClippedSGD
from dpoptim.plan import Plan
from dpoptim.reproduce.one_pass import DELTA, load_split
from dpoptim.reproduce.private_runs import (
    Arrays,
    private_steps,
    record_losses,
    train_to_tail_mean,
)
from dpoptim.reproduce.results import deviation, pyplot, write_rows
from dpoptim.runs.models import build_model
from dpoptim.runs.train import accuracy
from dpoptim.training.attach import attach_own

EPSILON = 2.0
BATCH, EPOCHS = 500, 20
MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: build_model("softmax", (784,), 10),
    "two layers": lambda: build_model("mlp", (784,), 10),
}
CLIP_NORMS = (0.3, 1.0, 3.0)
STEPS = (2.0, 8.0, 32.0)  # learning rate times clip norm


@dataclass(frozen=True)
class Frequency:
    """Share of clipped gradients in an epoch, without noise (public data) or as released.

    Of the *expected* batch, so that the chance of who takes part may carry it a little below 0 or
    above 1.
    """

    model: str
    clip_norm: float
    private: bool
    epoch: int
    clipped: float


@dataclass(frozen=True)
class Score:
    """Test accuracy at epsilon = 2 over seeds, at the best settings on other records."""

    model: str
    method: str
    clip_norm: float
    learning_rate: float
    accuracy: float
    standard_deviation: float
    seeds: int


@dataclass(frozen=True)
class Time:
    """Processor seconds of an epoch, the median of several, and as a multiple of plain SGD's."""

    model: str
    method: str
    seconds: float
    ratio: float


def start(name: str, step: float, clip_norm: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name]()
    return model, torch.optim.SGD(model.parameters(), lr=step / clip_norm)


def clipping_frequency(out: Path, directory: Path, *, epochs: int = 10) -> list[Frequency]:
    """Fig. 1: write ``fang_fig1.csv`` and ``.png`` into the folder ``out``."""
    training, _, _ = load_split(directory)
    rows = []
    for name in MODELS:
        for clip_norm in CLIP_NORMS:
            for private in (False, True):
                method = DPSGD(PrivateQuantile.monitor(clip_norm))
                epsilon, noise = (EPSILON, None) if private else (None, 0.0)
                plan = method.plan(
                    n=len(training[0]),
                    batch_size=BATCH,
                    epochs=epochs,
                    epsilon=epsilon,
                    noise_multiplier=noise,
                    delta=DELTA,
                )
                shares = monitored(plan, training, name, clip_norm)
                per_epoch = len(shares) // epochs
                for epoch in range(epochs):
                    share = mean(shares[epoch * per_epoch : (epoch + 1) * per_epoch])
                    rows.append(Frequency(name, clip_norm, private, epoch + 1, 1 - share))
            write_rows(out / "fang_fig1.csv", Frequency, rows)
    draw_frequencies(out / "fang_fig1.png", rows)
    return rows


def monitored(plan: Plan, training: Arrays, name: str, clip_norm: float) -> list[float]:
    model, optimizer = start(name, 8.0, max(clip_norm, 1.0))
    steps = private_steps(plan, model, optimizer, training, record_losses, seed=0)
    return [private.share_unclipped for private in steps]


def methods(clip_norm: float) -> dict[str, DPSGD | ValueClippedSGD]:
    return {
        "gradient clipping": DPSGD(clip_norm),
        "value clipping, sharp": ValueClippedSGD(clip_norm),
        "value clipping, paper's constants": ValueClippedSGD(clip_norm, bound="paper"),
    }


def accuracies(out: Path, directory: Path, *, seeds: int = 3) -> list[Score]:
    """Fig. 2: write ``fang_fig2.csv``, at each method's best clip norm and learning rate."""
    training, choosing, test = load_split(directory)
    rows = []
    for name in MODELS:
        for method in methods(1.0):
            plans = [
                methods(clip_norm)[method].plan(
                    n=len(training[0]),
                    batch_size=4 * BATCH,
                    epochs=EPOCHS,
                    epsilon=EPSILON,
                    delta=DELTA,
                )
                for clip_norm in CLIP_NORMS
            ]
            tried = (
                (run(plan, name, training, step, 0, choosing), plan, step)
                for plan, step in itertools.product(plans, STEPS)
            )
            _, plan, step = max(tried, key=lambda each: each[0])
            found = [run(plan, name, training, step, seed, test) for seed in range(1, seeds + 1)]
            norm = plan.method.rule.norm
            rows.append(
                Score(name, method, norm, step / norm, mean(found), deviation(found), seeds)
            )
            write_rows(out / "fang_fig2.csv", Score, rows)
    return rows


def run(
    plan: Plan, name: str, training: Arrays, step: float, seed: int, measured_on: Arrays
) -> float:
    """Accuracy of the mean of the second half of the iterates."""
    model, optimizer = start(name, step, plan.method.rule.norm)
    train_to_tail_mean(plan, model, optimizer, training, record_losses, seed, rows=BATCH)
    return accuracy(model, *measured_on)


def epoch_times(
    out: Path, directory: Path, *, repeats: int = 5, say: Callable[[str], None] = print
) -> list[Time]:
    """Table 2: write ``fang_table2.csv``; methods take turns; 1,000 records for batches of one.

    Opacus takes part where it is installed (the extra ``[bench]``).
    """
    with_opacus = importlib.util.find_spec("opacus") is not None
    if not with_opacus:
        say("without Opacus: pip install 'dpoptim[bench]'")
    training, _, _ = load_split(directory)
    rows = []
    for name in MODELS:
        found: dict[str, list[float]] = {}
        for _ in range(repeats):
            found.setdefault("plain SGD", []).append(plain_epoch(name, training))
            found.setdefault("plain SGD by a DataLoader", []).append(loader_epoch(name, training))
            found.setdefault("micro-batches of one", []).append(one_by_one(name, training, 1000))
            if with_opacus:
                found.setdefault("Opacus", []).append(opacus_epoch(name, training))
            for method, chosen in methods(1.0).items():
                plan = chosen.plan(
                    n=len(training[0]), batch_size=BATCH, epochs=1, epsilon=EPSILON, delta=DELTA
                )
                found.setdefault(method, []).append(private_epoch(plan, name, training))
        plain = statistics.median(found["plain SGD"])
        for method, seconds in found.items():
            rows.append(
                Time(name, method, statistics.median(seconds), statistics.median(seconds) / plain)
            )
        write_rows(out / "fang_table2.csv", Time, rows)
    return rows


def plain_epoch(name: str, training: Arrays) -> float:
    """Ordinary SGD on random batches, collated as the private ones are."""
    model, optimizer = start(name, 0.1, 1.0)
    x, y = training
    started = time.process_time()
    for indices in torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).split(BATCH):
        F.cross_entropy(model(x[indices]), y[indices]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.process_time() - started


def loader_epoch(name: str, training: Arrays) -> float:
    """Ordinary SGD on shuffled batches of PyTorch's loader, collated record by record."""
    model, optimizer = start(name, 0.1, 1.0)
    started = time.process_time()
    for x, y in DataLoader(TensorDataset(*training), batch_size=BATCH, shuffle=True):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.process_time() - started


def one_by_one(name: str, training: Arrays, records: int) -> float:
    """Clipping by a backward pass for each record, scaled up from the first ``records``."""
    model, _ = start(name, 0.1, 1.0)
    started = time.process_time()
    total = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(records):
        loss = F.cross_entropy(model(training[0][i : i + 1]), training[1][i : i + 1])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        factor = float(torch.clamp(1 / norm, max=1.0))
        for sums, g in zip(total, gradients, strict=True):
            sums.add_(g, alpha=factor)
    return (time.process_time() - started) * len(training[0]) / records


def opacus_epoch(name: str, training: Arrays) -> float:
    """Opacus with hooks, its float32 noise included, on the batches of `plain_epoch`."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model, optimizer = start(name, 0.1, 1.0)
    wrapped = GradSampleModule(model)
    private = DPOptimizer(
        optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=BATCH
    )
    x, y = training
    started = time.process_time()
    for indices in torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).split(BATCH):
        F.cross_entropy(wrapped(x[indices]), y[indices]).backward()
        private.step()
        private.zero_grad()
    return time.process_time() - started


def private_epoch(plan: Plan, name: str, training: Arrays) -> float:
    model, optimizer = start(name, 0.1, 1.0)
    with attach_own(plan, model, optimizer, TensorDataset(*training)) as private:
        started = time.process_time()
        for x, y in private.batches():
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
        return time.process_time() - started


def draw_frequencies(path: Path, rows: Sequence[Frequency]) -> None:
    """Share of clipped gradients against epochs, a panel for each model."""
    plt = pyplot()
    names = list(dict.fromkeys(row.model for row in rows))
    figure, axes = plt.subplots(
        1, len(names), figsize=(4.4 * len(names), 3.4), layout="constrained", squeeze=False
    )
    for axis, name in zip(axes[0], names, strict=True):
        for i, clip_norm in enumerate(CLIP_NORMS):
            for private, line in ((False, "-"), (True, "--")):
                mine = [
                    row
                    for row in rows
                    if (row.model, row.clip_norm, row.private) == (name, clip_norm, private)
                ]
                label = f"C = {clip_norm:g}" + (
                    rf", private ($\epsilon$ = {EPSILON:g})" if private else ""
                )
                axis.plot(
                    [row.epoch for row in mine],
                    [row.clipped for row in mine],
                    line,
                    color=f"C{i}",
                    label=label,
                )
        axis.set(xlabel="epoch", title=name, ylim=(0, 1.02))
    figure.axes[0].set_ylabel("share of clipped gradients")
    figure.axes[0].legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
