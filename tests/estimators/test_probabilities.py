"""Probabilities of classifiers with their defaults can be believed: clipping bends them little."""

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from dpoptim.accounting import gdp_mu
from dpoptim.estimators import DPLogisticRegression, DPSGDClassifier, linear_fit
from dpoptim.estimators.linear_fit import MOMENTUM_SHARE, length_for, share_by_noise, signal
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


@pytest.mark.figures
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


def few_records() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2_500, 50))
    scores = x @ rng.normal(size=50) * 2 / np.sqrt(50)
    return x, (scores + rng.logistic(size=len(x)) > 0).astype(int)


def test_with_few_records_scores_are_shortened_and_predictions_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The noise of 500 records' gradients made a model surer than one of the classes' shares."""
    (x, y), models = few_records(), []
    for share in (linear_fit.LENGTH_SHARE, 1e9):
        monkeypatch.setattr(linear_fit, "LENGTH_SHARE", share)
        model = DPLogisticRegression(3.0, 1e-5, classes=[0, 1], noise_seed=0)
        models.append(model.fit(x[2_000:], y[2_000:]))
    shortened, long = models
    monkeypatch.undo()
    factor = length_for(signal(500, 51, gdp_mu(3.0, 1e-5)))
    assert 0.1 < factor < 0.5
    np.testing.assert_allclose(shortened.coef_, factor * long.coef_)
    np.testing.assert_allclose(shortened.intercept_, factor * long.intercept_)
    assert np.array_equal(shortened.predict(x), long.predict(x))
    assert shortened.privacy_.epsilon == long.privacy_.epsilon
    lost, before = (log_loss(y[:2_000], each.predict_proba(x[:2_000])) for each in models)
    assert lost < np.log(2) < before - 0.3


@pytest.mark.parametrize(
    "settings",
    [{"l2": 0.01}, {"steps": 20}, {"step_size": 0.1}, {"clip_norm": 1.0}, {"solver": "noisy-gd"}],
)
def test_settings_that_decide_the_length_are_obeyed(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = few_records()

    def weights() -> np.ndarray:
        model = DPLogisticRegression(3.0, 1e-5, classes=[0, 1], noise_seed=0, **settings)
        return np.asarray(model.fit(x[:500], y[:500]).coef_)

    before = weights()
    monkeypatch.setattr(linear_fit, "LENGTH_SHARE", 0.01)
    assert np.array_equal(weights(), before)


def test_a_fit_that_goes_on_is_not_shortened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = few_records()

    def second(share: float) -> float:
        monkeypatch.setattr(linear_fit, "LENGTH_SHARE", 0.35)
        model = DPLogisticRegression(3.0, 1e-5, classes=[0, 1], noise_seed=0, warm_start=True)
        model.fit(x[:500], y[:500])
        monkeypatch.setattr(linear_fit, "LENGTH_SHARE", share)
        return float(np.linalg.norm(model.fit(x[:500], y[:500]).coef_))

    assert second(0.35) == second(0.01)


def test_the_factor_is_public_and_grows_to_one() -> None:
    found = [length_for(signal(n, 10, 1.0)) for n in (0, 10, 1_000, 10_000, 10**6)]
    assert found == sorted(found)
    assert found[0] == 0.0 < found[1] < found[2] < found[-1] == 1.0
