"""Ranges of numbers to predict: a bound on |y|, or the lowest and the highest y."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dpoptim import OtherRunsWarning
from dpoptim.estimators import DPLinearRegression, DPSGDRegressor
from dpoptim.evaluation import evaluate_regressor
from dpoptim.target_range import TargetRange

NUMBERS = st.floats(-1e300, 1e300)


@given(NUMBERS, NUMBERS, st.floats(allow_nan=False))
def test_what_is_learnt_is_never_longer_than_one(low: float, high: float, y: float) -> None:
    assume(low < high)
    try:
        allowed = TargetRange.of((low, high))
    except ValueError:
        assert high - low < 1e-300  # too narrow to be divided by
    else:
        assert abs(allowed.scaled(np.array([y]))[0]) <= 1


@given(st.floats(-1e6, 1e6), st.floats(0.01, 1e6), st.floats(0, 1))
def test_numbers_in_the_range_come_back(low: float, width: float, at: float) -> None:
    allowed, y = TargetRange.of((low, low + width)), low + at * width
    assert allowed.unscaled(allowed.scaled(np.array([y])))[0] == pytest.approx(y, abs=1e-9 * 1e6)


@pytest.mark.parametrize("bound", [(0.0, 1.0), (1e308, 1.7e308)])
def test_no_warning_tells_of_a_record(bound: Any) -> None:
    """A single huge number was told of by numpy, which warns of what it divides."""
    x, y = np.linspace(-1, 1, 40)[:, None], np.zeros(40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", OtherRunsWarning)  # both fits are of one array
        for y[7] in (1.7e308, -1.7e308):
            DPLinearRegression(1.0, 1e-4, data_norm=1.0, target_bound=bound).fit(x, y)
            for given in ((y, x[:, 0]), (x[:, 0], y)):
                evaluate_regressor(*given, target_bound=bound, epsilon=1.0, delta=1e-4)


@pytest.mark.parametrize(
    "bound", [(1.0, 1.0), (2.0, 1.0), (0.0, math.inf), (0.0, 5e-324), (1.0,), (1, 2, 3), "12"]
)
def test_other_ranges_are_refused_by_name(bound: Any) -> None:
    with pytest.raises(ValueError, match="target_bound must be"):
        TargetRange.of(bound)


@pytest.mark.parametrize("kind", [DPLinearRegression, DPSGDRegressor])
def test_a_range_is_a_bound_that_was_moved(kind: Any) -> None:
    """The same noise on the same targets, moved by the middle: predictions move alike."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (400, 2))
    y = x @ [1.0, -1.0]
    settings: Any = {"epsilon": 2.0, "noise_seed": 0, "random_state": 0}
    if kind is DPLinearRegression:
        del settings["random_state"]
    about_zero = kind(**settings, target_bound=2.0).fit(x, y).predict(x)
    moved = kind(**settings, target_bound=(98.0, 102.0)).fit(x, y + 100).predict(x)
    np.testing.assert_allclose(moved - 100, about_zero, atol=1e-4)


def test_prices_are_learnt_better_by_their_range() -> None:
    """Of targets far from 0 a bound on |y| leaves most of its range empty."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (200, 3))
    y = 450 + 40 * x @ [1.0, 0.0, -1.0]
    settings: Any = {"epsilon": 0.5, "delta": 3e-3, "data_norm": 2.0}
    scores = [
        np.mean(
            [
                DPLinearRegression(**settings, target_bound=bound, noise_seed=seed)
                .fit(x, y)
                .score(x, y)
                for seed in range(3)
            ]
        )
        for bound in (550.0, (350.0, 550.0))
    ]
    assert scores[0] < 0.8
    assert scores[1] > 0.95


def test_scores_are_those_of_targets_that_were_moved() -> None:
    y = np.linspace(-1, 1, 2_000)
    settings: Any = {"epsilon": 1.0, "noise_seed": 0}
    about_zero = evaluate_regressor(0.9 * y, y, target_bound=1.0, **settings)
    moved = evaluate_regressor(0.9 * y + 7, y + 7, target_bound=(6.0, 8.0), **settings)
    assert moved.r2.value == pytest.approx(about_zero.r2.value, abs=1e-9)
    assert moved.squared_error.value == pytest.approx(about_zero.squared_error.value, abs=1e-9)
