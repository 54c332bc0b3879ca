"""Tries to falsify the guarantee for sparse tables and for weights of rows: whatever one record
stores, and however heavy it is, what is released before noise moves by at most the bound.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from torch import Tensor

from dpoptim.data import sparse_rows
from dpoptim.data.sparse_rows import EntriesOfRows, canonical
from dpoptim.estimators import DPLinearRegression, DPLogisticRegression, DPSGDClassifier
from dpoptim.gate import planned as gate_module
from dpoptim.preprocessing import DPImputer, DPStandardScaler
from dpoptim.solvers.linear_model import LinearModel
from dpoptim.solvers.sparse_problem import SparseProblem
from spies import sums_seen

HOSTILE = [1e300, -1e300, 1e-300, 5e-324, 3.4e38, 0.0, 1e6, -1.0]
WEIGHTS = [0.0, 1e-300, 1.0, 7.0, 1e12, 1e308]
ROWS, FEATURES = 24, 6


def stored(x: np.ndarray, pieces: int, seed: int) -> Any:
    """A table whose row 0 is stored in pieces, with zeros, out of order."""
    rng = np.random.default_rng(seed)
    row, column = np.nonzero(x)
    first = row == 0
    column_of = np.concatenate([column, *[column[first]] * (pieces - 1), np.arange(FEATURES)])
    row_of = np.concatenate([row, *[row[first]] * (pieces - 1), np.zeros(FEATURES, int)])
    values = np.where(first, x[row, column] / pieces, x[row, column])
    values = np.concatenate([values, *[values[first]] * (pieces - 1), np.zeros(FEATURES)])
    order = rng.permutation(len(values))
    return sparse.coo_array((values[order], (row_of[order], column_of[order])), shape=x.shape)


def released(estimator: Any, *table: Any) -> list[tuple[Tensor, float]]:
    """Sums that reach the gate, without noise, and their bounds; none depends on earlier ones."""
    with sums_seen() as seen, np.errstate(all="ignore"):
        estimator.fit(*table)
    return seen


@settings(max_examples=60)
@given(
    hostile=st.lists(st.sampled_from(HOSTILE), min_size=FEATURES, max_size=FEATURES),
    weight=st.sampled_from(WEIGHTS),
    pieces=st.sampled_from([1, 2, 7]),
    seed=st.integers(0, 100),
    wide=st.booleans(),
    kind=st.sampled_from(["logistic", "softmax", "squared", "huber", "kl-spider", "sums"]),
)
def test_one_record_moves_no_sum_by_more_than_the_bound(
    hostile: Sequence[float], weight: float, pieces: int, seed: int, wide: bool, kind: str
) -> None:
    """Left out (of weight 0, as other values of it are not), and in the place of another."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, FEATURES)) * (rng.random((ROWS, FEATURES)) < 0.4)
    x[0] = hostile
    weights = rng.choice([0.0, 0.5, 1.0, 3.0], ROWS)
    weights[0] = weight
    common: dict[str, Any] = {"data_norm": 2.0, "steps": 3}
    if kind in ("logistic", "softmax", "kl-spider"):
        classes = 3 if kind == "softmax" else 2
        y: Any = rng.integers(0, classes, ROWS)
        solver = kind if kind == "kl-spider" else "auto"
        if kind == "kl-spider":
            common = {"data_norm": 2.0, "solver_options": {"rounds": 3}}
        model: Any = DPLogisticRegression(
            1.0, 1e-3, classes=range(classes), solver=solver, class_weight={1: 3.0}, **common
        )
    else:
        y = np.where(np.arange(ROWS) == 0, 1e30, rng.normal(size=ROWS) * 3)
        loss = "huber" if kind == "huber" else "squared"
        model = DPLinearRegression(1.0, 1e-3, target_bound=2.0, loss=loss, **common)
    if kind == "sums":
        model.set_params(solver="sufficient-statistics", steps=None, weight_bound=2.0)
    absent = weights.copy()
    absent[0] = 0.0
    other, labels, its = x.copy(), y.copy(), weights.copy()
    other[0], labels[0], its[0] = rng.normal(size=FEATURES), y[-1], 1.0
    with pytest.MonkeyPatch.context() as patch:
        if wide and kind != "sums":
            patch.setattr(sparse_rows, "WIDE", FEATURES - 1)
        worlds = [
            released(model, stored(x, pieces, seed), y, weights),
            released(model, stored(x, pieces, seed), y, absent),
            released(model, sparse.csr_array(other), labels, its),
        ]
    assert worlds[0]
    for (a, bound), (b, _), (c, _) in zip(*worlds, strict=True):
        assert float((a - b).norm()) <= bound
        assert float((a - c).norm()) <= 2 * bound
        assert bool(torch.isfinite(a).all())


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    weight=st.sampled_from([1.0, 1e300, np.inf, np.nan, -3.0]),
    size=st.sampled_from([1e-200, 1.0, 1e150, 1e300]),
    capacity=st.sampled_from([40, 10_000, 2**27]),
    bound=st.sampled_from([1e-9, 0.3, 1e6]),
)
def test_sums_of_entries_are_exact(
    seed: int, weight: float, size: float, capacity: int, bound: float
) -> None:
    """By hand, also of what an estimator refuses: one row with all entries, beside others."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(40, 9)) * (rng.random((40, 9)) < 0.3)
    x[0] = rng.normal(size=9) * size
    y, shares = rng.integers(0, 3, 40), rng.random(40) * 1.5
    weights = np.where(np.arange(40) == 0, weight, rng.random(40))
    problem = SparseProblem(LinearModel("softmax", 9, outputs=3), capacity=capacity)
    points = [(1.0, torch.from_numpy(rng.normal(size=30))) for _ in range(2)]
    terms = [points[0], (-1.0, points[1][1])]

    def total(rows: np.ndarray) -> Tensor:
        table = EntriesOfRows(canonical(sparse.csr_array(x[rows])))
        batch = problem.prepare((table[0 : len(rows)], y[rows], shares[rows], weights[rows]))
        return problem.clipped_sum(batch, terms, bound)

    with np.errstate(all="ignore"):
        whole, without = total(np.arange(40)), total(np.arange(1, 40))
        assert float((whole - without).norm()) <= bound
        assert bool(torch.isfinite(whole).all())
        # in any order to the last bit
        assert torch.equal(whole, total(rng.permutation(40)))


@settings(max_examples=30)
@given(
    hostile=st.lists(
        st.sampled_from([*HOSTILE[:-3], np.nan]), min_size=FEATURES, max_size=FEATURES
    ),
    pieces=st.sampled_from([1, 3]),
    seed=st.integers(0, 100),
)
def test_statistics_of_a_sparse_table_move_by_at_most_the_bound(
    hostile: Sequence[float], pieces: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, FEATURES)) * (rng.random((ROWS, FEATURES)) < 0.4)
    x[0] = hostile
    for step in (DPStandardScaler(-2, 3), DPImputer(-2, 3)):
        step.set_params(epsilon=1.0, delta=1e-3, neighboring="add-or-remove-one", n=ROWS)
        (a, bound), (b, _) = (
            released(step, table)[0] for table in (stored(x, pieces, seed), sparse.csr_array(x[1:]))
        )
        assert float((a - b).norm()) <= bound


@pytest.mark.parametrize("method", ["dp-sgd", "value-sgd"])
def test_networks_clip_after_weighting(method: str) -> None:
    """A record of the largest weight moves a step's sum by at most the clip norm."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, FEATURES)), rng.integers(0, 2, 60)
    seen: list[Tensor] = []

    def spy(stream: Any, totals: list[Tensor], deviation: float) -> None:
        seen.extend(total.clone() for total in totals)

    model = DPSGDClassifier(
        1.0,
        1e-3,
        classes=[0, 1],
        epochs=1,
        batch_size=60,
        random_state=0,
        clip_norm=0.5,
        method=method,
    )
    moved = {}
    for weight in (1e308, 1e9, 1.0, 0.0):
        seen.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gate_module, "add_normal", spy)
            model.set_params(noise_seed=0).fit(x, y, np.where(np.arange(60) == 7, weight, 1.0))
        moved[weight] = torch.cat([each.flatten() for each in seen])
    norms = {w: float((total - moved[0.0]).norm()) for w, total in moved.items()}
    assert norms[1.0] > 0.0
    least = 0.49 if method == "dp-sgd" else 0.05  # where a bound on the norm is above it
    assert least < norms[1e9] <= 0.5
    assert least < norms[1e308] <= 0.5
