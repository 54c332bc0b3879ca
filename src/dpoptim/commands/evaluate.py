"""``dpoptim evaluate``: the score of a trained model on private records."""

import json
from pathlib import Path
from typing import Annotated

import typer

from dpoptim.runs.options import JsonOption, LedgerOption, NoiseSeedOption, Relation, RunArgument
from dpoptim.terminal import clear_errors, say


def evaluate(
    run: RunArgument,
    data: Annotated[
        Path, typer.Argument(help="Private hold-out records: a table with the target's column.")
    ],
    epsilon: Annotated[float, typer.Option(help="What the evaluation may cost: epsilon > 0.")],
    delta: Annotated[float, typer.Option(help="Failure probability, well below 1/n.")],
    ledger: LedgerOption = None,
    neighboring: Annotated[
        Relation | None,
        typer.Option(help="Neighbouring relation; default: the ledger's, else zero-out."),
    ] = None,
    n: Annotated[
        int | None,
        typer.Option(
            "--n",
            help="Public number of records (of persons); needed for add-or-remove-one.",
            min=1,
        ),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Of the intervals.")] = 0.95,
    noise_seed: NoiseSeedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score a trained model on private records.

    Figures are noisy, with confidence intervals, and charged before they are drawn. They are drawn
    into the run's report.html as well.

    Example: [bold]dpoptim evaluate runs/patients holdout.csv --epsilon 0.5 --delta 1e-6 --ledger
    holdout.sqlite[/]
    """
    with clear_errors():
        from dpoptim.runs.evaluate import evaluate_run, to_json
        from dpoptim.runs.evaluation_section import add_to_report
        from dpoptim.runs.saved_model import load_model

        scores = evaluate_run(
            run,
            data,
            epsilon=epsilon,
            delta=delta,
            ledger=ledger,
            neighboring=neighboring,
            n=n,
            confidence=confidence,
            noise_seed=noise_seed,
        )
        if as_json:
            print(json.dumps(to_json(scores), indent=2, allow_nan=False))
        else:
            say(scores)
        page = run / "report.html"
        if add_to_report(page, scores, load_model(run).class_names) and not as_json:
            say(f"report    {page}")
