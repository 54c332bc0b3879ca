"""Arguments that users give, checked here for all, or refused by their names."""

import math
from collections.abc import Iterable
from numbers import Real


def real_number(name: str, value: object) -> float:
    """Return ``value`` as a float; numpy's numbers are fine, text and booleans are not."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {value!r}.")
    return float(value)


def positive_number(name: str, value: object) -> float:
    """Return ``value`` as a finite float above 0."""
    number = real_number(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}.")
    return number


def number_from_zero(name: str, value: object) -> float:
    """Return ``value`` as a finite float of at least 0."""
    number = real_number(name, value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}.")
    return number


def proportion(name: str, value: object) -> float:
    """Return ``value`` as a float above 0 and below 1."""
    number = real_number(name, value)
    if not 0 < number < 1:
        raise ValueError(f"{name} must be between 0 and 1, got {number!r}.")
    return number


def whole_number(name: str, value: object, *, least: int) -> int:
    """Return ``value`` as an int of at least ``least``; floats without a fraction are fine."""
    number = real_number(name, value)
    if math.isfinite(number):
        whole = int(number)
        if whole == number and whole >= least:
            return whole
    raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")


def one_of(name: str, value: object, choices: Iterable[object]) -> None:
    """Refuse a value that is none of the choices."""
    listed = tuple(choices)
    if value not in listed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, listed))}, got {value!r}.")
