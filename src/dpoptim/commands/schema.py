"""``dpoptim schema new`` and ``dpoptim schema check``: the public description of a table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from dpoptim.files import write_atomically
from dpoptim.terminal import clear_errors, say

KindOption = typer.Option(
    metavar="NAME,...",
    help="Columns of this kind; lab_* stands for all that begin so; repeat for several.",
)
schema_commands = typer.Typer(help="The public description of a table.", no_args_is_help=True)


@schema_commands.command("new")
def schema_new(
    data: Annotated[Path, typer.Argument(help="A .csv, .csv.gz, .parquet or .arrow file.")],
    target: Annotated[str | None, typer.Option(help="The column to predict.")] = None,
    person_column: Annotated[
        str | None, typer.Option(help="The column that says whose record each is.")
    ] = None,
    data_is_public: Annotated[
        bool,
        typer.Option(
            "--data-is-public", help="Fill in bounds, categories and classes from the values."
        ),
    ] = False,
    regression: Annotated[
        bool,
        typer.Option("--regression", help="Of public data: the target is a number to predict."),
    ] = False,
    number: Annotated[list[str] | None, KindOption] = None,
    category: Annotated[list[str] | None, KindOption] = None,
    date: Annotated[list[str] | None, KindOption] = None,
    drop: Annotated[list[str] | None, KindOption] = None,
    encoding: Annotated[
        str,
        typer.Option(
            help="Of a file of text, such as latin-1 or cp1252; a byte-order mark is read by "
            "itself."
        ),
    ] = "utf-8",
    out: Annotated[
        Path | None, typer.Option(help="Where to write; default DATA.schema.toml beside it.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing file.")
    ] = False,
) -> None:
    """Draft a schema of a table from the names and types of its columns.

    No value is read. You fill in the rest.

    Example: [bold]dpoptim schema new patients.csv --target outcome --number age,bmi --category
    smoker[/]
    """
    with clear_errors():
        file, open_ends = new_schema(
            data,
            target=target,
            person=person_column,
            public=data_is_public,
            regression=regression,
            encoding=encoding,
            out=out,
            overwrite=overwrite,
            said={
                "number": number or (),
                "category": category or (),
                "date": date or (),
                "drop": drop or (),
            },
        )
    say(f"wrote {file}")
    if open_ends:
        say(f"Fill in what is marked FILL-IN ({open_ends} columns).")


def new_schema(
    data: Path,
    *,
    target: str | None,
    person: str | None,
    public: bool,
    regression: bool,
    encoding: str,
    out: Path | None,
    overwrite: bool,
    said: Mapping[str, Sequence[str]],
) -> tuple[Path, int]:
    """Write a schema for ``data``; returns its file, and how many columns are to be filled in.

    Args:
        said: by kind, the columns that are said to be of it; see `named_kinds`.

    Raises:
        FileNotFoundError, ValueError: no table, no such column, or the file to write is there
            already.

    **Guarantee.** Unless the data is declared public, the result depends on the names and types of
    the columns alone.
    """
    from dpoptim.data.opened_files import known_encoding
    from dpoptim.data.public_schemas import from_public_table
    from dpoptim.data.schema_files import draft, to_toml
    from dpoptim.data.schema_values import FILL_IN
    from dpoptim.data.table_files import TABLE_ENDINGS, is_table

    if not data.is_file():
        raise FileNotFoundError(
            f"{data} does not exist; give a table ({', '.join(TABLE_ENDINGS)})."
        )
    if not is_table(data):
        raise ValueError(
            f"{data} is no table with named columns; give one of {', '.join(TABLE_ENDINGS)}."
        )
    file = data.with_name(f"{data.name.split('.')[0]}.schema.toml") if out is None else out
    if file.exists() and not overwrite:
        raise ValueError(f"{file} exists; name another file with --out, or allow --overwrite.")
    known_encoding(encoding, "--encoding")
    if public:
        if any(said.values()):
            raise ValueError(
                f"--{next(filter(said.get, said))} is for a draft; of public data kinds are read "
                "off the values. Fix: leave it out, or --data-is-public."
            )
        if target is None:
            raise ValueError("--target is missing: name the column to predict.")
        found = from_public_table(
            data, target=target, person=person, regression=regression, encoding=encoding
        )
        text = to_toml(found)
    else:
        text = draft(data, target=target, person=person, encoding=encoding, said=said)
    write_atomically(file, text)
    return file, sum(FILL_IN in table for table in text.split("[columns.")[1:])


@schema_commands.command("check")
def schema_check(
    schema: Annotated[Path, typer.Argument(help="A schema in TOML.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Also read this table by it, to the end: what is then said is read off its "
            "records, for their owner alone."
        ),
    ] = None,
) -> None:
    """Say whether a schema is complete, and what features it makes.

    With --data also whether a table can be read by it, and which columns hold none of their
    categories, as where a file writes them otherwise. That is private.

    Example: [bold]dpoptim schema check patients.schema.toml --data patients.csv[/]
    """
    with clear_errors():
        from dpoptim.data import read_schema
        from dpoptim.data.encoding import UNMATCHED, unmatched_columns
        from dpoptim.data.table_files import is_table

        found, unmatched = read_schema(schema), None
        if data is not None:
            if not data.is_file() or not is_table(data):
                raise FileNotFoundError(f"{data} is no table; --data takes the records' file.")
            unmatched = unmatched_columns(data, found)
    target = "none" if found.target is None else found.target.name
    text = (
        f"{len(found.features)} columns make {found.width} features; target {target}; person "
        f"{found.person or 'none'}"
    )
    say(text)
    if unmatched is not None:
        say("What follows is read off the records: it is private, and not for release.")
        for name in unmatched:
            say(f"Note: {UNMATCHED.format(name)}")
        say(f"{data} can be read by it" + ("" if unmatched else ", and no column is unmatched"))
