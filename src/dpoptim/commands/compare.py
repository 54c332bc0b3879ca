"""``dpoptim compare``: methods side by side."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from dpoptim.registry import method_names
from dpoptim.runs.options import (
    DataDirOption,
    ModelOption,
    NoiseSeedOption,
    OptimizerOption,
    Relation,
    SchemaOption,
    TargetBoundsOption,
    TargetOption,
    TaskOption,
    lowest_and_highest,
)
from dpoptim.terminal import cell, clear_errors, console, say

ALL = ("dp-sgd", "dice-sgd", "dp-ftrl")  # that train any model, compared unless others are named


def compare(
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Any of {', '.join(method_names())}; default {', '.join(ALL)}. Settings of one "
            "follow it, as in dp-sgd:clip-norm=0.5:learning-rate=2.",
            metavar="METHOD[:NAME=VALUE]",
        ),
    ] = None,
    data: Annotated[str, typer.Option(help="As for dpoptim train; it must be public.")] = "digits",
    data_dir: DataDirOption = None,
    schema: SchemaOption = None,
    target: TargetOption = None,
    task: TaskOption = None,
    target_bounds: TargetBoundsOption = None,
    data_is_public: Annotated[
        bool, typer.Option("--data-is-public", help="The bundled sets are public.")
    ] = False,
    model: ModelOption = "softmax",
    epsilon: Annotated[float, typer.Option(help="Of every method.")] = 2.0,
    delta: Annotated[float, typer.Option(help="Of every method.")] = 1e-5,
    neighboring: Annotated[
        Relation | None,
        typer.Option(help="Of every method. Default: theirs, where it is one; else zero-out."),
    ] = None,
    epochs: Annotated[
        float | None, typer.Option(help="Passes over the data; default: the recipe's.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Expected batch size; default: the recipe's.", min=1)
    ] = None,
    optimizer: OptimizerOption = "sgd",
    seeds: Annotated[int, typer.Option(help="Runs of each method.", min=1)] = 3,
    noise_seed: NoiseSeedOption = None,
    out: Annotated[
        Path, typer.Option(help="File for the figures (JSON); a page goes beside it.")
    ] = Path("compare.json"),
) -> None:
    """Train by several methods at one guarantee on public data, and once without privacy.

    Example: [bold]dpoptim compare dp-sgd dp-ftrl noisy-gd --data digits --epsilon 2[/]
    """
    with clear_errors():
        from dpoptim.files import write_atomically
        from dpoptim.runs.compare import compare_methods, not_told_apart, to_json
        from dpoptim.runs.compare_page import compare_page
        from dpoptim.runs.options import TrainRequest

        if target_bounds is not None:
            lowest_and_highest(target_bounds)
        request = TrainRequest(
            data=data,
            data_dir=data_dir,
            schema=schema,
            target=target,
            task=task,
            target_bounds=target_bounds,
            data_is_public=data_is_public,
            model=model,
            epsilon=epsilon,
            delta=delta,
            neighboring=neighboring,
            noise_seed=noise_seed,
            epochs=epochs,
            batch_size=batch_size,
            optimizer=optimizer,
        )
        found = compare_methods(
            request, methods or ALL, seeds=seeds, on_done=lambda each: say(f"{each.method}: done")
        )
        write_atomically(out, to_json(found, request))
        page = out.with_suffix(".html")
        write_atomically(page, compare_page(found, f"{model} models on {Path(data).stem}"))
        table = Table(title=f"epsilon {epsilon:g} at delta {delta:g}, {seeds} seeds")
        for heading in ("method", "score", "+- seeds", "+- hold-out", "seconds", "guarantee"):
            table.add_column(heading)
        for each in found:
            error = "" if each.hold_out_error is None else f"{each.hold_out_error:.4f}"
            figures = (f"{each.mean:.4f}", f"{each.spread:.4f}", error, f"{each.seconds:.1f}")
            table.add_row(cell(each.method), *figures, cell(each.guarantee))
        console.print(table)
        if close := not_told_apart(found):
            say(f"the hold-out does not tell from {close[0]}: {', '.join(close[1:])}")
        say(f"score: {found[0].measure} on the public hold-out; saved in {out} and {page}")
