"""``dpoptim tune``: which settings? On public proxies for free, or privately, and charged."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dpoptim.runs.options import (
    ROWS_OF_PERSON,
    BudgetOption,
    ClassesOption,
    ClassWeightOption,
    DatasetOption,
    LedgerOption,
    NoiseSeedOption,
    PersonColumnOption,
    RecordsPerPersonOption,
    Relation,
    SchemaOption,
    TargetBoundsOption,
    TargetOption,
)
from dpoptim.terminal import cell, clear_errors, console, say

FIRST = (
    "Note: a private search is charged, and leaves less for the model. Where there is public data "
    "like this, --public-data ranks settings for free."
)


def tune(
    epsilon: Annotated[float, typer.Option(help="Of the private run, or of the whole search.")],
    delta: Annotated[float, typer.Option(help="Failure probability, at most 1/(10 n).")],
    public_data: Annotated[
        Path | None,
        typer.Option(help="Public records like the private ones: rank settings on them, free."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Private records: search on them, which is charged.")
    ] = None,
    schema: SchemaOption = None,
    target: TargetOption = None,
    classes: ClassesOption = None,
    target_bounds: TargetBoundsOption = None,
    class_weight: ClassWeightOption = None,
    person_column: PersonColumnOption = None,
    records_per_person: RecordsPerPersonOption = ROWS_OF_PERSON,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="NAME=VALUE,...",
            help="Settings of the linear estimators to try, such as clip_norm=0.1,0.3; repeat.",
        ),
    ] = None,
    n: Annotated[
        int | None,
        typer.Option(
            "--n", help="With --public-data: number of private records (of persons).", min=1
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="With --public-data: runs of each.", min=1)] = 3,
    mean_trials: Annotated[
        float, typer.Option(help="Expected number of private trials, above 1.")
    ] = 10.0,
    holdout: Annotated[float, typer.Option(help="Share of private records that score.")] = 0.2,
    neighboring: Annotated[
        Relation | None, typer.Option(help="zero-out (default) or replace-one.")
    ] = None,
    ledger: LedgerOption = None,
    dataset: DatasetOption = None,
    budget: BudgetOption = None,
    noise_seed: NoiseSeedOption = None,
    out: Annotated[Path, typer.Option(help="Folder for the private search's result.")] = Path(
        "runs/tuned"
    ),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the result in --out.")
    ] = False,
) -> None:
    """Choose settings of a linear model, on public proxies or by a private search.

    Proxies are free; a search is charged as one event, losers included.

    Example: [bold]dpoptim tune --public-data old.csv --schema s.toml --n 5000 --epsilon 1 --delta
    1e-6[/]

    Privately: [bold]dpoptim tune --data patients.csv --schema s.toml --epsilon 1 --delta 1e-6
    --ledger patients.sqlite[/]
    """
    with clear_errors():
        from dpoptim.runs.options import TrainRequest
        from dpoptim.runs.tune import tune_privately, tune_publicly

        if (public_data is None) == (data is None):
            raise ValueError("give one of --public-data (free) and --data (private, charged).")
        request = TrainRequest(
            data=str(public_data or data),
            data_is_public=public_data is not None,
            schema=schema,
            target=target,
            classes=classes,
            target_bounds=target_bounds,
            class_weight=class_weight,
            person_column=person_column,
            records_per_person=records_per_person,
            neighboring=neighboring,
            epsilon=epsilon,
            delta=delta,
            ledger=ledger,
            dataset=dataset,
            budget=budget,
            noise_seed=noise_seed,
            overwrite=overwrite,
        )
        if public_data is not None:
            if ledger is not None:
                raise ValueError("--ledger is not charged by tuning on public data; leave it out.")
            found = tune_publicly(request, grid, n=n, seeds=seeds)
            table = Table(title="on public data, best first")
            for heading in ("settings", "score"):
                table.add_column(heading)
            for tried in found:
                table.add_row(cell(settings_in_words(tried.settings)), f"{tried.mean:.4f}")
            console.print(table)
            say(f"best        {settings_in_words(found[0].settings)}; nothing was charged")
            return
        say(FIRST, style="yellow")
        tuned = tune_privately(request, grid, mean_trials=mean_trials, holdout=holdout, out=out)
        say(f"best        {settings_in_words(tuned.settings)}")
        say(f"score       {tuned.score:.3f} ({tuned.measure}, noisy, best of several)")
        say(f"guarantee   {tuned.guarantee}")
        say(f"results     {tuned.folder}/: model.pt, tune.json")


def settings_in_words(settings: Mapping[str, Any]) -> str:
    """The settings as --grid takes them."""
    return ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in settings.items()
    )
