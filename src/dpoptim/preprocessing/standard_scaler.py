"""Columns brought to mean 0 and standard deviation 1, as a noisy sum knows them."""

import math
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np

from dpoptim.estimators.atomic_fits import whole_fit
from dpoptim.estimators.setting_types import refuse_other_types
from dpoptim.preprocessing.private_step import BoundedColumns, SummedStep
from dpoptim.statistics import Floats

Missing = Literal["keep", "mean"]
LEAST_SPREAD = 1e-3  # standard deviation, in half ranges, that a column is taken to have at least


@dataclass(kw_only=True, eq=False, repr=False)
class DPStandardScaler(BoundedColumns, SummedStep):
    """Scale columns by their privately measured means and standard deviations.

    Args:
        lower, upper: public range of the columns: one number, or one for each. Values beyond are
            cut to it.
        epsilon: the budget, > 0; None where a `PrivatePipeline` decides.
        delta: in (1e-14, 1), or ``"auto"``: at most 1e-5 and 1/(10 n), n being public.
        with_mean: whether means are taken off. Without, 0 stays 0 where a column's range holds it,
            and a sparse table stays sparse.
        missing: ``"keep"`` leaves missing values (NaN) missing; ``"mean"`` fills them with the
            column's mean, which is 0 after scaling (by ``with_mean``) and costs nothing more.
        neighboring: ``"zero-out"``, ``"replace-one"``, or ``"add-or-remove-one"`` with a public
            ``n``.
        n: public number of records; needed where the relation hides it.
        ledger: where it is charged; None: nowhere.
        noise_seed: repeatable noise, for tests.

    Attributes:
        mean_, scale_: shape (columns,), as released.
        privacy_: `Guarantee` of the fit.

    **Guarantee.** ``privacy_``, for every table. With u the value in half ranges from the middle,
    a record adds ``(u, u^2 - 1/2, 0)`` for each column, or ``(0, 0, 1)`` where its value is
    missing: at most sqrt(5/4) long, to which each is cut, and sqrt(5/4 columns) for all. One
    vector, one Gaussian.

    Examples:
        >>> import numpy as np
        >>> from dpoptim.preprocessing import DPStandardScaler
        >>> x = np.random.default_rng(0).normal(50, 10, (5_000, 1))
        >>> scaler = DPStandardScaler(lower=0, upper=100, epsilon=1.0).fit(x)
        >>> bool(abs(scaler.mean_[0] - 50) < 3)
        True
    """

    missing: Missing = "keep"
    with_mean: bool = True

    def norm_bound(self, columns: int) -> float:
        return math.sqrt(1.25 * columns)

    @whole_fit
    def fit(self, X: Any, y: Any = None) -> Self:
        """Measure. Args: X of shape (n, columns), NaN where a value is missing.

        Raises:
            ValueError: a bad table or setting, before anything is spent.
        """
        refuse_other_types(self)
        x = self._numbers(X, reset=True)
        middle, half = self._bounds(x.shape[1])

        def cells(values: Floats, columns: Any) -> Floats:
            scaled, missing = self._in_range(values, middle[columns], half[columns])
            return np.stack([scaled, np.where(missing, 0.0, scaled**2 - 0.5), missing])

        (total, centred_squares, absent), released, n = self._release(x, cells)
        present = np.clip(n - absent, max(1.0, 0.01 * n), n)
        mean = np.clip(total / present, -1.0, 1.0)
        variance = centred_squares / present + 0.5 - mean**2
        least = max(LEAST_SPREAD, min(1.0, released.deviation / n))
        self.mean_: Floats = middle + half * mean
        self.scale_: Floats = half * np.sqrt(np.clip(variance, least**2, 1.0))
        return self

    def transform(self, X: Any) -> Any:
        """``(X - mean_) / scale_``, X cut to the public range; shape (n, columns).

        Of a sparse table a dense one, unless ``with_mean=False`` keeps 0 in all columns.
        """
        return self._mapped(X)

    def _map(self, x: Floats, columns: Any) -> Floats:
        middle, half = (ends[columns] for ends in self._bounds(self.n_features_in_))
        mean, scale = self.mean_[columns], self.scale_[columns]
        if self.missing == "mean":
            x = np.where(np.isnan(x), mean, x)
        cut = np.clip(x, middle - half, middle + half)
        return (cut - mean if self.with_mean else cut) / scale
