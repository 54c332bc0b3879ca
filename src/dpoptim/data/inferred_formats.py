"""Formats of numbers and dates in a table that is declared public, found by trying."""

import re
import unicodedata
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dpoptim.data.dates import as_days
from dpoptim.data.numbers import MARKS, as_texts
from dpoptim.data.schema import Decimal, Thousands
from dpoptim.data.table_files import Values
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
