"""Dates as numbers of days since 1970-01-01, however a file or a schema holds them."""

from contextlib import suppress
from datetime import UTC, date, datetime, timedelta

import numpy as np
from numpy.typing import NDArray

from dpoptim.data.numbers import as_texts, is_missing
from dpoptim.data.table_files import Values

EPOCH = date(1970, 1, 1)
START = datetime(1970, 1, 1)


def as_days(values: Values) -> tuple[NDArray[np.float64], int | None]:
    """Days since 1970-01-01, NaN for missing dates; and the place of what is no date, or None.

    ISO dates (2024-12-31), and times as parts of the day; those with an offset are moved to UTC.
    """
    texts = as_texts(values)
    known: dict[str, float] = {}  # few dates, many records
    days = np.full(len(texts), np.nan)
    for place, text in enumerate(texts):
        if text not in known:
            try:
                known[text] = np.nan if is_missing(text) or text == "NaT" else days_of(text)
            except (ValueError, OverflowError):
                return days, place
        days[place] = known[text]
    return days, None


def days_of(text: str) -> float:
    when = datetime.fromisoformat(text)
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


def day_text(days: float) -> str:
    return (EPOCH + timedelta(days=int(days))).isoformat()
