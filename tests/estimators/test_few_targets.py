"""Few targets in bounds far wider than they are: their median and a distance are found first."""

import numpy as np
import pytest

import dpoptim
from dpoptim.estimators import DPLinearRegression

ROWS = 500


def pay(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Columns in [-1, 1], and numbers about 20,000."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (rows, 3))
    return x, np.exp(9.8 + x @ [0.5, 0.3, 0.0] + 0.3 * rng.normal(size=rows))


@pytest.mark.parametrize("bound", [3e6, 1e8])
def test_bounds_may_be_thousands_of_times_too_wide(bound: float) -> None:
    """By moments R2 was -1 to -11,492."""
    x, y = pay()
    model = DPLinearRegression(1.0, 1e-5, target_bound=(0.0, bound), noise_seed=0).fit(x, y)
    assert model.score(x, y) > 0.3
    found = dpoptim.private_mean(y, 0, bound, epsilon=1.0, noise_seed=0)
    assert abs(found.value - y.mean()) < 0.2 * y.std()


def test_rows_of_few_persons() -> None:
    x, y = pay(2 * ROWS)
    owners = np.repeat(np.arange(ROWS), 2)
    model = DPLinearRegression(
        2.0, 1e-5, target_bound=(0.0, 1e8), rows_per_person=2, noise_seed=0
    ).fit(x, y, persons=owners)
    assert model.score(x, y) > 0.3
    assert model.privacy_.unit == "person"
