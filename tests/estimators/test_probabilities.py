"""Probabilities of classifiers with their defaults can be believed: clipping bends them little."""

from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from dpoptim.estimators import DPLogisticRegression, DPSGDClassifier
from dpoptim.estimators.network_fit import LEAST_CLIP, MOST_CLIP, clip_by_noise

ROWS = 6_000


def table() -> tuple[np.ndarray, np.ndarray]:
    """Columns that take up a small part of [-1, 1], and classes that they tell in part."""
    rng = np.random.default_rng(3)
    z = rng.normal(size=(ROWS + 2_000, 6))
    scores = z @ [1.0, -0.7, 0.5, 0.5, -0.3, 0.2]
    return np.clip(0.2 + z / 6, -1, 1), (scores + rng.logistic(size=len(z)) > 0).astype(int)


def losses(*models: Any) -> list[float]:
    x, y = table()
    return [log_loss(y[ROWS:], m.fit(x[:ROWS], y[:ROWS]).predict_proba(x[ROWS:])) for m in models]


def test_default_log_losses_are_near_those_without_privacy() -> None:
    shared: Any = {"classes": [0, 1], "noise_seed": 0}
    plain, linear, network = losses(
        LogisticRegression(max_iter=500),
        DPLogisticRegression(2.0, 1e-5, **shared),
        DPSGDClassifier(2.0, 1e-5, random_state=0, epochs=20, **shared),
    )
    assert linear < plain + 0.03
    assert network < plain + 0.03


def test_clip_norms_grow_where_there_is_less_noise() -> None:
    found = [clip_by_noise(n, 1_000, mu) for mu in (0.1, 1.0) for n in (100, 1_000, 10_000)]
    assert found[:3] == sorted(found[:3])
    assert all(few < much for few, much in zip(found[:3], found[3:], strict=True))
    assert min(found) == LEAST_CLIP
    assert max(found) == MOST_CLIP
    assert clip_by_noise(1_000, 10_000, 1.0) < clip_by_noise(1_000, 100, 1.0)
