"""Privacy bugs of released statistics, put into this library for as long as a ``with`` lasts. For
testing detectors only.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from dp_accounting import GaussianDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from scipy.sparse import coo_array, csr_array

from dpoptim.accounting import accountant, gdp_mu, selection
from dpoptim.data import encoding, input_arrays
from dpoptim.data.schema import Column, Schema
from dpoptim.data.sparse_rows import SparseRows
from dpoptim.estimators import linear, linear_fit
from dpoptim.evaluation import evaluate as evaluate_module
from dpoptim.evaluation import regressor
from dpoptim.gate import FilteredGate, TrialsGate
from dpoptim.preprocessing import class_counts, private_step, standard_scaler
from dpoptim.preprocessing.imputer import DPImputer
from dpoptim.preprocessing.min_max_scaler import DPMinMaxScaler
from dpoptim.preprocessing.private_step import BoundedColumns
from dpoptim.solvers import linear_sums
from dpoptim.solvers import problem as problem_module
from dpoptim.solvers import sufficient_statistics as sums_module
from dpoptim.solvers.linear_model import LinearModel, as_tensor
from dpoptim.statistics import Floats, NoisySum, bounded_sum, release_sum
from dpoptim.summaries.groups import Groups
from dpoptim.tuning import search as search_module
from dpoptim.tuning.search_event import SHAPE


def replaced(*changes: tuple[Any, str, Any]) -> AbstractContextManager[Any]:
    """Other functions in the place of (owner, name)."""
    stack = ExitStack()
    for owner, name, other in changes:
        stack.enter_context(patch.object(owner, name, other))
    return stack


def values_not_cut() -> AbstractContextManager[Any]:
    """Public ranges scale, but do not bound; nor does the sum."""

    def plain(self: Any, x: Floats, middle: Floats, half: Floats) -> Any:
        missing = np.isnan(x)
        return np.where(missing, 0.0, (x - middle) / half), missing

    def total(table: Any, cells: Any, norm_bound: float) -> Floats:
        return np.asarray(cells(table[:], ...).sum(1), dtype=np.float64)

    return replaced((BoundedColumns, "_in_range", plain), (private_step, "sum_of_cells", total))


def entries_not_cut() -> AbstractContextManager[Any]:
    """What a sparse table stores is scaled by public ranges, and added as it is."""
    honest = private_step.sum_of_cells

    def total(table: Any, cells: Any, norm_bound: float) -> Floats:
        if not isinstance(table, SparseRows):
            return honest(table, cells, norm_bound)
        found = np.asarray(cells(np.zeros(table.shape), ...).sum(1), dtype=np.float64)
        for values, columns in table.entries():
            for part, added in zip(found, cells(np.zeros(len(values)), columns), strict=True):
                np.subtract.at(part, columns, added)
            np.add.at(found[0], columns, values)
        return found

    return replaced((private_step, "sum_of_cells", total), (standard_scaler, "sum_of_cells", total))


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


def values_in_each_group() -> AbstractContextManager[Any]:
    """A record's values add to the sums of all groups, at the price of one."""

    def sums(self: Groups, rows: Floats, norm_bound: float) -> Floats:
        return np.tile(bounded_sum(rows, norm_bound), (self.count, 1))

    return replaced((Groups, "sums", sums))


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
def scatter_without_noise() -> Iterator[None]:
    """An evaluation's sums are charged, and how far its records scatter is read off them."""
    honest = regressor.released_sum

    def release(gate: Any, rows: Floats, *settings: Any) -> Any:
        noisy, deviation = honest(gate, rows, *settings)
        return (noisy if rows.shape[1] == 3 else rows.sum(0)), deviation

    with patch.object(regressor, "released_sum", release):
        yield


@contextmanager
def scatter_of_losses_of_the_data() -> Iterator[None]:
    """An evaluation's counts are charged, and its interval is as long as true losses scatter."""
    honest = evaluate_module.classifier_rows
    losses: list[Floats] = []

    def rows(*table: Any) -> Floats:
        found = honest(*table)
        losses.append(found[:, -1])
        return found

    def variance(*released: Any, largest: float, **_: Any) -> float:
        return float(np.var(losses[-1])) * largest**2

    with replaced(
        (evaluate_module, "classifier_rows", rows), (evaluate_module, "variance_of_loss", variance)
    ):
        yield


@contextmanager
def dates_between_the_first_and_the_last() -> Iterator[None]:
    """A column of dates is scaled by the dates that it holds."""
    honest = encoding.scaled_into_bounds

    def scaled(numbers: Floats, column: Column, schema: Schema) -> Floats:
        if column.kind == "date" and len(numbers) > 1:
            held = float(np.nanmin(numbers)), float(np.nanmax(numbers)) + 1
            column = replace(column, bounds=held)
        return honest(numbers, column, schema)

    with patch.object(encoding, "scaled_into_bounds", scaled):
        yield


@contextmanager
def dates_not_cut() -> Iterator[None]:
    """A schema's bounds scale dates, but do not bound them."""
    honest = encoding.scaled_into_bounds

    def scaled(numbers: Floats, column: Column, schema: Schema) -> Floats:
        if column.kind == "date" and column.bounds is not None:
            return encoding.to_unit(numbers, column.bounds)
        return honest(numbers, column, schema)

    with patch.object(encoding, "scaled_into_bounds", scaled):
        yield


@contextmanager
def ends_too_sharp() -> Iterator[None]:
    """The two ends of a range are chosen at the price of one."""
    honest = FilteredGate.select

    def select(gate: Any, scores: Any, *, norm_bound: float, epsilon: float) -> int:
        return honest(gate, scores, norm_bound=norm_bound / 2**0.5, epsilon=epsilon)

    with patch.object(FilteredGate, "select", select):
        yield


@contextmanager
def categories_of_the_data() -> Iterator[None]:
    """Categories are charged for, and found by the true counts."""
    honest = release_sum

    def release(total: Floats, **settings: Any) -> NoisySum:
        noisy = honest(total, **settings)
        return NoisySum(np.array(total), 1e-9, noisy.guarantee)

    with patch.object(private_step, "release_sum", release):
        yield


@contextmanager
def cross_products_for_free() -> Iterator[None]:
    """The noise of a regression's sums is for x x^T alone, and x y comes on top."""
    honest = release_sum

    def release(total: Floats, *, norm_bound: float, **settings: Any) -> NoisySum:
        return honest(total, norm_bound=norm_bound / 2**0.5, **settings)

    with patch.object(sums_module, "release_sum", release):
        yield


def raw_shares() -> AbstractContextManager[Any]:
    """Nothing sees that a record's shares add up to 1 at most."""

    def raw(shares: Any) -> Any:
        return as_tensor(shares).double().flatten()

    return replaced((problem_module, "bounded_shares", raw), (sums_module, "bounded_shares", raw))


@contextmanager
def rows_of_a_person_in_full() -> Iterator[None]:
    """Each of a person's rows counts like another person's."""
    honest = linear_fit.of_persons

    def full(owners: Any, *arguments: Any, **settings: Any) -> Any:
        x, y, shares, weights = honest(owners, *arguments, **settings)
        return x, y, (shares > 0).astype(np.float64), weights

    with raw_shares(), patch.object(linear_fit, "of_persons", full):
        yield


@contextmanager
def weights_above_one() -> Iterator[None]:
    """A heavy class multiplies what its records add."""

    def as_given(class_weight: Any, classes: Any) -> Any:
        return class_weight and np.array([class_weight[name] for name in classes.tolist()])

    with raw_shares(), patch.object(linear, "public_weights", as_given):
        yield


@contextmanager
def weights_after_clipping() -> Iterator[None]:
    """A row's weight multiplies its clipped gradient."""
    honest = LinearModel.clipped_sum

    def clipped_sum(self: Any, *given: Any, weights: Any = None, **known: Any) -> Any:
        if weights is not None:
            known["shares"] = known["shares"] * weights
        return honest(self, *given, **known)

    with patch.object(LinearModel, "clipped_sum", clipped_sum):
        yield


def compiled_rows_read_low() -> AbstractContextManager[Any]:
    """The compiled sum takes rows for half as long as they are."""
    honest = linear_sums.clipped_sum

    def clipped_sum(*given: Any, squared_row_norms: Any, **known: Any) -> Any:
        return honest(*given, squared_row_norms=squared_row_norms / 4, **known)

    return patch.object(linear_sums, "clipped_sum", clipped_sum)


@contextmanager
def weights_in_sums_not_cut() -> Iterator[None]:
    """Weights in sums are relative to a bound that does not bound them."""
    honest = linear.weights_of_rows

    def as_given(sample_weight: Any, *, rows: int, most: Any) -> Any:
        return honest(sample_weight, rows=rows)

    with raw_shares(), patch.object(linear, "weights_of_rows", as_given):
        yield


def pieces_measured_apart() -> AbstractContextManager[Any]:
    """What a sparse table stores of an entry is not added up before its row is measured."""

    def as_stored(x: Any) -> Any:
        entries = coo_array(x)
        order = np.argsort(entries.row, kind="stable")
        ends = np.concatenate([[0], np.bincount(entries.row, minlength=x.shape[0]).cumsum()])
        return csr_array((entries.data[order], entries.col[order], ends), shape=x.shape)

    return replaced((input_arrays, "canonical", as_stored))


def sharp_event(epsilon: float, delta: float, neighboring: str, mean_trials: float) -> Any:
    """Every trial may cost as much as the whole search."""
    scale = 2.0 if neighboring == "replace-one" else 1.0
    trial = GaussianDpEvent(scale / gdp_mu(epsilon, delta))
    return RepeatAndSelectDpEvent(trial, mean_trials, SHAPE)


@contextmanager
def order_of_scores_is_free() -> Iterator[None]:
    """A search's accounting forgets that a record changes how many trials are better."""
    honest = selection.SelectionProfile.__init__

    def init(self: Any, *settings: Any) -> None:
        honest(self, *settings)
        self._ratio = np.ones_like(self._ratio)

    with fresh_epsilons(), patch.object(selection.SelectionProfile, "__init__", init):
        yield


@contextmanager
def fresh_epsilons() -> Iterator[None]:
    accountant._epsilon.cache_clear()
    accountant._points.cache_clear()
    try:
        yield
    finally:
        accountant._epsilon.cache_clear()
        accountant._points.cache_clear()


def losing_trials_not_charged() -> AbstractContextManager[Any]:
    """A search pays for its winner alone, and says so."""
    honest, made = search_module.compute_epsilon, TrialsGate.__init__

    def of_one(event: Any, *settings: Any) -> Any:
        return honest(event.event, *settings)

    def init(self: Any, *, event: Any, **settings: Any) -> None:
        made(self, event=event.event, **settings)
        self.event = event

    return replaced(
        (search_module, "search_event", sharp_event),
        (search_module, "compute_epsilon", of_one),
        (TrialsGate, "__init__", init),
    )


@contextmanager
def trials_as_sharp_as_one() -> Iterator[None]:
    """The charge is that of an honest search, but each trial has the noise of a whole one."""
    honest = search_module.gdp_epsilon

    def sharper(mu: float, delta: float) -> float:
        return honest(2 * mu, delta)

    unchecked = (TrialsGate, "rehearse", lambda self, fit: None)
    with replaced((search_module, "gdp_epsilon", sharper), unchecked):
        yield
