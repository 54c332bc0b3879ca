"""Privacy bugs of released statistics, put into this library for as long as a ``with`` lasts. For
testing detectors only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from dpoptim.evaluation import evaluate as evaluate_module
from dpoptim.preprocessing import class_counts, private_step
from dpoptim.preprocessing.imputer import DPImputer
from dpoptim.preprocessing.min_max_scaler import DPMinMaxScaler
from dpoptim.preprocessing.private_step import BoundedColumns
from dpoptim.solvers import sufficient_statistics as sums_module
from dpoptim.statistics import Floats, NoisySum, release_sum


@contextmanager
def values_not_cut() -> Iterator[None]:
    """Public ranges scale, but do not bound; nor does the sum."""

    def plain(self: Any, x: Floats, middle: Floats, half: Floats) -> Any:
        missing = np.isnan(x)
        return np.where(missing, 0.0, (x - middle) / half), missing

    def total(rows: Floats, norm_bound: float) -> Floats:
        return np.asarray(rows.sum(0), dtype=np.float64)

    with (
        patch.object(BoundedColumns, "_in_range", plain),
        patch.object(private_step, "bounded_sum", total),
    ):
        yield


@contextmanager
def mean_of_the_data() -> Iterator[None]:
    """A statistic is read before it is charged: the imputer charges for a noisy mean, and fills
    with the true one.
    """
    honest = DPImputer.fit

    def fit(self: Any, X: Any, y: Any = None) -> Any:
        honest(self, X, y)
        self.mean_ = np.nanmean(np.asarray(X), axis=0)
        return self

    with patch.object(DPImputer, "fit", fit):
        yield


@contextmanager
def range_of_the_data() -> Iterator[None]:
    """Bounds from the data."""
    honest = DPMinMaxScaler.fit

    def fit(self: Any, X: Any, y: Any = None) -> Any:
        honest(self, X, y)
        self.high_ = np.fmax.reduce(np.asarray(X), axis=0)
        return self

    with patch.object(DPMinMaxScaler, "fit", fit):
        yield


@contextmanager
def half_a_record() -> Iterator[None]:
    with patch.object(class_counts, "histogram_bound", lambda neighboring: 0.5):
        yield


@contextmanager
def scores_without_noise() -> Iterator[None]:
    """An evaluation is charged, and reports the true counts."""
    honest = release_sum

    def release(total: Floats, **settings: Any) -> NoisySum:
        noisy = honest(total, **settings)
        return NoisySum(np.array(total), noisy.deviation, noisy.guarantee)

    with patch.object(evaluate_module, "release_sum", release):
        yield


@contextmanager
def cross_products_for_free() -> Iterator[None]:
    """The noise of a regression's sums is for x x^T alone, and x y comes on top."""
    honest = release_sum

    def release(total: Floats, *, norm_bound: float, **settings: Any) -> NoisySum:
        return honest(total, norm_bound=norm_bound / 2**0.5, **settings)

    with patch.object(sums_module, "release_sum", release):
        yield
