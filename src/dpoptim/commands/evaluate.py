"""``dpoptim evaluate``: the score of a trained model on private records."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from dpoptim.runs.options import (
    BudgetOption,
    DatasetOption,
    JsonOption,
    LedgerOption,
    NoiseSeedOption,
    Relation,
    RunArgument,
)
from dpoptim.terminal import clear_errors, say


def evaluate(
    run: RunArgument,
    data: Annotated[
        Path, typer.Argument(help="Private hold-out records: a table with the target's column.")
    ],
    epsilon: Annotated[float, typer.Option(help="What the evaluation may cost: epsilon > 0.")],
    delta: Annotated[float, typer.Option(help="Failure probability, at most 1/(10 n).")],
    ledger: LedgerOption = None,
    budget: BudgetOption = None,
    dataset: DatasetOption = None,
    records: Annotated[
        Literal["hold-out", "training"] | None,
        typer.Option(
            help="What they were to the model; asked for where the ledger or the file's name is "
            "the training's."
        ),
    ] = None,
    neighboring: Annotated[
        Relation | None,
        typer.Option(
            help="Neighbouring relation; default: the ledger's; else add-or-remove-one with --n, "
            "zero-out without."
        ),
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

    Figures are noisy, with confidence intervals, and charged before they are drawn. They are kept
    in the run's evaluations.json, and shown by its report.html, with those before.

    Example: [bold]dpoptim evaluate runs/patients holdout.csv --epsilon 0.5 --delta 1e-6 --ledger
    holdout.sqlite --budget 2,1e-6[/]
    """
    with clear_errors():
        from dpoptim.runs.evaluate import evaluate_run
        from dpoptim.runs.evaluation_section import REPORT, keep_evaluation
        from dpoptim.runs.evaluations import NAME, in_words, read_evaluations
        from dpoptim.runs.saved_model import load_model, model_file

        found = evaluate_run(
            run,
            data,
            epsilon=epsilon,
            delta=delta,
            ledger=ledger,
            budget=budget,
            dataset=dataset,
            records=records,
            neighboring=neighboring,
            n=n,
            confidence=confidence,
            noise_seed=noise_seed,
        )
        folder = model_file(run).parent
        try:  # first: nobody is to see scores that are written down nowhere
            drawn = keep_evaluation(folder, found, load_model(run).class_names)
        finally:  # they were paid for
            if as_json:
                print(json.dumps(found.to_json(), indent=2, allow_nan=False))
            else:
                say(found.scores)
        if as_json:
            return
        say(f"kept      {folder / NAME}")
        for each in read_evaluations(folder)["together"]:
            say(f"          {in_words(each)}")
        if drawn:
            say(f"report    {folder / REPORT}")
