"""``dpoptim schema new``: a draft for the owner of a table to complete."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from dpoptim.data.opened_files import known_encoding
from dpoptim.data.public_schemas import from_public_table
from dpoptim.data.schema_files import draft, to_toml
from dpoptim.data.schema_values import FILL_IN
from dpoptim.data.table_files import TABLE_ENDINGS, is_table
from dpoptim.files import write_atomically


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
