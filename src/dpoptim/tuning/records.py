"""A table that a search divides into rows that train and rows that score. Private."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import is_classifier

from dpoptim.data.input_arrays import number_array, one_axis
from dpoptim.data.parquet_rows import ParquetRows
from dpoptim.data.sparse_rows import SparseRows, count_rows
from dpoptim.estimators.fitting import Given
from dpoptim.estimators.persons import owners_of
from dpoptim.estimators.table import one_label_a_row, table
from dpoptim.estimators.weights import weights_of_rows
from dpoptim.statistics import Floats
from dpoptim.training.batches.privacy_units import Persons
from dpoptim.tuning.scores import values_of_units


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
