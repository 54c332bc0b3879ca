"""Schemas as TOML: written whole, or drafted from a table's columns for its owner to complete."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType

from dpoptim.data.column_names import reads_as_number, runs_of, shown_names
from dpoptim.data.numbers import day_text
from dpoptim.data.opened_files import UTF8, kind_of
from dpoptim.data.schema import Column, Schema
from dpoptim.data.schema_values import FILL_IN
from dpoptim.data.table_files import column_names, separator_of

BARE = re.compile(r"[A-Za-z0-9_-]+")
IDENTIFIER = re.compile(
    r"(^|[_\s-])(id|uuid|key|index|name|email|phone)$|^(id|unnamed)", re.IGNORECASE
)
IDENTIFIES = "identifies"  # the role of a column with such a name
# words for whoever has records, alone or before such an ending
PEOPLE = re.compile(
    r"^(account|citizen|client|customer|employee|household|member|participant|patient|person|"
    r"policy_?holder|student|subject|user)s?([_\s-]*(id|uuid|key|no|nr|num|number|name))?$",
    re.IGNORECASE,
)
WHOSE = "a person's"  # the role of a column with such a name
BY_NAME = {
    IDENTIFIES: 'kind = "drop"  # by its name, it identifies; person, if it says whose row it is\n',
    WHOSE: f'kind = "{FILL_IN}"  # person, if it says whose row it is; else drop, or another\n',
}
WRITTEN = {  # by whether the comma separates columns
    True: '# thousands = ","  # where numbers are written "1,234"\n',
    False: '# decimal = ","  # where numbers are written 0,5\n'
    '# thousands = "."  # where numbers are written 1.234\n',
}
GAPS = '# missing = ["-", "-999"]  # where these stand for no value, as nothing, NA and null do\n'
HEAD = """\
# What is publicly known about the columns. Nothing here may be read off private data.
#   number:   bounds = [lowest, highest] as possible, not as found; fill = value for gaps;
#             unit = "$" if the file writes $5 or 5 $
#   date:     bounds = [2020-01-01, 2024-12-31], the first and last day; and, if the file does not
#             write days like that, format = "%d.%m.%Y" (31.12.2024) or "%m/%d/%Y" (12/31/2024)
#   category: categories = ["a", "b"], the values that count
#   person:   whose row it is; one person is then what the guarantee protects
#   target:   classes = ["no", "yes"], or bounds = [lowest, highest] of a number to predict
#   drop:     not looked at, as is best for whatever identifies a row
# Columns that differ by a number share an entry, such as "pixel_{0..783}"; one of them may have one
# of its own beside it.
"""


def to_toml(schema: Schema) -> str:
    """Write a schema so that `parse_schema` gives an equal one."""
    comma = f'decimal = "{schema.decimal}"\n' if schema.decimal != "." else ""
    mark = f'thousands = "{schema.thousands}"\n' if schema.thousands else ""
    gaps = f"missing = [{', '.join(map(toml_text, schema.missing))}]\n" if schema.missing else ""
    written = entry_of_encoding(schema.encoding)
    return f'scaling = "{schema.scaling}"\n{written}{comma}{mark}{gaps}' + "".join(
        table_of(column) for column in schema.columns
    )


def entry_of_encoding(encoding: str) -> str:
    return "" if encoding == UTF8 else f"encoding = {toml_text(encoding)}\n"


def table_of(column: Column) -> str:
    lines = [f"\n[columns.{toml_key(column.name)}]", f'kind = "{column.kind}"']
    text = day_text if column.kind == "date" else toml_number
    if column.bounds is not None:
        lines.append(f"bounds = [{text(column.bounds[0])}, {text(column.bounds[1])}]")
    if column.fill is not None:
        lines.append(f"fill = {text(column.fill)}")
    if column.format is not None:
        lines.append(f"format = {toml_text(column.format)}")
    for name in ("unit", "decimal", "thousands"):
        if (text_of_it := getattr(column, name)) is not None:
            lines.append(f"{name} = {toml_text(text_of_it)}")
    for name in ("categories", "classes", "missing"):
        values = getattr(column, name)
        if values or (name == "missing" and values is not None):
            lines.append(f"{name} = [{', '.join(map(toml_text, values))}]")
    if column.any_name:
        lines.append("any_name = true")
    return "\n".join(lines) + "\n"


def toml_key(name: str) -> str:
    return name if BARE.fullmatch(name) else toml_text(name)


def toml_text(text: str) -> str:
    """A TOML basic string: as JSON's, but for DEL and lone surrogates, which no file holds."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def draft(
    path: Path,
    *,
    target: str | None = None,
    person: str | None = None,
    encoding: str = UTF8,
    said: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> str:
    """A schema to complete, from the names and types of columns alone; reads no value.

    Args:
        said: by kind, the names of columns; see `named_kinds`.

    Raises:
        ValueError: the file is damaged, or has no column ``target`` or ``person``, or of a name
            that was said.

    **Guarantee.** Any two tables with the same columns give the same draft.
    """
    columns = column_names(path, encoding)
    names = [name for name, _ in columns]
    check_names(path, names, target, person)
    kinds = named_kinds([name for name in names if name not in (target, person)], said)
    parts = [
        HEAD,
        *maybe_a_record(path, columns),
        'scaling = "bounds"\n',
        entry_of_encoding(encoding),
        GAPS,
    ]
    if kind_of(path) == ".csv":
        parts.append(WRITTEN[separator_of(path, encoding) == ","])
    roles = [
        (name, (found, kinds.get(name) or role_of(name, target, person))) for name, found in columns
    ]
    parts += [
        f"\n[columns.{toml_key(name)}]\n{drafted_entry(found, role)}"
        for name, _, (found, role) in runs_of(roles)
    ]
    return "".join(parts)


def drafted_entry(found: str | None, role: str) -> str:
    """A column's entry, as far as its type, its name and its owner say."""
    open_bounds = f'bounds = ["{FILL_IN}", "{FILL_IN}"]\n'
    if role == "target":
        return f'kind = "target"\nclasses = {values_of(found)}\n'
    if role in BY_NAME:
        return BY_NAME[role]
    if role in ("person", "drop"):
        return f'kind = "{role}"\n'
    if role == "category" or (not role and found in ("text", "boolean")):
        return f'kind = "category"\ncategories = {values_of(found)}\n'
    if role or found:
        kind = role or ("date" if found == "date" else "number")
        return f'kind = "{kind}"\n{open_bounds}'
    return f'kind = "{FILL_IN}"  # number or date, with bounds; category, with categories; drop\n'


def maybe_a_record(path: Path, columns: Sequence[tuple[str, object]]) -> Iterator[str]:
    """A warning where a first line of names seems to be none: names go into the model."""
    if kind_of(path) == ".csv" and any(
        reads_as_number(name) and not name.isdecimal() for name, _ in columns
    ):
        yield (
            "# Is the first line a record? Names of columns are numbers here, and who gets the\n"
            "# model gets them. Where they are values, write names above, and draft this anew.\n"
        )


def role_of(name: str, target: str | None, person: str | None) -> str:
    """Use of a column, by its name; "" where its values say."""
    if name in (target, person):
        return "target" if name == target else "person"
    if person is None and PEOPLE.search(name):
        return WHOSE
    return IDENTIFIES if IDENTIFIER.search(name) else ""


def values_of(found: str | None) -> str:
    """The values of a column of this type: of booleans known, of others to be filled in."""
    return '["False", "True"]' if found == "boolean" else f'["{FILL_IN}"]'


def check_names(path: Path, known: list[str], target: str | None, person: str | None) -> None:
    for option, name in (("--target", target), ("--person-column", person)):
        if name is not None and name not in known:
            raise ValueError(
                f"{path} has no column {name!r}; {option} takes one of {shown_names(known)}."
            )


def named_kinds(names: Sequence[str], said: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Kinds by column.

    Args:
        names: of all columns.
        said: by kind, names and patterns of columns, such as ``"lab_*"``, separated by commas.

    Raises:
        ValueError: a name or pattern that fits no column, or a column with two kinds.

    **Guarantee.** Depends on names alone.
    """
    kinds: dict[str, str] = {}
    for kind, texts in said.items():
        for text in texts:
            for pattern in [text] if text in names else text.split(","):
                found = columns_matching(names, pattern.strip())
                if not found:
                    raise ValueError(
                        f"--{kind} {pattern.strip()!r} fits no column; there are "
                        f"{shown_names(names)}."
                    )
                if twice := [name for name in found if kinds.get(name, kind) != kind]:
                    raise ValueError(
                        f"--{kind} and --{kinds[twice[0]]} both name column {twice[0]!r}; choose "
                        "one."
                    )
                kinds |= dict.fromkeys(found, kind)
    return kinds


def columns_matching(names: Sequence[str], pattern: str) -> list[str]:
    """The column of this name, or those that a pattern fits."""
    return [pattern] if pattern in names else [name for name in names if fnmatchcase(name, pattern)]
