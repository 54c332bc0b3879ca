"""``dpoptim predict``: new records through a trained model."""

from pathlib import Path
from typing import Annotated

import typer

from dpoptim.runs.options import RunArgument
from dpoptim.terminal import clear_errors, say


def predict(
    run: RunArgument,
    data: Annotated[
        Path, typer.Argument(help="New records: a table with the same columns, or a .npz file.")
    ],
    out: Annotated[Path, typer.Option(help="CSV file to write.")] = Path("predictions.csv"),
    id_column: Annotated[
        list[str] | None,
        typer.Option(
            "--id",
            help="A column of the table, such as who a record is of, that is copied beside the "
            "predictions. May be given several times.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file in --out.")
    ] = False,
    data_is_public: Annotated[
        bool,
        typer.Option(
            "--data-is-public", help="The true values are there and public: print the score."
        ),
    ] = False,
) -> None:
    """Predict new records with a trained model.

    Columns are found by name, and encoded as in training.

    Example: [bold]dpoptim predict runs/patients new.csv --out predictions.csv[/]
    """
    with clear_errors():
        from dpoptim.data.encoding import UNMATCHED
        from dpoptim.runs.predict import predict_file

        predicted = predict_file(
            run, data, out, public=data_is_public, keep=id_column or (), overwrite=overwrite
        )
    for name in predicted.unmatched:
        say(f"Note: {UNMATCHED.format(name)}")
    say(f"wrote {predicted.records} predictions to {out}")
    if predicted.score is not None:
        say(f"score {predicted.score:.4f} ({predicted.measure})")
