"""Errors of iterates under any learning rates l_0, l_1, ..., where nothing separates.

A unit of noise in step n that is taken back by a response r has moved the iterate j steps later by
``P(n, j) = sum_{k <= j} l_{n+k} r_k``, a table of T^2 / 2 entries. For a fit, rows of at most
`ROWS` n are made, and squared errors lie on straight lines between them; up to `ROWS` steps that
is exact.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
ROWS = 256


def rates_of(planned: tuple[float, ...], steps: int) -> Floats:
    """Return the rate of each step, (steps,), on straight lines between those that are planned."""
    return np.interp(np.linspace(0, len(planned) - 1, steps), np.arange(len(planned)), planned)


def costs(rates: Floats, response: Floats) -> Floats:
    """Return the squared errors of all iterates by a unit of noise in each step, (steps,)."""
    ahead, lines = table(rates)
    return np.asarray((moved(ahead, response) ** 2).sum(1) @ lines)


def error(rates: Floats, response: Floats, variances: Floats) -> tuple[float, Floats]:
    """Return the squared errors of all iterates, and half of their slopes by the response."""
    ahead, lines = table(rates)
    answers = moved(ahead, response)
    pull = (lines @ variances)[:, None] * answers
    slopes = (ahead * np.cumsum(pull[:, ::-1], axis=1)[:, ::-1]).sum(0)
    return float(np.sum(answers * pull)), slopes


def errors(rates: Floats, response: Floats, variances: Floats) -> Floats:
    """Return the standard deviation of each iterate's error, (steps,); of all rows."""
    squares = np.zeros(len(rates))
    for n, variance in enumerate(variances):
        squares[n:] += variance * np.cumsum(rates[n:] * response[: len(rates) - n]) ** 2
    return np.sqrt(squares)


def table(rates: Floats) -> tuple[Floats, Floats]:
    """Return the rates ahead of some steps, and each of these steps' share in every step.

    Both (rows, steps); rates are 0 after the last step.
    """
    starts, lines = rows_of(len(rates))
    padded = np.append(rates, np.zeros_like(rates))
    return np.lib.stride_tricks.sliding_window_view(padded, len(rates))[starts], lines


@lru_cache(maxsize=8)
def rows_of(steps: int) -> tuple[NDArray[np.int64], Floats]:
    starts = np.linspace(0, steps - 1, min(steps, ROWS)).round().astype(np.int64)
    lines = [np.interp(np.arange(steps), starts, one) for one in np.eye(len(starts))]
    return starts, np.array(lines)


def moved(ahead: Floats, response: Floats) -> Floats:
    """Return P, (rows, steps), 0 after the last step."""
    return np.cumsum(ahead * response, axis=1) * (ahead > 0)
