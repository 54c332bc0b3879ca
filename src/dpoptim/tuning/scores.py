"""Scores of a search's trials: what each record or person adds, and their noisy mean."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import is_classifier

from dpoptim.statistics import BOUND_ROUNDING, Floats, bounded_sum, release_sum
from dpoptim.target_range import TargetRange


def values_of_units(model: Any, x: Any, y: NDArray[Any], units: NDArray[np.int64]) -> Floats:
    """The part each record or person (``units`` says whose the rows are) adds to the score.

    **Guarantee.** Of absolute value at most 1/2: a row is worth 1/2 or -1/2, or 1/2 less its
    squared error, and a person the mean over the person's rows. Private.
    """
    predicted = model.predict(x)
    if is_classifier(model):
        values = np.where(predicted == y, 0.5, -0.5)
    else:
        allowed = TargetRange.of(model.target_bound)
        residual = (allowed.scaled(y) - allowed.scaled(predicted)) / 2
        values = 0.5 - residual**2
    _, of_rows, counts = np.unique(units, return_inverse=True, return_counts=True)
    means: Floats = np.bincount(of_rows, weights=values) / counts
    return means


def noisy_score(
    model: Any, values: Floats, *, mu: float, delta: float, relation: str, seed: int | None
) -> float:
    """The noisy mean of ``values``, mu-GDP, as a score of this model."""
    released = release_sum(
        bounded_sum(values[:, None], 0.5),
        norm_bound=0.5 * BOUND_ROUNDING,
        mu=mu,
        delta=delta,
        neighboring=relation,
        label="score of a trial",
        noise_seed=seed,
    )
    mean = float(released.values[0]) / len(values)
    return mean + 0.5 if is_classifier(model) else 4 * (mean - 0.5)
