"""Columns as numbers, as dates (days since 1970-01-01) and as text, however a file holds them."""

import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from functools import cache
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpoptim.data.table_files import Values
from dpoptim.missing_values import is_gap, is_missing

WRITTEN = re.compile(r"-?\d+(\.\d+)?(e[+-]\d+)?", re.ASCII)  # a number, by a program
WHOLE = re.compile(r"-?[1-9]\d{15,299}", re.ASCII)  # a number that float64 may round
COMMAS = str.maketrans(",.", ".,")
# marks of thousands, as a schema names them, and what files have for them
MARKS = {".": ".", ",": ",", " ": " \u00a0\u202f", "'": "'\u2019"}


def as_numbers(
    values: Values, decimal: str = ".", thousands: str = "", unit: str = ""
) -> tuple[NDArray[np.float64], int | None]:
    """Numbers, NaN for missing ones; and the place of the first other value, or None.

    Args:
        decimal: the mark in numbers as text; where it is a comma, a point (of thousands, maybe) is
            no part of a number.
        thousands: the mark between groups of digits in them, one of `MARKS`; "": none. Only where
            the last group has three digits and the others two or three (1,234,567 or 12,34,567),
            so that 1,23 is no number rather than 123.
        unit: may stand before or behind what is no number with it: "$" of $5, -$5 and 5 $.
    """
    if isinstance(values, np.ndarray):
        return values.astype(np.float64), None
    texts = [as_python_writes(text, decimal, thousands) for text in values]
    try:
        return np.fromiter(map(float, texts), np.float64, len(texts)), None
    except ValueError:
        pass
    numbers = np.full(len(texts), np.nan)
    for place, text in enumerate(texts):
        if is_missing(text):
            continue
        bare = as_python_writes(without_unit(values[place], unit), decimal, thousands)
        number = first_number(text, bare)
        if number is None:
            return numbers, place
        numbers[place] = number
    return numbers, None


def first_number(*texts: str) -> float | None:
    """The number that the first of the texts to be one is; None where none is."""
    for text in texts:
        with suppress(ValueError):
            return float(text)
    return None


def as_python_writes(text: str, decimal: str, thousands: str) -> str:
    """A number's text with a decimal point and no marks; other text as it comes out."""
    if thousands:
        text = without_marks(text, thousands)
    return text.translate(COMMAS) if decimal == "," else text


def without_unit(text: str, unit: str) -> str:
    """A number's text without the unit before or behind it; the sign may come first."""
    text = text.strip()
    sign = text[:1] if text[:1] in ("+", "-") else ""
    bare = text[len(sign) :].strip()
    less = bare.removeprefix(unit)
    return sign + (less if less != bare else bare.removesuffix(unit)).strip()


def without_marks(text: str, thousands: str) -> str:
    """A number's text without marks between its groups of digits; other text as it is."""
    grouped = digit_groups(thousands).match(text)
    if grouped is None:
        return text
    digits = "".join(each for each in grouped[0] if each not in MARKS[thousands])
    return digits + text[grouped.end() :]


@cache
def digit_groups(thousands: str) -> re.Pattern[str]:
    """Groups of digits with a mark between them, at the beginning of a number."""
    mark = f"[{re.escape(MARKS[thousands])}]"
    return re.compile(
        rf"\s*[+-]?\d{{1,3}}(?:{mark}\d{{2,3}})*{mark}\d{{3}}(?!\d|{mark}\d)", re.ASCII
    )


def as_texts(values: Values) -> list[str]:
    """Values as text, without blanks around them."""
    if isinstance(values, np.ndarray):
        return ["" if value is None else str(value) for value in values.tolist()]
    return [text.strip() for text in values]


def text_of(value: object) -> str:
    """A value as text; the same however a column holds it: 1, 1.0 and "1.0" are "1", gaps "nan".

    So what a record is read as does not depend on others, for whose sake a column of whole numbers
    may be held as floats (a gap, a fraction), or one of numbers as text (a word), and gaps as None
    or as NaN. Whole numbers beyond 2^53 are rounded as floats, so also where they are text. Texts
    that no number becomes, such as "01" and "1.50", stay.
    """
    if is_gap(value):
        return "nan"
    if isinstance(value, bool | np.bool_):
        return str(value)
    if isinstance(value, str) and (
        WHOLE.fullmatch(value) or (WRITTEN.fullmatch(value) and value == str(float(value)))
    ):
        value = float(value)
    if not isinstance(value, Real):
        return str(value)
    try:
        number = float(value)
    except OverflowError:
        return str(value)
    return str(int(number)) if number.is_integer() else str(value)


def label_text(label: object) -> str:
    """`text_of` a label, but that True is 1, as it is where others are numbers."""
    text = text_of(label)
    return {"True": "1", "False": "0"}.get(text, text)


def classes_of(
    names: Sequence[Any], labels: NDArray[Any], named: str = "classes", one: str = "class"
) -> NDArray[np.int64]:
    """The place of each label among the classes, -1 for others and for gaps; shape (n,).

    Args:
        names: of the classes; public. labels: shape (n,). named, one: words for an error.

    Raises:
        ValueError: a class is named twice.

    **Guarantee.** Each place depends on that label alone, also where a word among numbers makes
    text of all of them.
    """
    places = {label_text(name): place for place, name in enumerate(names)}
    if len(places) < len(names):
        raise ValueError(
            f"{named} must name each {one} once; 1, 1.0, '1' and True are the same one, and whole "
            "numbers beyond 2^53 that float64 rounds to one."
        )
    if labels.dtype.kind == "O":
        found = [-1 if is_gap(label) else places.get(label_text(label), -1) for label in labels]
        return np.array(found, dtype=np.int64)
    values, of_rows = np.unique(labels, return_inverse=True)
    return classes_of(names, values.astype(object), named, one)[of_rows]


def places_among(names: Sequence[str], values: Values) -> NDArray[np.int64]:
    """The place of each value among the names, -1 for others.

    They are compared as text; where no name is the same, 1.0 is 1, as a column of whole numbers is
    written that was held as floats, and True, TRUE and true are one, as programs write them.
    """
    places = {alike_written(name): place for place, name in enumerate(names)}
    places |= {name: place for place, name in enumerate(names)}
    found = (places.get(text, places.get(alike_written(text), -1)) for text in as_texts(values))
    return np.fromiter(found, np.int64, len(values))


def alike_written(text: str) -> str:
    """One text for a whole number, or a boolean, however it is written; other text as it is."""
    small = text.lower()
    return small if small in BOOLEANS else without_zero_fraction(text)


def without_zero_fraction(text: str) -> str:
    """Text without a fraction of zeros."""
    number, point, fraction = text.partition(".")
    digits = number.removeprefix("-").isdecimal()
    return number if point and fraction and digits and not fraction.strip("0") else text


BOOLEANS = ("true", "false")
EPOCH = date(1970, 1, 1)
START = datetime(1970, 1, 1)


def as_days(values: Values, format: str | None = None) -> tuple[NDArray[np.float64], int | None]:
    """Days since 1970-01-01, NaN for missing dates; and the place of what is no date, or None.

    ISO dates (2024-12-31), and times as parts of the day; those with an offset are moved to UTC.

    Args:
        format: of dates that are written otherwise, as `datetime.strptime` takes it.
    """
    texts = as_texts(values)
    if isinstance(values, np.ndarray):  # 20241231 as a number, in a file with types
        texts = [without_zero_fraction(text) for text in texts]
    known: dict[str, float] = {}  # few dates, many records
    days = np.full(len(texts), np.nan)
    for place, text in enumerate(texts):
        if text not in known:
            try:
                known[text] = np.nan if is_missing(text) else days_of(text, format)
            except (ValueError, OverflowError):
                return days, place
        days[place] = known[text]
    return days, None


def days_of(text: str, format: str | None = None) -> float:
    when = datetime.fromisoformat(text) if format is None else datetime.strptime(text, format)
    if when.tzinfo is not None:
        when = when.astimezone(UTC).replace(tzinfo=None)
    return (when - START) / timedelta(days=1)


def day_number(name: str, value: object) -> float:
    """The days since 1970-01-01 of a date in a schema, a TOML date or text; named if refused."""
    if isinstance(value, str):
        with suppress(ValueError):
            value = date.fromisoformat(value)
    if not isinstance(value, date) or isinstance(value, datetime):
        raise ValueError(f"{name} must be a date such as 2024-12-31, got {value!r}.")
    return float((value - EPOCH).days)


def keeps_day(format: str, days: float) -> bool:
    """Whether a day that is written in this format is read back as the same day."""
    day = START.replace(tzinfo=UTC) + timedelta(days=int(days))  # of formats with an offset, too
    try:
        return int(days_of(day.strftime(format), format)) == int(days)
    except (ValueError, OverflowError):
        return False


def day_text(days: float) -> str:
    return (EPOCH + timedelta(days=int(days))).isoformat()
