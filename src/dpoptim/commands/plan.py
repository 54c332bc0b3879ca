"""``dpoptim plan``: batch size, epochs, method and noise, before any record is touched."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from dpoptim.privacy_unit import RECORD, Unit
from dpoptim.registry import method_names
from dpoptim.runs.options import (
    ROWS_OF_PERSON,
    JsonOption,
    ModelName,
    ModelOption,
    Relation,
    SchemaOption,
)
from dpoptim.terminal import cell, clear_errors, console, say

if TYPE_CHECKING:
    from dpoptim.planning import Plans, StepCost, Target

METHOD_WIDTH = 23  # of the longest word in a method's name


def plan(
    n: Annotated[
        int,
        typer.Option(
            "--n",
            help="Number of records, or of persons where the schema names them; public.",
            min=1,
        ),
    ],
    epsilon: Annotated[
        float | None, typer.Option(help="Target: the budget's epsilon; give --delta too.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Failure probability; default: below 1/(10 n).")
    ] = None,
    attacker_right: Annotated[
        float | None,
        typer.Option(help="Target instead: the best guess is right at most so often, above 0.5."),
    ] = None,
    attacker_tpr: Annotated[
        float | None,
        typer.Option(help="Target instead: at most this share of records is found ..."),
    ] = None,
    attacker_fpr: Annotated[float | None, typer.Option(help="... at these false alarms.")] = None,
    schema: SchemaOption = None,
    features: Annotated[
        int | None, typer.Option(help="Features of a record, without a schema.", min=1)
    ] = None,
    outputs: Annotated[
        int, typer.Option(help="Classes, without a schema; 1 to predict a number.", min=1)
    ] = 2,
    model: ModelOption = "softmax",
    parameters: Annotated[
        int | None, typer.Option(help="Trained parameters, of any other model.", min=1)
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Only this one of {', '.join(method_names())}; repeat for several. "
            "Default: all that train any model."
        ),
    ] = None,
    neighboring: Annotated[
        Relation | None,
        typer.Option(help="Default: add-or-remove-one where a method can, else zero-out."),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="If it is decided already.", min=1)] = None,
    epochs: Annotated[float | None, typer.Option(help="If they are decided already.")] = None,
    max_minutes: Annotated[
        float | None, typer.Option(help="Time that the training may take.")
    ] = None,
    records_per_second: Annotated[
        float | None,
        typer.Option(help="Speed of the machine that will train; default: measured here."),
    ] = None,
    out: Annotated[Path, typer.Option(help="File for the page (HTML).")] = Path("plan.html"),
    as_json: JsonOption = False,
) -> None:
    """Choose batch size, epochs, method and noise for a budget, from public numbers alone.

    Example: [bold]dpoptim plan --n 20000 --features 30 --epsilon 1 --delta 1e-6[/]

    By what an attacker may reach: [bold]dpoptim plan --n 20000 --features 30 --attacker-right
    0.6[/]
    """
    with clear_errors():
        from dpoptim.files import write_atomically
        from dpoptim.planning import Question, choose
        from dpoptim.planning.choice import PREDICTED
        from dpoptim.runs.plan_page import command, plan_page, to_json

        width, count, unit = (
            (features, outputs, RECORD) if schema is None else size_by_schema(schema)
        )
        target = target_of(epsilon, delta, attacker_right, attacker_tpr, attacker_fpr, n)
        trained, cost = size_and_cost(model, width, count, parameters, records_per_second)
        if max_minutes is not None and not max_minutes > 0:
            raise ValueError("--max-minutes must be above 0.")
        found = choose(
            Question(
                n=n,
                parameters=trained,
                target=target,
                neighboring=neighboring,
                methods=method,
                batch_size=batch_size,
                epochs=epochs,
                cost=cost,
                max_seconds=None if max_minutes is None else 60 * max_minutes,
                unit=unit,
                schema=None if schema is None else str(schema),
            ),
            delta=delta,
        )
        name = f"{trained:,} parameters" if parameters is not None else f"a {model} model"
        write_atomically(out, plan_page(found, f"{name} on {n:,} {unit.name}s"))
        if as_json:
            print(json.dumps(to_json(found), indent=2, allow_nan=False))
            return
        title = f"{target}: {name}, n = {n:,} {unit.name}s; {len(found.settings)} settings"
        console.print(table_of(found, title))
        say(f"ranks       {PREDICTED.removeprefix('Ranks are ')}")
        say(f"guarantee   {found.plan.guarantee}")
        for warning in found.warnings:
            say(f"Warning: {warning}", style="yellow")
        say(f"next        {command(found)}")
        say(f"page        {out}")


def table_of(found: "Plans", title: str) -> Table:
    """The settings that are shown, the chosen one in bold."""
    from dpoptim.runs.plan_page import HEADINGS, row, shown

    table = Table(title=title, box=SIMPLE_HEAD, padding=0, show_edge=False)
    for heading in HEADINGS:
        if heading == "method":
            table.add_column(heading, min_width=METHOD_WIDTH)
        else:
            wide = 7 if " / " in heading else None
            table.add_column(heading, justify="right", max_width=wide, no_wrap=wide is None)
    for each in shown(found):
        chosen = (each.name, each.run) == (found.chosen.name, found.chosen.run)
        cells = map(cell, row(found, found.chosen if chosen else each))
        table.add_row(*cells, style="bold" if chosen else None)
    return table


def target_of(
    epsilon: float | None,
    delta: float | None,
    right: float | None,
    tpr: float | None,
    fpr: float | None,
    n: int,
) -> "Target":
    """The one target that was given."""
    from dpoptim.accounting.attacker import FoundAtMost, RightAtMost
    from dpoptim.accounting.public_numbers import usual_delta
    from dpoptim.planning import EpsilonAtMost

    if (tpr is None) != (fpr is None):
        raise ValueError("--attacker-tpr and --attacker-fpr belong together; give both.")
    if sum(given is not None for given in (epsilon, right, tpr)) != 1:
        raise ValueError(
            "give one target: --epsilon, or --attacker-right, or --attacker-tpr with "
            "--attacker-fpr."
        )
    if right is not None:
        return RightAtMost(right)
    if tpr is not None and fpr is not None:
        return FoundAtMost(tpr, fpr)
    assert epsilon is not None
    return EpsilonAtMost(epsilon, usual_delta(n) if delta is None else delta)


def size_by_schema(path: Path) -> tuple[int, int, Unit]:
    """Features and outputs that a schema makes, and whom it protects."""
    from dpoptim.data import read_schema

    schema = read_schema(path)
    target = schema.target
    if target is None:
        raise ValueError(f"{path} describes no target; give one column the kind target.")
    unit = RECORD if schema.person is None else Unit("person", ROWS_OF_PERSON)
    return schema.width, len(target.classes) or 1, unit


def size_and_cost(
    model: ModelName,
    features: int | None,
    outputs: int,
    parameters: int | None,
    records_per_second: float | None,
) -> tuple[int, "StepCost | None"]:
    """Trained parameters, and what a step costs: as told, or measured where the model is known."""
    from dpoptim.planning import StepCost
    from dpoptim.runs.models import build_model
    from dpoptim.runs.step_cost import measured_cost

    if (parameters is None) == (features is None):
        raise ValueError(
            "give the model's size once: --features (or --schema) for --model, or --parameters."
        )
    if records_per_second is not None and not records_per_second > 0:
        raise ValueError("--records-per-second must be above 0.")
    told = None if records_per_second is None else StepCost(0.0, 1 / records_per_second)
    if parameters is not None:
        return parameters, told
    assert features is not None
    if model == "cnn":
        raise ValueError("--model cnn is for images; give its --parameters instead.")
    network = build_model(model, (features,), outputs)
    trained = sum(weights.numel() for weights in network.parameters())
    return trained, told or measured_cost(model, (features,), outputs)
