"""Texts that stand for a value which is not there, as files and programs write them."""

from typing import Any

# in any case
WORDS = frozenset(
    {"", "na", "n/a", "nan", "null", "none", "?", "<na>", "#n/a", "#na", "n.a.", "nat"}
)


def is_missing(text: str) -> bool:
    """Whether a text says that there is no value."""
    return text.strip().lower() in WORDS


def is_gap(value: Any) -> bool:
    """Whether a value is None, NaN, NaT or pandas' NA, by which programs say that there is none."""
    try:
        return value is None or bool(value != value)  # noqa: PLR0124, as NaN alone is
    except (TypeError, ArithmeticError):  # pandas' NA does not say; a signalling NaN raises
        return True
    except ValueError:  # an array in a cell
        return False
