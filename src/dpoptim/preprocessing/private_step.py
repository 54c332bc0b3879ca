"""The base of private transformers: public bounds, a budget, one release in ``fit``."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from dp_accounting import GaussianDpEvent, NoOpDpEvent
from numpy.typing import NDArray
from sklearn.base import OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.accounting.guarantee import Guarantee, neighbours_differ_by
from dpoptim.data.input_arrays import checked_table
from dpoptim.data.sparse_rows import SparseRows
from dpoptim.estimators.repeats import Fit
from dpoptim.estimators.settings import PrivateSettings
from dpoptim.statistics import (
    BOUND_ROUNDING,
    IN_CACHE,
    Cells,
    Floats,
    NoisySum,
    Price,
    Terms,
    release_sum,
    sum_of_cells,
)

Bound = float | Sequence[float]
_trying: ContextVar[bool] = ContextVar("trying", default=False)


@contextmanager
def only_tried() -> Iterator[None]:
    """Steps fitted in this ``with`` release and charge nothing: they learn made-up numbers."""
    token = _trying.set(True)
    try:
        yield
    finally:
        _trying.reset(token)


def trying() -> bool:
    """Whether steps are `only_tried`."""
    return _trying.get()


@dataclass(kw_only=True, eq=False, repr=False)
class ChargedFit(PrivateSettings):
    """Something that learns from private records by one release, and is charged for it."""

    n: int | None = None

    def _price(self, rows: int) -> Price:
        """The price of this fit."""
        if self.epsilon is None:
            raise ValueError(
                f"epsilon is missing: {type(self).__name__} learns from private records. Fix: "
                "epsilon=, or put it into a dpoptim.preprocessing.PrivatePipeline, which shares "
                "its budget out."
            )
        return Price.of(
            rows, epsilon=self.epsilon, delta=self.delta, neighboring=self.relation, n=self.n
        )

    def _terms(self, price: Price) -> Terms:
        """On what terms the release is made."""
        return Terms(
            mu=price.mu,
            delta=price.delta,
            neighboring=self.relation,
            label=self._named,
            ledger=self.ledger,
            noise_seed=self.noise_seed,
        )

    def _state(self, guarantee: Guarantee, price: Price) -> None:
        event = GaussianDpEvent(neighbours_differ_by(self.relation) / price.mu)
        fit = Fit(event, price.noted(guarantee), price.n)
        self.privacy_: Guarantee | None = self._counted(fit)

    def _released(self, total: Floats, norm_bound: float, price: Price) -> NoisySum:
        """``total`` with noise, charged; sets ``privacy_``."""
        if trying():
            made_up = np.full(total.shape, float(price.n))
            return NoisySum(
                made_up, 1.0, compute_epsilon(NoOpDpEvent(), price.delta, self.relation)
            )
        released = release_sum(total, norm_bound=norm_bound, **self._terms(price))
        self._state(released.guarantee, price)
        return released


class PrivateStep(TransformerMixin, ChargedFit, ABC):
    """A transformer that learns from private records."""

    # of what is learnt, in half ranges, that a pipeline pays for
    precision: ClassVar[float] = 0.01

    @property
    def charged(self) -> bool:
        """Whether fitting releases anything."""
        return True

    @abstractmethod
    def wanted_mu(self, columns: int, n: int) -> float:
        """The price at which a pipeline finds it precise enough; public numbers only."""

    def _numbers(self, x: Any, *, reset: bool) -> Any:
        """``x`` as floats, (n, columns), or `SparseRows`; NaN stands for a missing value."""
        return checked_table(
            self,
            x,
            reset=reset,
            accept_sparse="csr",
            dtype=np.float64,
            ensure_all_finite="allow-nan",
            ensure_min_samples=1,
        )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.non_deterministic = tags.non_deterministic and self.charged
        return tags


class SummedStep(PrivateStep):
    """A step that learns from one noisy sum."""

    def wanted_mu(self, columns: int, n: int) -> float:
        return math.sqrt(self.norm_bound(columns)) / (self.precision * n)

    @abstractmethod
    def norm_bound(self, columns: int) -> float:
        """How long the vector is that one record adds, at most."""

    def _release(self, x: Any, cells: Cells) -> tuple[Floats, NoisySum, int]:
        """The noisy sum of what values add, (k, columns), charged, and the public n.

        Sets ``privacy_``.

        Args:
            x: an array or `SparseRows`. cells: each number that a value adds, by itself.
        """
        price, bound = self._price(len(x)), self.norm_bound(self.n_features_in_)
        total = sum_of_cells(x, cells, bound)
        released = self._released(total.ravel(), bound * BOUND_ROUNDING, price)
        return released.values.reshape(total.shape), released, price.n


@dataclass(eq=False, repr=False)
class BoundedColumns(OneToOneFeatureMixin, PrivateStep):
    """A step whose columns have public bounds, ``lower`` and ``upper``."""

    lower: Bound | None = None
    upper: Bound | None = None

    def _bounds(self, columns: int) -> tuple[Floats, Floats]:
        """Middle and half width of each column's public range, shape (columns,) each.

        Raises:
            ValueError: missing bounds, as many as there are not columns, or a range without width.
        """
        ends = []
        for name in ("lower", "upper"):
            given = getattr(self, name)
            if given is None:
                raise ValueError(
                    f"{name} is missing: the public range of every column, from what can be known "
                    f"without the data. Fix: {name}=, one number or one for each column."
                )
            values = np.asarray(given, dtype=np.float64)
            if values.shape not in ((), (columns,)) or not np.isfinite(values).all():
                raise ValueError(
                    f"{name} must be one finite number, or one for each of the {columns} columns."
                )
            ends.append(np.broadcast_to(values, (columns,)))
        lower, upper = ends
        if not (lower < upper).all():
            column = int(np.argmax(~(lower < upper)))
            raise ValueError(
                f"lower must be below upper; column {column} has {lower[column]:g} and "
                f"{upper[column]:g}."
            )
        return (lower + upper) / 2, (upper - lower) / 2

    def _in_range(self, x: Floats, middle: Any, half: Any) -> tuple[Floats, NDArray[np.bool_]]:
        """``x`` in half widths from the middle, cut to [-1, 1], 0 if missing; and what is."""
        missing = np.isnan(x)
        some = bool(missing.any())
        with np.errstate(over="ignore"):
            scaled = (np.where(missing, 0.0, x) if some else x) - middle
            scaled /= half
        np.clip(scaled, -1.0, 1.0, out=scaled)
        return (np.where(missing, 0.0, scaled) if some else scaled), missing

    def _mapped(self, x: Any) -> Any:
        """`_map` of a new table: an array, or a sparse table where 0 stays 0."""
        check_is_fitted(self)
        x = self._numbers(x, reset=False)
        if isinstance(x, SparseRows):
            return x.mapped(self._map)
        mapped, step = np.empty(x.shape), max(1, IN_CACHE // x.shape[1])
        for start in range(0, len(x), step):
            mapped[start : start + step] = self._map(x[start : start + step], ...)
        return mapped

    @abstractmethod
    def _map(self, x: Floats, columns: Any) -> Floats:
        """Entries transformed. Args: the columns that they are in, or ``...`` for (n, columns)."""
