"""The banded Toeplitz strategy of least error for a workload and a pattern of participations.

A strategy is ``C = D T``: T lower-triangular Toeplitz with first column ``c >= 0`` and ``bands``
entries, D diagonal. So the noise of step m has the standard deviation ``1 / d_m`` before T is
undone. With ``p = d^2``, and a record in the steps i, i + b, i + 2b, ... for an i below b =
``separation`` >= bands:

* its squared sensitivity is ``sum_a sum_m p_m c_{m - i - ab}^2``, linear in p (its columns share
no row);
* the squared errors of the iterates (`workload`) add up to ``sum_m w_m / p_m``, w_m that of a unit
noise in step m.

For given c the best p is that of a convex problem: ``p_m = (w_m / g_m)^(1/2)`` with g = the
constraints' gradients weighted by multipliers, which are found by multiplicative updates. For
given p, c is found by L-BFGS on the product of the two, with the constraints weighted by the same
multipliers. Two rounds suffice. What is found is only rounded, never trusted: errors and
sensitivities are computed from it. (Banded Toeplitz strategies: McKenna 2024; the rows' noise is a
further degree of freedom, and lowers the error by 2 to 3 %.)
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dpoptim.noise.correlated.workload import Floats, Workload

ROUNDS, UPDATES, ITERATIONS = 3, 200, 120
LONGEST_SCALED = 1 << 14  # steps for which each one's noise is fitted; seconds
DECIMALS = 4  # so that a run resumed elsewhere finds the same numbers


def inverse(column: Floats, steps: int) -> Floats:
    """First column of T^-1, shape (steps,)."""
    from scipy.signal import lfilter

    impulse = np.zeros(steps)
    impulse[0] = 1.0
    return np.asarray(lfilter([1.0], column, impulse))


@lru_cache(maxsize=64)
def fitted(steps: int, bands: int, separation: int, workload: Workload) -> tuple[Floats, Floats]:
    """Return (c of shape (bands,), p of shape (steps,)); read-only.

    Args:
        steps: T. bands: 1 to separation. separation: from a record's participation to its next.
        workload: of the optimizer that adds up what is released.
    """
    k = np.arange(1, bands)
    column = np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])
    column = np.round(descend(column, np.ones(steps), np.ones(bands), workload), DECIMALS)
    place = np.arange(steps) % separation

    def optimum() -> tuple[Floats, Floats]:
        return best_rows(workload.costs(inverse(column, steps)), column**2, place)

    rows, multipliers = optimum()
    for _ in range(ROUNDS - 1):
        weights = multipliers[place]
        squares = np.array([weights[: steps - lag] @ rows[lag:] for lag in range(bands)])
        column = np.round(descend(column, 1 / rows, squares, workload), DECIMALS)
        rows, multipliers = optimum()
    rows = np.exp(np.round(np.log(rows / rows[0]), DECIMALS))
    column.flags.writeable = rows.flags.writeable = False  # cached
    return column, rows


def descend(start: Floats, variances: Floats, squares: Floats, workload: Workload) -> Floats:
    """Minimise the errors' squares times ``sum_l squares_l c_l^2`` over c, c_0 = 1.

    Args:
        variances: of each step's noise, shape (steps,).
    """
    from scipy.optimize import minimize
    from scipy.signal import lfilter

    if len(start) == 1:
        return start
    steps, error_of = len(variances), workload.error(variances)

    def value(free: Floats) -> tuple[float, Floats]:
        column = np.concatenate([[1.0], free])
        with np.errstate(over="ignore", invalid="ignore"):
            response = inverse(column, steps)
            error, by_response = error_of(response)
        if not np.isfinite(error):
            return 1e6, np.zeros_like(free)
        # A change of c by x^l changes the response by -x^l times itself, taken back once more.
        further = lfilter([1.0], column, workload.sped(response))
        slopes = np.array(
            [-2 * (by_response[lag:] @ further[: steps - lag]) for lag in range(1, len(column))]
        )
        length = float(squares @ column**2)
        return float(np.log(error * length)), slopes / error + 2 * squares[1:] * free / length

    bounds = [(0.0, None)] * (len(start) - 1)
    found = minimize(
        value,
        start[1:],
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": ITERATIONS},
    )
    return np.concatenate([[1.0], found.x])


def best_rows(costs: Floats, squares: Floats, starts: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return p of least error at sensitivity about 1, (steps,), and the constraints' multipliers.

    Args:
        costs: squared errors by a unit noise in each step, shape (steps,).
        squares: what a record adds to the squared output in the steps from a start on.
        starts: whose record starts in step 0, 1, ...; a record may start several times.
    """
    steps, records = len(costs), int(starts.max()) + 1
    multipliers = np.ones(records)

    def rows_for(multipliers: Floats) -> tuple[Floats, Floats]:
        weights = np.zeros(steps)
        weights[: len(starts)] = multipliers[starts]
        rows = np.sqrt(costs / convolved(weights, squares))
        added = column_squares(squares, rows)[: len(starts)]
        return rows, np.bincount(starts, added, records).astype(np.float64)

    for _ in range(UPDATES):
        multipliers = multipliers * rows_for(multipliers)[1]
        multipliers /= multipliers.sum()
    rows, sensitivities = rows_for(multipliers)
    return rows / sensitivities.max(), multipliers


def column_squares(squares: Floats, rows: Floats) -> Floats:
    """Squared norms of the columns of C: ``sum_m p_m c_{m-j}^2``, shape (steps,)."""
    return convolved(rows[::-1], squares)[::-1]


def convolved(sequence: Floats, kernel: Floats) -> Floats:
    """The first len(sequence) entries of the convolution; all terms non-negative."""
    from scipy.signal import oaconvolve

    few = len(kernel) * len(sequence) <= 1 << 22
    whole = np.convolve(sequence, kernel) if few else oaconvolve(sequence, kernel)
    return np.maximum(whole[: len(sequence)], 1e-300)
