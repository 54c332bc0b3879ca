"""Weights of rows (``sample_weight``): private, and within the bound on what a record may add."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpoptim.arguments import positive_number
from dpoptim.data.input_arrays import number_array

Floats = NDArray[np.float64]
TRUSTED = "on trust: a row's weight does not depend on other rows"
LARGEST_WEIGHT = 2.0**40  # of a row; its product with a gradient stays in float32's range


def weights_of_rows(sample_weight: Any, *, rows: int, most: object = None) -> Floats | None:
    """Factors of the rows' losses, shape (rows,), larger ones cut to ``most``; None: all are 1.

    Args:
        sample_weight: one number for each row, or one for all; None: 1.
        most: public, > 0; None: `LARGEST_WEIGHT`.

    Raises:
        ValueError: not one number for each row, or one that is negative or not finite, without
            saying which; or a bound that is none.

    **Guarantee.** None: private. A row's factor depends on its own weight alone: nothing is
    divided by their sum.
    """
    bound = LARGEST_WEIGHT if most is None else positive_number("weight_bound", most)
    if sample_weight is None:
        return None
    found = number_array("sample_weight", sample_weight)
    if found.ndim == 0:
        found = np.full(rows, found)
    if found.ndim != 1:
        raise ValueError("Sample weights must be 1D array or scalar. Fix: one for each record.")
    if len(found) != rows:
        raise ValueError("sample_weight must have as many numbers as X has rows.")
    if not (np.isfinite(found) & (found >= 0)).all():
        raise ValueError(
            "sample_weight must hold finite numbers of at least 0. Fix: 0 leaves a record out."
        )
    return np.minimum(found, min(bound, LARGEST_WEIGHT))


def notes_of_weights(weights: Floats | None) -> tuple[str, ...]:
    """Notes on a fit with weights: those that are divided by their sum move with every row."""
    return () if weights is None else (TRUSTED,)


def parts_of_data(
    x: Any,
    y: NDArray[Any],
    shares: Floats | None,
    weights: Floats | None,
) -> tuple[Any, ...]:
    """The data of a `LinearProblem`, without what is 1 for all rows."""
    if weights is not None:
        return x, y, np.ones(y.shape) if shares is None else shares, weights
    return (x, y) if shares is None else (x, y, shares)


def unit_of_weights(data: tuple[Any, ...], weight_bound: float | None) -> float:
    """The weight that counts whole in sums: 1 without any, infinite without a bound."""
    if len(data) < 4:
        return 1.0
    return math.inf if weight_bound is None else weight_bound


def weighted_in_sums(data: tuple[Any, ...], unit: float) -> tuple[Any, ...]:
    """The data of `sufficient_statistics`, whose shares are the weights over their bound.

    Raises:
        ValueError: there are weights, and no bound.
    """
    if len(data) < 4:
        return data
    if math.isinf(unit):
        raise ValueError(
            "sample_weight multiplies what a record adds to the sums of "
            "solver='sufficient-statistics'. Fix: weight_bound=, a public bound to which weights "
            "are cut; or another solver, which clips after weighting."
        )
    x, y, shares, weights = data
    return x, y, shares * (weights / unit)
