"""Probabilities of classifiers with their defaults can be believed: clipping bends them little."""

from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from dpoptim.estimators import DPLogisticRegression, DPSGDClassifier
from dpoptim.estimators.linear_fit import MOMENTUM_SHARE, share_by_noise
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


def test_with_little_noise_log_loss_is_that_of_training_without_privacy() -> None:
    """Clipped at 0.3 of the longest gradient, scores were a fifth too large by any epsilon."""
    rng = np.random.default_rng(1)
    x = rng.uniform(-1, 1, (60_000, 5))
    y = (x @ [2.0, -3.0, 1.0, 2.0, -1.0] + rng.logistic(size=len(x)) > 0).astype(int)
    model = DPLogisticRegression(2.0, 1e-5, classes=[0, 1], noise_seed=0).fit(x, y)
    plain = LogisticRegression(C=1e6).fit(x, y)
    lost, least = (log_loss(y, each.predict_proba(x)) for each in (model, plain))
    assert lost < least + 0.002


def test_records_are_clipped_less_where_there_is_less_noise() -> None:
    found = [share_by_noise(n, 10, 1.0) for n in (0, 10, 10_000, 100_000, 10**7)]
    assert found[:2] == [MOMENTUM_SHARE, MOMENTUM_SHARE]
    assert found[1:] == sorted(found[1:])
    assert found[-1] == 1.0
