"""Schemas as TOML: written whole, or drafted from a table's columns for its owner to complete."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from dpoptim.data.column_names import abridged, reads_as_number
from dpoptim.data.column_ranges import runs_of
from dpoptim.data.damaged_files import kind_of
from dpoptim.data.dates import day_text
from dpoptim.data.draft_kinds import named_kinds
from dpoptim.data.inferred_formats import DECIMALS, Way, found_days, ways_of_writing
from dpoptim.data.numbers import as_numbers, as_texts
from dpoptim.data.schema import Column, Decimal, Schema
from dpoptim.data.schema_values import FILL_IN
from dpoptim.data.table_files import Values, column_names, read_columns, separator_of
from dpoptim.data.text_files import UTF8
from dpoptim.missing_values import is_missing

BARE = re.compile(r"[A-Za-z0-9_-]+")
IDENTIFIER = re.compile(
    r"(^|[_\s-])(id|uuid|key|index|name|email|phone)$|^(id|unnamed)", re.IGNORECASE
)
IDENTIFIES = "identifies"  # the role of a column with such a name
MOST_CATEGORIES = 30  # of a public column of text, before it is dropped from a draft
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
    gaps = f"missing = [{', '.join(map(quoted, schema.missing))}]\n" if schema.missing else ""
    written = entry_of_encoding(schema.encoding)
    return f'scaling = "{schema.scaling}"\n{written}{comma}{mark}{gaps}' + "".join(
        table_of(column) for column in schema.columns
    )


def entry_of_encoding(encoding: str) -> str:
    return "" if encoding == UTF8 else f"encoding = {quoted(encoding)}\n"


def table_of(column: Column) -> str:
    lines = [f"\n[columns.{key(column.name)}]", f'kind = "{column.kind}"']
    text = day_text if column.kind == "date" else number
    if column.bounds is not None:
        lines.append(f"bounds = [{text(column.bounds[0])}, {text(column.bounds[1])}]")
    if column.fill is not None:
        lines.append(f"fill = {text(column.fill)}")
    if column.format is not None:
        lines.append(f"format = {quoted(column.format)}")
    for name in ("unit", "decimal", "thousands"):
        if (text_of_it := getattr(column, name)) is not None:
            lines.append(f"{name} = {quoted(text_of_it)}")
    for name in ("categories", "classes", "missing"):
        values = getattr(column, name)
        if values or (name == "missing" and values is not None):
            lines.append(f"{name} = [{', '.join(map(quoted, values))}]")
    if column.any_name:
        lines.append("any_name = true")
    return "\n".join(lines) + "\n"


def key(name: str) -> str:
    return name if BARE.fullmatch(name) else quoted(name)


def quoted(text: str) -> str:
    """A TOML basic string: as JSON's, but for DEL and lone surrogates, which no file holds."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def number(value: float) -> str:
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
        f"\n[columns.{key(name)}]\n{drafted(found, role)}"
        for name, _, (found, role) in runs_of(roles)
    ]
    return "".join(parts)


def drafted(found: str | None, role: str) -> str:
    """A column's entry, as far as its type, its name and its owner say."""
    open_bounds = f'bounds = ["{FILL_IN}", "{FILL_IN}"]\n'
    if role == "target":
        return f'kind = "target"\nclasses = {values_of(found)}\n'
    if role == IDENTIFIES:
        return 'kind = "drop"  # by its name, it identifies\n'
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
    return IDENTIFIES if IDENTIFIER.search(name) else ""


def values_of(found: str | None) -> str:
    """The values of a column of this type: of booleans known, of others to be filled in."""
    return '["False", "True"]' if found == "boolean" else f'["{FILL_IN}"]'


def check_names(path: Path, known: list[str], target: str | None, person: str | None) -> None:
    for option, name in (("--target", target), ("--person-column", person)):
        if name is not None and name not in known:
            raise ValueError(
                f"{path} has no column {name!r}; {option} takes one of {abridged(known)}."
            )


def from_public_table(
    path: Path,
    *,
    target: str,
    person: str | None = None,
    regression: bool = False,
    encoding: str = UTF8,
) -> Schema:
    """Read a schema off a table declared public: bounds, categories and classes as found."""
    names = [name for name, _ in column_names(path, encoding)]
    check_names(path, names, target, person)
    parts = whole_columns(path, names, encoding)
    decimal = found_decimal(path, parts, encoding)
    return Schema(
        tuple(
            found_target(path, name, values, regression=regression, decimal=decimal)
            if name == target
            else Column(name, "person")
            if name == person
            else found_column(name, values, decimal)
            for name, values in parts.items()
        ),
        decimal=decimal,
        encoding=encoding,
    )


def found_decimal(path: Path, parts: dict[str, list[Values]], encoding: str) -> Decimal:
    """The mark with which more columns of a public table are numbers that no other way has.

    Where as many are, as in a table with 1,234 alone, it is a comma in a file that has semicolons
    between columns, as programs write it where the comma is taken; else a point.
    """
    points, commas = ([is_number(values, mark) for values in parts.values()] for mark in DECIMALS)
    more = sum(commas) - sum(points)
    if more == 0 and kind_of(path) == ".csv" and separator_of(path, encoding) == ";":
        plain = [
            sum(found_bounds(values, (mark, "", "")) is not None for values in parts.values())
            for mark in DECIMALS
        ]
        more = plain[1] - plain[0]
    return "," if more > 0 else "."


def is_number(parts: list[Values], decimal: Decimal) -> bool:
    """Whether a column's numbers may be written with this mark, whatever their thousands are."""
    ways = (way for way in ways_of_writing(parts, decimal) if way[0] == decimal)
    return any(found_bounds(parts, way) is not None for way in ways)


def public_target(path: Path, target: str, *, regression: bool, encoding: str) -> Column:
    """Read the target's classes or bounds off a table that its owner declares public."""
    parts = whole_columns(path, [target], encoding)[target]
    return found_target(path, target, parts, regression=regression)


def whole_columns(path: Path, names: list[str], encoding: str) -> dict[str, list[Values]]:
    parts: dict[str, list[Values]] = {name: [] for name in names}
    for chunk in read_columns(path, names, encoding):
        for name, values in chunk.columns.items():
            parts[name].append(values)
    return parts


def found_target(
    path: Path, name: str, parts: list[Values], *, regression: bool, decimal: Decimal = "."
) -> Column:
    if not parts:
        raise ValueError(f"{path} has no records.")
    if not regression:
        texts = {text for values in parts for text in as_texts(values)}
        if len(texts) < 2:
            raise ValueError(
                f"{path}: the label takes fewer than two values; there is nothing to classify."
            )
        return Column(name, "target", classes=tuple(sorted(texts, key=natural_order)))
    number = found_number(name, parts, decimal)
    if number is None:
        raise ValueError(
            f"{path}: the target {name!r} holds text or a single number; regression predicts "
            "numbers. Fix: draft without --data-is-public, and say in the schema how its numbers "
            "are written."
        )
    return replace(number, kind="target", fill=None)


def found_number(name: str, parts: list[Values], decimal: Decimal) -> Column | None:
    """A column of numbers, however they are written; None of any other.

    Args:
        decimal: the table's; what differs from it is said in the column.
    """
    for way in ways_of_writing(parts, decimal):
        bounds = found_bounds(parts, way)
        if bounds is None:
            continue
        mark, thousands, unit = way
        known = np.concatenate([as_numbers(values, *way)[0] for values in parts])
        gaps = np.isnan(known)
        return Column(
            name,
            "number",
            bounds,
            fill=float(np.median(known[~gaps])) if gaps.any() else None,
            unit=unit or None,
            decimal=None if mark == decimal else mark,
            thousands=thousands or None,
        )
    return None


def found_column(name: str, parts: list[Values], decimal: Decimal) -> Column:
    if IDENTIFIER.search(name):
        return Column(name, "drop")
    number = found_number(name, parts, decimal)
    if number is not None:
        return number
    dates = found_dates(name, parts)
    if dates is not None:
        return dates
    texts = {text for values in parts for text in as_texts(values) if not is_missing(text)}
    few = 2 <= len(texts) <= MOST_CATEGORIES
    return (
        Column(name, "category", categories=tuple(sorted(texts))) if few else Column(name, "drop")
    )


def found_dates(name: str, parts: list[Values]) -> Column | None:
    """A column of dates on two days or more, in one format; None for any other."""
    found = found_days(parts)
    if found is None:
        return None
    days, format = found
    gaps = np.isnan(days)
    if gaps.all() or (low := float(np.nanmin(days))) == (high := float(np.nanmax(days))):
        return None
    fill = float(np.floor(np.median(days[~gaps]))) if gaps.any() else None
    return Column(name, "date", (low, high + 1), fill=fill, format=format)


def found_bounds(parts: list[Values], way: Way) -> tuple[float, float] | None:
    """Lowest and highest number; None for text, and where there are no two numbers."""
    pieces = [as_numbers(values, *way) for values in parts]
    if any(bad is not None for _, bad in pieces):
        return None
    numbers = np.concatenate([each for each, _ in pieces])
    known = numbers[np.isfinite(numbers)]
    if not len(known) or known.min() == known.max():
        return None
    return float(known.min()), float(known.max())


def natural_order(label: str) -> tuple[int, float, str]:
    """Order numbers by value, before text."""
    try:
        return (0, float(label), label)
    except ValueError:
        return (1, 0.0, label)
