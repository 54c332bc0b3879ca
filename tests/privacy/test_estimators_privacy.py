"""Tries to falsify the estimators' guarantee: what is released before noise moves by at most the
bound.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpoptim.estimators import (
    DPLinearRegression,
    DPLogisticRegression,
    DPSGDClassifier,
    DPSGDRegressor,
)
from spies import plans_attached, sums_seen

HOSTILE = [1e300, -1e300, 1e-300, 3.4e38, 0.0, 1e6]


def released_sums(
    estimator: Any, x: np.ndarray, y: np.ndarray, persons: Any = None
) -> list[tuple[Tensor, float]]:
    """The first sum that reaches the gate, without noise, and its bound: later ones depend on the
    first's noise.
    """
    with sums_seen() as seen, np.errstate(all="ignore"):  # scikit-learn's look at it adds it up
        estimator.fit(x, y, persons=persons)
    return seen


@settings(max_examples=25)
@given(
    hostile=st.lists(st.sampled_from(HOSTILE), min_size=6, max_size=6),
    seed=st.integers(0, 100),
    dtype=st.sampled_from([np.float32, np.float64]),
    kind=st.sampled_from(["logistic", "softmax", "squared", "huber", "sums"]),
    rows=st.sampled_from([1, 2, 5]),
)
def test_nobody_moves_a_sum_by_more_than_the_bound(
    hostile: Sequence[float], seed: int, dtype: Any, kind: str, rows: int
) -> None:
    """A row of one's own, or all that a person has, of which four take part."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(30, 6)).astype(dtype)
    with np.errstate(over="ignore"):
        x[:rows] = np.nan_to_num(np.asarray(hostile).astype(dtype), posinf=3e38, neginf=-3e38)
    if kind in ("logistic", "softmax"):
        classes = 2 if kind == "logistic" else 4
        y = rng.integers(0, classes, 30)
        y[10 : 10 + classes] = range(classes)
        estimator: Any = DPLogisticRegression(
            1.0, 1e-3, data_norm=2.0, classes=range(classes), steps=4, class_weight={1: 3.0}
        )
    else:
        y = rng.normal(size=30) * 3
        y[:rows] = 1e30
        estimator = DPLinearRegression(
            1.0, 1e-3, data_norm=2.0, target_bound=2.0, loss=kind, steps=4
        )
    if kind == "sums":
        estimator.set_params(solver="sufficient-statistics", loss="squared", steps=None)
    owners = None
    if rows > 1:
        owners = np.maximum(np.arange(30) - rows + 1, 0) // 2
        estimator.set_params(rows_per_person=4, noise_seed=seed)  # the same coins in both worlds
    other, labels = x.copy(), y.copy()
    other[:rows], labels[:rows] = rng.normal(size=(rows, 6)), y[-1]
    for (a, bound), (b, _) in zip(
        released_sums(estimator, x, y, owners),
        released_sums(estimator, other, labels, owners),
        strict=True,
    ):
        assert float((a - b).norm()) <= 2 * bound  # replace-one: twice the bound of one record
        assert bool(torch.isfinite(a).all())


def test_predictions_do_not_depend_on_anything_but_weights() -> None:
    """Replay: with a seed, two tables that give the same clipped rows give the same estimator."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 3)), rng.integers(0, 2, 200)
    x[5] *= 1e6
    other = x.copy()
    other[5] *= 1e3  # clipped to the same row
    fits = [
        DPLogisticRegression(1.0, 1e-4, classes=[0, 1], noise_seed=3).fit(table, y)
        for table in (x, other)
    ]
    np.testing.assert_allclose(fits[0].coef_, fits[1].coef_, rtol=1e-9)
    weights = ("coef_", "intercept_", "_weights")
    public = [
        {k: v for k, v in vars(fit).items() if k not in (*weights, "_fit_id")} for fit in fits
    ]  # a fit's identity is drawn anew, from no data
    assert repr(public[0]) == repr(public[1])


def test_networks_see_only_clipped_rows() -> None:
    """Replay: with a seed, two tables that give the same clipped rows and targets give the same
    network.
    """
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 3)), rng.normal(size=200)
    x[5] *= 2.0**20
    y[5] = 1e9
    other, targets = x.copy(), y.copy()
    other[5] *= 2.0**10
    targets[5] = 1e30
    settings: Any = {"epochs": 2, "noise_seed": 3, "random_state": 0, "target_bound": 1.0}
    fits = [
        DPSGDRegressor(1.0, 1e-4, **settings).fit(*table) for table in ((x, y), (other, targets))
    ]
    probe = rng.normal(size=(20, 3))
    np.testing.assert_array_equal(fits[0].predict(probe), fits[1].predict(probe))


def test_a_hidden_number_of_records_decides_nothing() -> None:
    """Under add-or-remove-one, batch, steps and noise were once computed from the table: 1.680
    with 7,695 rows.
    """
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(1201, 3)), rng.integers(0, 2, 1201)
    with pytest.MonkeyPatch.context() as patch:
        plans = plans_attached(patch)
        said = []
        for rows in (1201, 1200):
            model = DPSGDClassifier(
                1.0, n=1200, neighboring="add-or-remove-one", classes=[0, 1], epochs=1, noise_seed=0
            )
            said.append(model.fit(x[:rows], y[:rows]).privacy_)
    assert plans[0] == plans[1]
    assert plans[0].n == 1200
    assert said[0] == said[1]
