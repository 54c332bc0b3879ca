"""Arguments that users give, checked here for all, or refused by their names."""

import math
from collections.abc import Iterable
from numbers import Real

LEAST_BOUND, LARGEST_BOUND = 2.0**-100, 2.0**100


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


def bound(name: str, value: object) -> float:
    """Return ``value`` as a float from 2^-100 to 2^100: squares of squares are finite."""
    number = real_number(name, value)
    if not LEAST_BOUND <= number <= LARGEST_BOUND:
        raise ValueError(
            f"{name} must be between {LEAST_BOUND:.2g} and {LARGEST_BOUND:.2g}, got {value!r}."
        )
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


def whole_number(name: str, value: object, *, least: int, most: float = math.inf) -> int:
    """Return ``value`` as an int in this range; floats without a fraction are fine."""
    number = real_number(name, value)
    if math.isfinite(number):
        whole = int(number)
        if whole == number and least <= whole <= most:
            return whole
    range_ = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
    raise ValueError(f"{name} must be a whole number {range_}, got {value!r}.")


def one_of(name: str, value: object, choices: Iterable[object]) -> None:
    """Refuse a value that is none of the choices."""
    listed = tuple(choices)
    if value not in listed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, listed))}, got {value!r}.")
