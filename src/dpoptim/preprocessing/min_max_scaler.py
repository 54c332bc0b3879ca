"""Columns brought to [-1, 1]: by public bounds for nothing, or by privately chosen quantiles."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from sklearn.utils.validation import check_is_fitted

from dpoptim.arguments import real_number
from dpoptim.data.input_arrays import checked_table
from dpoptim.data.sparse_rows import SparseRows
from dpoptim.estimators.atomic_fits import whole_fit
from dpoptim.estimators.settings import refuse_other_types
from dpoptim.preprocessing.private_step import BoundedColumns, trying
from dpoptim.quantiles import Column, are_coarse, candidates_of, select_tails
from dpoptim.statistics import Floats

COARSE = (
    "few candidates lie between the ends of {} column{}, which may be as far off as they are apart "
    "(low_, high_): narrow lower and upper"
)


@dataclass(kw_only=True, eq=False, repr=False)
class DPMinMaxScaler(BoundedColumns):
    """Scale columns to [-1, 1]; values beyond the ends are cut.

    Args:
        lower, upper: public range of the columns: one number, or one for each.
        quantile: None scales by the public range itself, which reads no record and is free. A
            number in (0, 0.5): the ends are the column's quantiles ``quantile`` and ``1 -
            quantile``, chosen privately; for columns whose public range is far wider than where
            their values are.
        epsilon, delta, neighboring, n, ledger, noise_seed: as for `DPStandardScaler`; used with
            ``quantile`` only.

    Attributes:
        low_, high_: the ends, shape (columns,). As quantiles they are known to 19 % of their
            distance from 0 or an end of the range, or to 1/255 of the range, whichever is finer:
            values that all lie closer together are between two ends that may be far from them.
        privacy_: `Guarantee` of the fit; None where nothing was read.

    **Guarantee.** ``privacy_``, for every table: two exponential mechanisms a column on
    some hundreds of public numbers and what is between them (`candidates_of`), by how many values
    must move for it to have the wanted number below, or above; exactly drawn, from one filter.

    Examples:
        >>> import numpy as np
        >>> from dpoptim.preprocessing import DPMinMaxScaler
        >>> ages = np.array([[18.0], [95.0]])
        >>> DPMinMaxScaler(lower=18, upper=95).fit_transform(ages)
        array([[-1.],
               [ 1.]])
    """

    precision = 0.02

    quantile: float | None = None

    @property
    def charged(self) -> bool:
        return self.quantile is not None

    def wanted_mu(self, columns: int, n: int) -> float:
        """Pay for ranks `precision` of n off: a choice among 1,200 errs by about 14 / epsilon."""
        return 9.2 / (self.precision * n) * float(np.sqrt(2 * columns))

    @whole_fit
    def fit(self, X: Any, y: Any = None) -> Self:
        """Choose the ends. Args and errors as for `DPStandardScaler.fit`."""
        refuse_other_types(self)
        x = self._numbers(X, reset=True)
        middle, half = self._bounds(x.shape[1])
        self.privacy_ = None
        if self.quantile is None or trying():
            self.low_: Floats = middle - half
            self.high_: Floats = middle + half
            return self
        quantile = real_number("quantile", self.quantile)
        if not 0 < quantile < 0.5:
            raise ValueError(
                f"quantile must be between 0 and 0.5, got {quantile:g}; 0.01 is a usual choice."
            )
        price = self._price(len(x))
        columns = x.entries_of_columns() if isinstance(x, SparseRows) else x.T
        nothing = self._in_range(np.zeros(x.shape[1]), middle, half)[0]
        candidates = [candidates_of(float(-m / h)) for m, h in zip(middle, half, strict=True)]
        low, high, guarantee = select_tails(
            (
                Column(
                    np.where(np.isnan(column), np.nan, self._in_range(column, m, h)[0]),
                    zero,
                    len(x) - len(column),
                )
                for column, m, h, zero in zip(columns, middle, half, nothing, strict=True)
            ),
            candidates,
            quantile * price.n,
            **self._terms(price),
        )
        crossed = high <= low  # too few values for the noise: the public range
        self.low_ = middle + half * np.where(crossed, -1.0, low)
        self.high_ = middle + half * np.where(crossed, 1.0, high)
        coarse = sum(map(are_coarse, low, high, candidates))
        if coarse:
            said = COARSE.format(coarse, "" if coarse == 1 else "s")
            price = price._replace(said=(*price.said, said))
        self._state(guarantee, price)
        return self

    def transform(self, X: Any) -> Any:
        """X with the ends at -1 and 1, and cut to them; NaN stays; shape (n, columns).

        Of a sparse table a sparse one if 0 is in the middle of every column's ends, as with
        ``lower=-1, upper=1``.
        """
        return self._mapped(X)

    def inverse_transform(self, X: Any) -> Floats:
        """X in the columns' own units again, what was cut excepted; shape (n, columns), dense."""
        check_is_fitted(self)
        given = checked_table(self, X, reset=False, dtype=np.float64, ensure_all_finite="allow-nan")
        found: Floats = self.low_ + (given + 1) / 2 * (self.high_ - self.low_)
        return found

    def _map(self, x: Floats, columns: Any) -> Floats:
        low, high = self.low_[columns], self.high_[columns]
        return (np.clip(x, low, high) - low) / (high - low) * 2 - 1
