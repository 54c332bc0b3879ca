"""Defaults on raw columns, scaled by wide public bounds: near what no privacy could do better."""

import numpy as np
from sklearn.linear_model import LogisticRegression

from dpoptim.estimators import DPLogisticRegression


def houses(n: int) -> tuple[np.ndarray, np.ndarray]:
    """A made-up table: most columns take up a small part of their bounds."""
    rng = np.random.default_rng(0)
    area, income = rng.lognormal(4.4, 0.4, n), rng.lognormal(10.3, 0.5, n)
    age, distance = rng.uniform(0, 120, n), rng.exponential(8, n)
    others = rng.normal(size=(n, 4))
    price = 2 * np.log(area) - 0.006 * age + 0.9 * np.log(income) - 0.05 * distance
    price = price + others @ [0.2, -0.1, 0.05, 0.0] + 0.5 * rng.normal(size=n)
    x = np.column_stack([area, income, age, distance, others])
    bounds = np.array([[10, 400], [0, 200_000], [0, 150], [0, 60], *[[-4, 4]] * 4], float)
    scaled = 2 * (np.clip(x, bounds[:, 0], bounds[:, 1]) - bounds[:, 0]) / np.ptp(bounds, 1) - 1
    return scaled, (price > np.median(price)).astype(int)


def test_a_large_table_loses_two_points_at_most_at_epsilon_one() -> None:
    x, y = houses(20_000)
    train, test = slice(0, 16_000), slice(16_000, None)
    best = LogisticRegression(max_iter=500).fit(x[train], y[train]).score(x[test], y[test])
    scores = [
        DPLogisticRegression(1.0, 1e-5, data_norm=8**0.5, classes=[0, 1], noise_seed=seed)
        .fit(x[train], y[train])
        .score(x[test], y[test])
        for seed in range(2)
    ]
    assert np.mean(scores) > best - 0.02
