"""Schemas as TOML: written whole, or drafted from a table's columns for its owner to complete."""

import json
import re
from pathlib import Path

import numpy as np

from dpoptim.data.numbers import as_numbers, as_texts, is_missing
from dpoptim.data.schema import FILL_IN, Column, Schema
from dpoptim.data.table_files import Values, abridged, column_names, read_columns

BARE = re.compile(r"[A-Za-z0-9_-]+")
IDENTIFIER = re.compile(
    r"(^|[_\s-])(id|uuid|key|index|name|email|phone)$|^(id|unnamed)", re.IGNORECASE
)
MOST_CATEGORIES = 30  # of a public column of text, before it is dropped from a draft
HEAD = """\
# What is publicly known about the columns. Nothing here may be read off private data.
#   number:   bounds = [lowest, highest] as possible, not as found; fill = value for gaps
#   category: categories = ["a", "b"], the values that count
#   person:   whose row it is; one person is then what the guarantee protects
#   target:   classes = ["no", "yes"], or bounds = [lowest, highest] of a number to predict
#   drop:     not looked at, as is best for whatever identifies a row
"""


def to_toml(schema: Schema) -> str:
    """Write a schema so that `parse_schema` gives an equal one."""
    return f'scaling = "{schema.scaling}"\n' + "".join(
        table_of(column) for column in schema.columns
    )


def table_of(column: Column) -> str:
    lines = [f"\n[columns.{key(column.name)}]", f'kind = "{column.kind}"']
    if column.bounds is not None:
        lines.append(f"bounds = [{number(column.bounds[0])}, {number(column.bounds[1])}]")
    if column.fill is not None:
        lines.append(f"fill = {number(column.fill)}")
    if column.unit is not None:
        lines.append(f"unit = {quoted(column.unit)}")
    for name in ("categories", "classes"):
        if values := getattr(column, name):
            lines.append(f"{name} = [{', '.join(map(quoted, values))}]")
    return "\n".join(lines) + "\n"


def key(name: str) -> str:
    return name if BARE.fullmatch(name) else quoted(name)


def quoted(text: str) -> str:
    """A TOML basic string: as JSON's, but for DEL and lone surrogates, which no file holds."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def draft(path: Path, *, target: str | None = None, person: str | None = None) -> str:
    """A schema to complete, from the names and types of columns alone; reads no value.

    Raises:
        ValueError: the file is damaged, or has no column ``target`` or ``person``.

    **Guarantee.** Any two tables with the same columns give the same draft.
    """
    columns = column_names(path)
    check_names(path, [name for name, _ in columns], target, person)
    parts = [HEAD, 'scaling = "bounds"\n']
    for name, found in columns:
        head = f"\n[columns.{key(name)}]\n"
        if name == target:
            parts.append(f'{head}kind = "target"\nclasses = {values_of(found)}\n')
        elif name == person:
            parts.append(f'{head}kind = "person"\n')
        elif IDENTIFIER.search(name):
            parts.append(f'{head}kind = "drop"  # by its name, it identifies\n')
        elif found in ("text", "boolean"):
            parts.append(f'{head}kind = "category"\ncategories = {values_of(found)}\n')
        else:
            guess = "" if found == "number" else "  # or category"
            parts.append(f'{head}kind = "number"{guess}\nbounds = ["{FILL_IN}", "{FILL_IN}"]\n')
    return "".join(parts)


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
    path: Path, *, target: str, person: str | None = None, regression: bool = False
) -> Schema:
    """Read a schema off a table declared public: bounds, categories and classes as found."""
    names = [name for name, _ in column_names(path)]
    check_names(path, names, target, person)
    parts = whole_columns(path, names)
    return Schema(
        tuple(
            found_target(path, name, values, regression=regression)
            if name == target
            else Column(name, "person")
            if name == person
            else found_column(name, values)
            for name, values in parts.items()
        )
    )


def public_target(path: Path, target: str, *, regression: bool) -> Column:
    """Read the target's classes or bounds off a table that its owner declares public."""
    return found_target(path, target, whole_columns(path, [target])[target], regression=regression)


def whole_columns(path: Path, names: list[str]) -> dict[str, list[Values]]:
    parts: dict[str, list[Values]] = {name: [] for name in names}
    for chunk in read_columns(path, names):
        for name, values in chunk.columns.items():
            parts[name].append(values)
    return parts


def found_target(path: Path, name: str, parts: list[Values], *, regression: bool) -> Column:
    if not parts:
        raise ValueError(f"{path} has no records.")
    if not regression:
        texts = {text for values in parts for text in as_texts(values)}
        if len(texts) < 2:
            raise ValueError(
                f"{path}: the label takes fewer than two values; there is nothing to classify."
            )
        return Column(name, "target", classes=tuple(sorted(texts, key=natural_order)))
    bounds = found_bounds(parts)
    if bounds is None:
        raise ValueError(
            f"{path}: the target {name!r} holds text or a single number; regression predicts "
            "numbers."
        )
    return Column(name, "target", bounds=bounds)


def found_column(name: str, parts: list[Values]) -> Column:
    if IDENTIFIER.search(name):
        return Column(name, "drop")
    bounds = found_bounds(parts)
    if bounds is not None:
        known = np.concatenate([as_numbers(values)[0] for values in parts])
        gaps = np.isnan(known)
        return Column(
            name, "number", bounds, fill=float(np.median(known[~gaps])) if gaps.any() else None
        )
    texts = {text for values in parts for text in as_texts(values) if not is_missing(text)}
    few = 2 <= len(texts) <= MOST_CATEGORIES
    return (
        Column(name, "category", categories=tuple(sorted(texts))) if few else Column(name, "drop")
    )


def found_bounds(parts: list[Values]) -> tuple[float, float] | None:
    """Lowest and highest number; None for text, and where there are no two numbers."""
    pieces = [as_numbers(values) for values in parts]
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
