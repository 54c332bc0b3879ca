"""Schemas of tables that are declared public, read off their values by trying."""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpoptim.data.numbers import MARKS, as_days, as_numbers, as_texts
from dpoptim.data.opened_files import UTF8, kind_of
from dpoptim.data.schema import Column, Decimal, Schema, Thousands
from dpoptim.data.schema_files import IDENTIFIER, check_names
from dpoptim.data.table_files import Values, column_names, read_columns, separator_of
from dpoptim.missing_values import is_missing

Way = tuple[Decimal, Thousands, str]  # decimal mark, mark of thousands, unit
DECIMALS: tuple[Decimal, Decimal] = (".", ",")
GROUPED: tuple[Thousands, ...] = (",", ".", "'", " ")
PLAIN: tuple[Thousands, ...] = ("",)
LEADING_ZERO = re.compile(r"\D*0[.,]\d{3}(?!\d)")  # 0,125 is no 125
OF_NUMBERS = re.compile(rf"[\d.,+\-{''.join(MARKS.values())}\s]+")
# day first and month first; what fits both is not guessed
FORMATS = ("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d")


def ways_of_writing(parts: list[Values], decimal: Decimal) -> Iterator[Way]:
    """Ways in which a column's numbers may be written, likely ones first; to be tried.

    Args:
        decimal: of most other columns. All ways with it come before those with the other mark:
            1.234 is 1234 beside 1,5, and 1,234 is so beside 1.5.
    """
    yield decimal, "", ""
    texts = [
        text for values in parts if not isinstance(values, np.ndarray) for text in as_texts(values)
    ]
    unit = unit_of(texts)
    if unit:
        yield decimal, "", unit
    small = any(LEADING_ZERO.match(text) for text in texts)
    for mark in dict.fromkeys((decimal, *DECIMALS)) if texts else ():
        for thousands in PLAIN if small else GROUPED + PLAIN:
            if mark != thousands:
                yield mark, thousands, unit


def unit_of(texts: list[str]) -> str:
    """Unit before or behind each of these numbers; "" where what stands there may be none.

    A sign (``$``, ``%``) may stand on either side; letters behind a blank, or two at least behind
    the number: A1, A2 are names. Only signs of money may be missing: 5 K beside 800 is 5,000.
    """
    known = [text for text in texts if not is_missing(text)]
    units = {OF_NUMBERS.sub("", text) for text in known} - {""}
    if len(units) != 1:
        return ""
    (unit,) = units
    kinds = {unicodedata.category(each) for each in unit}
    if "Sc" in kinds:
        return unit
    if any(unit not in text for text in known):
        return ""
    if kinds & {"So", "Po"}:
        return unit
    letters = re.escape(unit)
    apart = rf".*\d(?:\s+{letters}|{letters if len(unit) > 1 else '(?!)'})|{letters}\s+[-+\d].*"
    return unit if re.fullmatch(apart, known[0]) else ""


def found_days(parts: list[Values]) -> tuple[NDArray[np.float64], str | None] | None:
    """Dates as days, and the format that they are in (None: ISO); None where that is not clear."""
    for formats in ((None,), FORMATS):
        fitting = [
            (np.floor(np.concatenate([days for days, _ in pieces])), format)
            for format in formats
            for pieces in ([as_days(values, format) for values in parts],)
            if all(bad is None for _, bad in pieces)
        ]
        if len(fitting) == 1:
            return fitting[0]
    return None


MOST_CATEGORIES = 30  # of a public column of text, before it is dropped from a draft


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
