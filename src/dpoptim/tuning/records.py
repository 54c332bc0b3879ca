"""A table that a search divides into rows that train and rows that score, and their noisy scores.

Private, but for the noisy scores.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import is_classifier

from dpoptim.arguments import real_number
from dpoptim.data.input_arrays import number_array, one_axis
from dpoptim.data.parquet_rows import ParquetRows
from dpoptim.data.sparse_rows import SparseRows, count_rows
from dpoptim.estimators.fitting import Given
from dpoptim.estimators.persons import owners_of
from dpoptim.estimators.table import one_label_a_row, table
from dpoptim.estimators.weights import weights_of_rows
from dpoptim.noise.stream import KeyStream
from dpoptim.statistics import BOUND_ROUNDING, Floats, bounded_sum, release_sum
from dpoptim.target_range import TargetRange
from dpoptim.training.batches.privacy_units import Persons


@dataclass(frozen=True, eq=False)
class Records:
    """A good table, whose rows can be taken by their places.

    Attributes:
        x: an array or a canonical sparse table, shape (n, features).
        y: labels or targets, shape (n,).
        weights: of the rows' losses, shape (n,), or None.
        owners: of the rows; None: each is a record of its own.
    """

    x: Any
    y: NDArray[Any]
    weights: Floats | None
    owners: Persons | None

    @classmethod
    def of(cls, given: Given, search: Any) -> "Records":
        """A table checked, and its columns noted in ``search``, as in scikit-learn.

        Raises:
            ValueError: a bad table, or one that is read in order alone.
        """
        x = table(given.X, reset=True, estimator=search)
        if isinstance(x, ParquetRows):
            raise ValueError(
                "X: a search trains on some rows and scores on others, and a Parquet file is read "
                "in order. Fix: an array or a memory map."
            )
        x = x.table if isinstance(x, SparseRows) else x
        rows = count_rows(x)
        if is_classifier(search.estimator):
            y = one_label_a_row(given.y, rows=rows)
        else:
            y = number_array("y", one_axis("y", given.y, warn=True))
        most = getattr(search.estimator, "rows_per_person", 1)
        weights = weights_of_rows(given.weights, rows=rows)
        return cls(x, y, weights, owners_of(x, given.persons, most))

    @property
    def units(self) -> int:
        """How many records or persons there are."""
        return count_rows(self.x) if self.owners is None else len(self.owners)

    @property
    def unit_of_rows(self) -> NDArray[np.int64]:
        """The number of the record or person whose each row is, shape (n,)."""
        return np.arange(self.units) if self.owners is None else self.owners.numbers

    def fitted(self, model: Any, rows: Any) -> Any:
        """``model`` trained on rows, at their places or a slice; charged to its own ledger."""
        persons = None if self.owners is None else self.owners.numbers[rows]
        weights = None if self.weights is None else self.weights[rows]
        return model.fit(self.x[rows], self.y[rows], weights, persons=persons)

    def values(self, model: Any, rows: Any) -> Floats:
        """Parts of a score, one a record or person with rows here; see `values_of_units`."""
        return values_of_units(model, self.x[rows], self.y[rows], self.unit_of_rows[rows])


def held_out_units(n: int, share: float, coins: KeyStream) -> NDArray[np.bool_]:
    """Whether each of n records or persons is held out, by a permutation; shape (n,).

    Args:
        share: of those held out, in (0, 1).
        coins: public for records, which keep their places. Secret for persons, who do not.

    Raises:
        ValueError: the share is out of range, or leaves nobody to train on.
    """
    if not 0 < real_number("holdout", share) < 1:
        raise ValueError(f"holdout must be in (0, 1), got {share:g}.")
    words = np.empty(n, np.uint64)
    coins.words(words)
    size = max(1, round(share * n))
    if size >= n:
        raise ValueError("holdout leaves no records to train on: one sample is too few.")
    held_out = np.zeros(n, dtype=bool)
    held_out[np.argsort(words, kind="stable")[:size]] = True
    return held_out


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
