"""Missing values filled with the column's mean, as a noisy sum knows it."""

import math
from typing import Any, Self

import numpy as np

from dpoptim.estimators.atomic_fits import whole_fit
from dpoptim.estimators.settings import refuse_other_types
from dpoptim.preprocessing.private_step import BoundedColumns, SummedStep
from dpoptim.statistics import Floats


class DPImputer(BoundedColumns, SummedStep):
    """Fill missing values (NaN) with the column's privately measured mean.

    Before a `DPStandardScaler` it is not needed: ``DPStandardScaler(missing="mean")`` fills at no
    further cost.

    Args:
        lower, upper: public range of the columns: one number, or one for each. What is learnt is
            of values cut to it.
        epsilon, delta, neighboring, n, ledger, noise_seed: as for `DPStandardScaler`.

    Attributes:
        mean_: shape (columns,), as released.
        privacy_: `Guarantee` of the fit.

    **Guarantee.** ``privacy_``, for every table. A record adds (u, 0) for each column, u the value
    in half ranges from the middle, or (0, 1) where it is missing: at most 1 long, to which each is
    cut, and sqrt(columns) for all. One vector, one Gaussian.

    Examples:
        >>> import numpy as np
        >>> from dpoptim.preprocessing import DPImputer
        >>> x = np.array([[1.0], [np.nan]] * 500)
        >>> filled = DPImputer(lower=0.0, upper=2.0, epsilon=1.0).fit_transform(x)
        >>> bool(np.isnan(filled).any())
        False
    """

    def norm_bound(self, columns: int) -> float:
        return math.sqrt(columns)

    @whole_fit
    def fit(self, X: Any, y: Any = None) -> Self:
        """Measure. Args and errors as for `DPStandardScaler.fit`."""
        refuse_other_types(self)
        x = self._numbers(X, reset=True)
        middle, half = self._bounds(x.shape[1])

        def cells(values: Floats, columns: Any) -> Floats:
            scaled, missing = self._in_range(values, middle[columns], half[columns])
            return np.stack([scaled, missing])

        (total, absent), _, n = self._release(x, cells)
        self.mean_: Floats = middle + half * np.clip(
            total / np.clip(n - absent, max(1.0, 0.01 * n), n), -1.0, 1.0
        )
        return self

    def transform(self, X: Any) -> Any:
        """X with its gaps filled; shape (n, columns); sparse if X is, where no entry is 0."""
        return self._mapped(X)

    def _map(self, x: Floats, columns: Any) -> Floats:
        return np.where(np.isnan(x), self.mean_[columns], x)
