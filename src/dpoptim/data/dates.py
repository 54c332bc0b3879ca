"""Dates as numbers of days since 1970-01-01, however a file or a schema holds them."""

from contextlib import suppress
from datetime import UTC, date, datetime, timedelta

import numpy as np
from numpy.typing import NDArray

from dpoptim.data.numbers import as_texts, whole
from dpoptim.data.table_files import Values
from dpoptim.missing_values import is_missing

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
        texts = [whole(text) for text in texts]
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


def holds(format: str, days: float) -> bool:
    """Whether a day that is written in this format is read back as the same day."""
    day = START.replace(tzinfo=UTC) + timedelta(days=int(days))  # of formats with an offset, too
    try:
        return int(days_of(day.strftime(format), format)) == int(days)
    except (ValueError, OverflowError):
        return False


def day_text(days: float) -> str:
    return (EPOCH + timedelta(days=int(days))).isoformat()
