"""Targets that take up a small part of their public range are learnt in that part."""

from typing import Any

import numpy as np
import pytest

from dpoptim import Ledger
from dpoptim.estimators import DPLinearRegression

ROWS, COLUMNS = 4_000, 3
SHARED: Any = {"delta": 1e-5, "noise_seed": 0}


def table(fill: float, middle: float, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Columns in [-1, 1], and targets that scatter by ``fill`` / 3 about ``middle``."""
    rng = np.random.default_rng(1)
    x = rng.uniform(-1, 1, (rows, COLUMNS))
    y = x @ [1.0, -0.5, 0.5] + 0.4 * rng.normal(size=rows)
    return x, np.clip(middle + fill / 3 * y / y.std(), -1, 1)


@pytest.mark.parametrize(("fill", "middle"), [(1.0, 0.0), (0.1, 0.5), (0.01, -0.8)])
def test_more_epsilon_is_never_worse_however_little_of_the_range_targets_take_up(
    fill: float, middle: float
) -> None:
    x, y = table(fill, middle)
    best = np.corrcoef(y, x @ np.linalg.lstsq(x, y - y.mean(), rcond=None)[0])[0, 1] ** 2
    scores = [
        DPLinearRegression(epsilon, target_bound=1.0, **SHARED).fit(x, y).score(x, y)
        for epsilon in (0.5, 1.0, 3.0, 5.0, 10.0, 30.0)
    ]
    assert (np.diff(scores) > -0.02).all()
    assert scores[0] > 0.8 * best
    assert scores[1] > 0.95 * best


@pytest.mark.parametrize("epsilon", [0.5, 30.0])
def test_targets_that_no_column_explains_get_their_mean(epsilon: float) -> None:
    """About 0 is as good as the mean: noise costs a little, and little of it is left."""
    x, y = table(0.02, 0.6)
    y = np.roll(y, 1)
    assert DPLinearRegression(epsilon, target_bound=1.0, **SHARED).fit(x, y).score(x, y) > -0.05


def test_the_whole_fit_is_one_entry_of_a_ledger() -> None:
    x, y = table(0.1, 0.5)
    ledger = Ledger(epsilon=1.0, delta=1e-5, neighboring="zero-out")
    fitted = DPLinearRegression(1.0, target_bound=1.0, ledger=ledger, **SHARED).fit(x, y)
    assert len(ledger.entries()) == 1
    assert fitted.privacy_.epsilon == pytest.approx(1.0)


def test_what_a_solver_refuses_costs_nothing() -> None:
    x, y = table(0.1, 0.5)
    ledger = Ledger(neighboring="zero-out")
    wrong = DPLinearRegression(
        1.0, target_bound=1.0, solver_options={"momentums": 0.5}, ledger=ledger, **SHARED
    )
    with pytest.raises(TypeError, match="momentums"):
        wrong.fit(x, y)
    assert not ledger.entries()


def test_chunks_stay_in_the_part_that_the_first_one_found() -> None:
    x, y = table(0.01, -0.8)
    model = DPLinearRegression(2.0, target_bound=1.0, **SHARED)
    for rows in (slice(2_000), slice(2_000, None)):
        model.partial_fit(x[rows], y[rows])
    assert model.score(x, y) > 0.7


def test_persons_with_several_rows() -> None:
    x, y = table(0.02, 0.5)
    owners = np.repeat(np.arange(ROWS // 2), 2)
    model = DPLinearRegression(4.0, target_bound=1.0, rows_per_person=3, **SHARED)
    assert model.fit(x, y, persons=owners).score(x, y) > 0.7
