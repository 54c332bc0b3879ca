"""Tries to falsify what is promised of released statistics: sums, histograms, and the sums of a
regression.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

import dpoptim
from dpoptim.audit.side_by_side import releases_kept, separate, without_canary
from dpoptim.data.sparse_rows import SparseRows, canonical
from dpoptim.solvers import Budget
from dpoptim.solvers.linear_model import LinearModel
from dpoptim.solvers.sufficient_statistics import sufficient_statistics
from dpoptim.statistics import (
    BOUND_ROUNDING,
    bounded_sum,
    histogram_bound,
    release_sum,
    sum_of_cells,
)
from spies import sums_seen

HOSTILE = [1e300, -1e300, 1e-300, 3e38, 0.0, 1e6, -1.0, float("nan"), float("inf")]


@settings(max_examples=60)
@given(
    hostile=st.lists(st.sampled_from(HOSTILE), min_size=3, max_size=3),
    seed=st.integers(0, 1000),
    bound=st.sampled_from([1e-3, 1.0, 7.3, 1e9]),
)
def test_one_record_moves_a_bounded_sum_by_its_bound(
    hostile: list[float], seed: int, bound: float
) -> None:
    rows = np.random.default_rng(seed).normal(size=(40, 3)) * bound
    rows[0] = hostile
    # as long as the bound, but for rounding
    rows[1] = np.array([1.0, 1.0, 1.0]) * bound * (1 + 1e-15) / 3**0.5
    whole = bounded_sum(rows, bound)
    assert np.isfinite(whole).all()
    for left_out in (0, 1, 5):
        moved = np.linalg.norm(whole - bounded_sum(np.delete(rows, left_out, 0), bound))
        assert moved <= bound * BOUND_ROUNDING
    np.testing.assert_array_equal(whole, bounded_sum(rows[::-1], bound))  # exact: no order is seen


@settings(max_examples=60)
@given(
    hostile=st.lists(st.sampled_from(HOSTILE), min_size=5, max_size=5),
    seed=st.integers(0, 1000),
    bound=st.sampled_from([1e-3, 1.0, 7.3]),
    public=st.sampled_from([0.0, 0.3, 1e9]),
)
def test_one_record_moves_a_sum_of_cells_by_its_bound(
    hostile: list[float], seed: int, bound: float, public: float
) -> None:
    """Whatever its values add; by a sparse table's entries as by all values, to the last bit."""
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(40, 5)) * (rng.random((40, 5)) < 0.3)
    table[0] = hostile
    table[1] = bound * (1 + 1e-15)  # each value as much as it may add, but for rounding
    share = bound / np.sqrt(5)

    def cells(values: np.ndarray, columns: Any) -> np.ndarray:
        ends = np.broadcast_to(np.arange(5.0), (1, 5))[0][columns] * public
        with np.errstate(over="ignore", invalid="ignore"):
            return np.stack([values * share, values**2 - ends, np.where(values == 0, public, 1.0)])

    def sparse(x: np.ndarray) -> SparseRows:
        return SparseRows(canonical(csr_array(x)))

    whole = sum_of_cells(table, cells, bound)
    assert np.isfinite(whole).all()
    np.testing.assert_array_equal(sum_of_cells(sparse(table), cells, bound), whole)
    np.testing.assert_array_equal(sum_of_cells(table[::-1], cells, bound), whole)
    for place in (0, 1, 5):
        others = np.delete(table, place, 0)
        for kind in (np.asarray, sparse):
            left = sum_of_cells(kind(others), cells, bound)
            assert np.linalg.norm(whole - left) <= bound * BOUND_ROUNDING
            assert place != 1 or np.linalg.norm(whole - left) > bound / 10


@settings(max_examples=25)
@given(
    hostile=st.lists(st.sampled_from(HOSTILE), min_size=4, max_size=4), seed=st.integers(0, 1000)
)
def test_one_record_moves_the_sums_of_a_regression_by_their_bound(
    hostile: list[float], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(30, 3)), rng.normal(size=30)
    x[0], y[0] = hostile[:3], hostile[3]
    empty, nothing = x.copy(), y.copy()
    empty[0], nothing[0] = np.nan, 0.0  # a record that counts as zero
    with sums_seen() as seen:
        for table in ((x, y), (empty, nothing)):
            sufficient_statistics(
                LinearModel("squared", 3), table, Budget(1e-5, mu=1.0), radius=1.5, target_bound=0.7
            )
    (one, bound), (other, _) = seen
    assert float((one - other).norm()) <= bound
    assert bound < 1.4143
    empty[0], nothing[0] = 9 * rng.normal(size=3), -9 * np.sign(hostile[3])  # far from the record
    with sums_seen() as seen:
        for table in ((x, y), (empty, nothing)):
            sufficient_statistics(
                LinearModel("squared", 3),
                table,
                Budget(1e-5, mu=1.0),
                radius=1.5,
                target_bound=0.7,
                neighboring="replace-one",
            )
    (one, bound), (other, _) = seen
    assert float((one - other).norm()) <= 2 * bound < 2.1214


def audited(release: Any, neighboring: str = "zero-out", trials: int = 16_000) -> float:
    """The mu that the best attack certifies, of many releases side by side in one long vector."""

    def world(presence: float, seed: int) -> np.ndarray:
        with releases_kept(trials) as kept:
            release(presence, seed, trials)
        return torch.stack(kept).numpy()

    return separate(world, low=without_canary(neighboring), confidence=1 - 1e-6, seed=3).mu


def of_a_sum(
    presence: float, seed: int, trials: int, *, fault: float = 1.0, neighboring: str = "zero-out"
) -> None:
    """Every entry a trial: the record is as long as the bound in each of them."""
    release_sum(
        np.full(trials, presence),
        norm_bound=fault,
        mu=1.5,
        delta=1e-5,
        neighboring=neighboring,
        label="audit",
        noise_seed=seed,
    )


@pytest.mark.parametrize("neighboring", ["zero-out", "replace-one", "add-or-remove-one"])
def test_a_release_costs_what_it_claims_and_no_more(neighboring: str) -> None:
    found = audited(lambda p, s, t: of_a_sum(p, s, t, neighboring=neighboring), neighboring)
    assert 0.9 * 1.5 <= found <= 1.5


def test_noise_for_half_the_bound_is_refuted() -> None:
    assert audited(lambda p, s, t: of_a_sum(p, s, t, fault=0.5)) > 1.5 * 1.2


def test_it_is_charged_before_it_is_drawn() -> None:
    with dpoptim.Ledger(neighboring="zero-out", epsilon=1.0, delta=1e-5) as ledger:
        settings: Any = {"delta": 1e-5, "neighboring": "zero-out", "label": "x", "ledger": ledger}
        with pytest.raises(dpoptim.BudgetExceeded):
            release_sum(np.zeros(2), norm_bound=1.0, mu=3.0, **settings)
        release_sum(np.zeros(2), norm_bound=1.0, mu=0.1, **settings)
        assert [entry.state for entry in ledger.entries()] == ["committed"]


def test_a_histogram_moves_by_its_bound() -> None:
    assert histogram_bound("zero-out") == 1.0
    # The gate's noise under replace-one is for twice the bound: sqrt 2, as one record leaves a bin
    # and enters another.
    assert 2 * histogram_bound("replace-one") == pytest.approx(2**0.5)
