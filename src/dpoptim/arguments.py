"""Numbers that users give: checked, or refused with the name of the argument."""

import math
from numbers import Real


def real_number(name: str, value: object) -> float:
    """``value`` as a float; numpy's numbers are fine, text and booleans are not."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {value!r}.")
    return float(value)


def positive_number(name: str, value: object) -> float:
    number = real_number(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}.")
    return number


def whole_number(name: str, value: object, *, least: int) -> int:
    number = real_number(name, value)
    if math.isfinite(number):
        whole = int(number)
        if whole == number and whole >= least:
            return whole
    raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")
