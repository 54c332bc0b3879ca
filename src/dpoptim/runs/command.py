"""``dpoptim train``: from the options to the run directory."""

import copy
import datetime
import hashlib
import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from dpoptim.accounting.guarantee import rounded_up
from dpoptim.accounting.ledger import Ledger
from dpoptim.data import (
    FASHION_MNIST_DIRECTORY,
    Data,
    Floats,
    hold_out_fifth,
    load_digits,
    load_fashion_mnist,
    load_table,
)
from dpoptim.files import write_atomically
from dpoptim.methods import WholeRun
from dpoptim.plan import Plan
from dpoptim.recipes import recipe
from dpoptim.runs.certificate import write_certificate
from dpoptim.runs.models import build_model
from dpoptim.runs.options import TrainRequest
from dpoptim.runs.plans import plan_of
from dpoptim.runs.report import write_report
from dpoptim.runs.result import LedgerEntry, RunResult, Scores
from dpoptim.runs.train import (
    Optimization,
    comparison_epochs,
    package_versions,
    train_privately,
    train_without_privacy,
)
from dpoptim.runs.train_solver import solver_clip, train_by_solver
from dpoptim.terminal import cell, say

BUNDLED = ("digits", "fashion-mnist")


def run_training(request: TrainRequest, console: Console) -> Path:
    """Load, plan, train, save, report. Returns the run directory.

    Everything that can be refused is refused before the first noisy step: data, plan, ledger, run directory.

    **Guarantee.** What is written and printed is covered by the plan's guarantee, or was declared public.
    """
    data = load(request)
    defaults = recipe(request.model, request.n or len(data.x))
    plan = plan_of(
        request, len(data.x), bundled=request.data in BUNDLED, largest_gradient=solver_clip(data), defaults=defaults
    )
    compare = data.public if request.compare is None else request.compare
    if compare and not data.public:
        raise ValueError("--compare trains without privacy, which only public data allows: add --data-is-public.")
    torch.manual_seed(request.seed)
    model = build_model(request.model, data.x.shape[1:], data.classes)
    comparison = copy.deepcopy(model)
    optimization = Optimization(
        learning_rate=pick(request.learning_rate, defaults.learning_rate),
        momentum=pick(request.momentum, defaults.momentum),
        averaged=defaults.averaged,
        physical_batch_size=request.physical_batch_size or defaults.physical_batch_size,
    )
    with open_ledger(request, plan, data) as ledger:
        if plan.noise_multiplier > 0:
            ledger.check(plan.event, plan.neighboring)
        folder = prepare_folder(request, data)
        try_writing(folder)  # before anything is spent
        say(plan.describe(), to=console)
        if request.ledger is not None and ledger.budget is None:
            note = "Note: this ledger has no budget, so it writes every run down and refuses none; a new one takes --budget."
            say(note, style="yellow", to=console)
        with progress_bar(console, plan) as count:
            train = train_by_solver if isinstance(plan.method, WholeRun) else train_privately
            trained = train(
                data,
                model,
                plan,
                optimization,
                ledger=ledger,
                label=f"{data.name[:150]} {request.model}",
                noise_seed=request.noise_seed,
                on_step=count,
            )
        digest = save_model(folder / "model.pt", model, request, data)  # first of all: the budget that made it is spent
        entry = None
        if trained.reservation is not None:
            path = None if request.ledger is None else str(request.ledger)
            entry = LedgerEntry(path, ledger.dataset, trained.reservation, str(ledger.remaining()))
    scores = None
    if compare:
        scores = Scores(train_without_privacy(data, comparison, epochs=comparison_epochs(data), seed=request.seed))
    result = RunResult(
        data_name=data.name,
        model_name=request.model,
        classes=data.classes,
        parameters=sum(p.numel() for p in model.parameters()),
        plan=plan,
        guarantee=trained.guarantee,
        basis=trained.basis,
        settings=printable_settings(request, plan, optimization),
        seconds=trained.seconds if data.public else None,  # how long it takes may depend on the data
        ledger=entry,
        private_scores=Scores(trained.scores) if trained.scores else None,
        comparison_scores=scores,
        versions=package_versions(),
        finished=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        model_sha256=digest,
    )
    write_atomically(folder / "plan.json", plan.to_json() + "\n")
    write_certificate(folder / "certificate.json", result)
    write_report(folder / "report.html", result)
    print_summary(console, result, folder)
    return folder


# ---- before training -------------------------------------------------------------------------------------------------


def load(request: TrainRequest) -> Data:
    """The data set that the options name; tables are scaled record by record where asked."""
    if request.data == "digits":
        data = soften(load_digits(request.seed), request.raw_pixels)
    elif request.data == "fashion-mnist":
        data = soften(load_fashion_mnist(request.data_dir or FASHION_MNIST_DIRECTORY), request.raw_pixels)
    else:
        data = load_table(request.data, request.target, classes=request.class_names, public=request.data_is_public)
        data = hold_out_fifth(data, request.seed) if data.public else data
        if request.normalise:
            data = replace(data, x=unit_rows(data.x), x_test=None if data.x_test is None else unit_rows(data.x_test))
        return data
    for name, value in (("--target", request.target), ("--classes", request.classes)):
        if value is not None:
            raise ValueError(f"{name} is for a table of your own; {request.data} brings its labels.")
    return data


def soften(data: Data, raw: bool) -> Data:
    """Bundled images with every pixel p in [0, 1] mapped to sqrt(p) - 0.4, unless ``raw``.

    A fixed map of each record alone, so it costs no privacy; it evens out what the clipped gradients see.
    """
    if raw or data.x_test is None:
        return data
    return replace(data, x=np.sqrt(data.x) - np.float32(0.4), x_test=np.sqrt(data.x_test) - np.float32(0.4))


def unit_rows(x: Floats) -> Floats:
    """Each record scaled to Euclidean norm 1 by itself; records of zeros stay."""
    flat = x.reshape(len(x), -1).astype(np.float64)
    norms = np.linalg.norm(flat, axis=1, keepdims=True)
    scaled: Floats = (flat / np.where(norms > 0, norms, 1)).astype(np.float32)
    return scaled.reshape(x.shape)


def pick(given: float | None, default: float) -> float:
    return default if given is None else given


def open_ledger(request: TrainRequest, plan: Plan, data: Data) -> Ledger:
    """The ledger of the data set: the file named, or one in memory."""
    if request.budget is not None and request.ledger is None:
        raise ValueError("--budget is kept by a ledger file; name one with --ledger.")
    if request.budget is None:
        dataset = None if request.ledger is None else data.name  # a file belongs to one data set
        return Ledger(request.ledger, dataset=dataset, neighboring=plan.neighboring)
    try:
        epsilon, delta = (float(part) for part in request.budget.split(","))
    except ValueError:
        raise ValueError(f"--budget takes EPSILON,DELTA such as 3,1e-5, got {request.budget!r}.") from None
    return Ledger(request.ledger, dataset=data.name, epsilon=epsilon, delta=delta, neighboring=plan.neighboring)


def prepare_folder(request: TrainRequest, data: Data) -> Path:
    """Make the run directory; never touch results that are there unless told to."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = request.out or Path("runs") / f"{data.name}-{request.model}-{stamp}"
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file; name a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not request.overwrite:
        raise ValueError(f"--out {folder} is not empty; name another folder, or allow --overwrite.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def try_writing(folder: Path) -> None:
    """Fail now rather than after training if the folder cannot be written; older results are left as they are."""
    trial = folder / ".trial"
    write_atomically(trial, b"0" * 4096)
    trial.unlink()


def printable_settings(request: TrainRequest, plan: Plan, optimization: Optimization) -> dict[str, str]:
    by_loop = {
        "optimizer": f"SGD, momentum {optimization.momentum:g}",
        "learning rate": f"{optimization.learning_rate:g}",
        "averaged": f"last {optimization.averaged:.0%} of the iterates",
    }
    solver = plan.method.solver if isinstance(plan.method, WholeRun) else None
    return {
        "method": request.method if solver is None else solver,
        "features": describe_features(request),
        **(by_loop if solver is None else {}),
        "seed": f"{request.seed} (initialisation and splits)",
        "noise": "keyed by the operating system" if request.noise_seed is None else f"seed {request.noise_seed}",
    }


def describe_features(request: TrainRequest) -> str:
    if request.data in BUNDLED:
        return "pixels in [0, 1]" if request.raw_pixels else "sqrt(pixel) - 0.4 (fixed map)"
    return "each record scaled to norm 1 by itself" if request.normalise else "as in the file"


@contextmanager
def progress_bar(console: Console, plan: Plan) -> Iterator["StepCounter"]:
    """A bar of public figures: steps, and the epsilon that is reserved."""
    promise = f"epsilon {rounded_up(plan.guarantee.epsilon)} reserved" if plan.noise_multiplier > 0 else "no privacy"
    columns = (TextColumn("training"), BarColumn(), TextColumn("{task.completed}/{task.total} steps"))
    with Progress(*columns, TextColumn(promise), TimeRemainingColumn(), console=console) as progress:
        yield StepCounter(progress, plan.steps)


class StepCounter:
    """Called with the number of finished steps."""

    def __init__(self, progress: Progress, steps: int) -> None:
        self._progress = progress
        self._task = progress.add_task("training", total=steps)

    def __call__(self, step: int) -> None:
        self._progress.update(self._task, completed=step)


# ---- after training --------------------------------------------------------------------------------------------------


def save_model(path: Path, model: nn.Module, request: TrainRequest, data: Data) -> str:
    """Write the model, and return the file's SHA-256.

    Where the folder fails, it goes into a temporary one, because the budget that made it is spent.
    """
    buffer = io.BytesIO()
    torch.save(
        {
            "model": request.model,
            "shape": list(data.x.shape[1:]),
            "class_names": list(data.class_names),
            "state_dict": model.state_dict(),
        },
        buffer,
    )
    try:
        write_atomically(path, buffer.getvalue())
    except OSError as error:
        rescue = Path(tempfile.mkdtemp(prefix="dpoptim-")) / path.name
        write_atomically(rescue, buffer.getvalue())
        raise OSError(f"{error} The trained model was saved to {rescue} instead; its budget is spent.") from error
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def print_summary(console: Console, result: RunResult, folder: Path) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("guarantee", str(result.guarantee))
    if result.private_scores is not None:
        table.add_row("accuracy, private", f"{result.private_scores.final:.2%} (hold-out of public data)")
    if result.comparison_scores is not None:
        table.add_row("accuracy, not private", f"{result.comparison_scores.final:.2%} (for comparison)")
    duration = "" if result.seconds is None else f", {result.seconds:.1f} s"
    table.add_row("training", f"{result.plan.steps} steps{duration}")
    table.add_row("results", cell(f"{folder}/: model.pt, plan.json, certificate.json, report.html"))
    console.print(table, highlight=False, soft_wrap=True)
