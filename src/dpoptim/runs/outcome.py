"""Outcome of a run: its files, and a summary."""

import datetime
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch import nn

from dpoptim.accounting.ledger import Ledger
from dpoptim.assumptions import Assumption
from dpoptim.data import Data, Schema
from dpoptim.data.schema_files import to_toml
from dpoptim.documents import sha256_of
from dpoptim.files import write_atomically
from dpoptim.methods import WholeRun
from dpoptim.noise.correlated.workload import in_words
from dpoptim.plan import Plan
from dpoptim.runs.certificate import write_certificate
from dpoptim.runs.inputs import describe_encoding
from dpoptim.runs.options import TrainRequest
from dpoptim.runs.report import report
from dpoptim.runs.result import LedgerEntry, RunResult, same_ledger
from dpoptim.runs.train import Optimization, Trained, package_versions
from dpoptim.runs.vouching import vouchers
from dpoptim.terminal import cell
from dpoptim.training.planned_rate import decay_of


def result_of(
    request: TrainRequest,
    data: Data,
    plan: Plan,
    optimization: Optimization,
    trained: Trained,
    parameters: int,
    ledger: LedgerEntry | None,
    comparison: tuple[float, ...] | None,
    digest: str,
) -> RunResult:
    """Statements on a run that is over: covered by its guarantee, or declared public."""
    basis = (*trained.basis, *known_by_name(request, ledger))
    return RunResult(
        data_name=data.name,
        model_name=request.model,
        classes=data.classes,
        parameters=parameters,
        plan=plan,
        guarantee=trained.guarantee,
        basis=basis,
        settings={
            **printable_settings(request, data, plan, optimization),
            **({"ended": trained.ended} if trained.ended else {}),
        },
        # how long it takes may depend on the data
        seconds=trained.seconds if data.public else None,
        ledger=ledger,
        private_scores=trained.scores or None,
        comparison_scores=comparison,
        versions=package_versions(),
        finished=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        model_sha256=digest,
        vouched_by=vouchers(basis, request.vouched_by),
    )


def known_by_name(request: TrainRequest, entry: LedgerEntry | None) -> Iterator[Assumption]:
    """Trust that a ledger rests on, since it compares no records."""
    if entry is not None and entry.path is not None:
        by = "the file's name" if request.dataset is None else "the name that --dataset gave"
        yield same_ledger(entry.dataset, by)


def write_run(folder: Path, result: RunResult, data: Data) -> None:
    """Write plan, schema, certificate and report."""
    write_atomically(folder / "plan.json", result.plan.to_json() + "\n")
    texts = {"report.html": report(result)}  # which shows nothing of the digests, its own included
    if isinstance(data.encoding, Schema):
        texts["schema.toml"] = to_toml(data.encoding)
    digests = {name: sha256_of(text) for name, text in texts.items()}
    write_certificate(folder / "certificate.json", replace(result, files=digests))
    for name, text in texts.items():
        write_atomically(folder / name, text)


def try_writing(folder: Path) -> None:
    """Fail before training if the folder cannot be written; older results stay as they are."""
    trial = folder / ".trial"
    write_atomically(trial, b"0" * 4096)
    trial.unlink()


def parameters_of(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def printable_settings(
    request: TrainRequest, data: Data, plan: Plan, optimization: Optimization
) -> dict[str, str]:
    decay, views = in_words(decay_of(plan)), optimization.views
    by_loop = {
        "optimizer": str(optimization.optimizer),
        "learning rate": optimization.rate_in_words(plan) + (decay and f", {decay}"),
        **({"views": f"{views} of each image, moved by up to a pixel"} if views > 1 else {}),
        **iterates_in_words(optimization),
    }
    solver = plan.method.solver if isinstance(plan.method, WholeRun) else None
    return {
        "method": plan.method.name,
        "features": describe_encoding(data),
        **({} if data.class_weights is None else {"class weights": weights_in_words(data)}),
        **(by_loop if solver is None else {}),
        "seed": f"{request.seed} (initialisation and splits)",
        "noise": "keyed by the operating system"
        if request.noise_seed is None
        else f"seed {request.noise_seed}",
    }


def iterates_in_words(optimization: Optimization) -> dict[str, str]:
    radius = optimization.projection
    ball = {} if radius is None else {"projection": f"within {radius:g} of the start"}
    if optimization.iterate == "random":
        return {"iterate": "one that a step left, by chance", **ball}
    if optimization.iterate == "last":
        return {"iterate": "the last", **ball}
    return {"averaged": f"last {optimization.averaged:.0%} of the iterates", **ball}


def weights_in_words(data: Data) -> str:
    each = zip(data.class_names, data.class_weights or (), strict=True)
    return ", ".join(f"{name} {weight:.4g}" for name, weight in each) + " (public)"


def entry_of(request: TrainRequest, ledger: Ledger, trained: Trained) -> LedgerEntry | None:
    """The ledger's entry of the run, if it was charged."""
    if trained.reservation is None:
        return None
    path = None if request.ledger is None else str(request.ledger)
    return LedgerEntry(path, ledger.dataset, trained.reservation, str(ledger.remaining()))


def print_summary(console: Console, result: RunResult, plan: Plan, folder: Path) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    measure, form = result.measure, ".2%" if result.classes else ".4f"
    said = plan.guarantee.notes  # before the run
    notes = tuple(note for note in result.guarantee.notes if note not in said)
    table.add_row("guarantee", str(replace(result.guarantee, notes=notes)))
    if result.private_scores is not None:
        table.add_row(
            f"{measure}, private", f"{result.private_scores[-1]:{form}} (hold-out of public data)"
        )
    if result.comparison_scores is not None:
        table.add_row(
            f"{measure}, not private", f"{result.comparison_scores[-1]:{form}} (for comparison)"
        )
    duration = "" if result.seconds is None else f", {result.seconds:.1f} s"
    table.add_row("training", f"{plan.steps} steps{duration}")
    if "ended" in result.settings:
        table.add_row("ended", cell(result.settings["ended"]))
    table.add_row("results", cell(f"{folder}/: model.pt, plan.json, certificate.json, report.html"))
    console.print(table, highlight=False, soft_wrap=True)
