"""DiceSGD in the estimators: settings that nobody chose suit its noise, and do not diverge."""

import numpy as np

from dpoptim.estimators import DPSGDClassifier, DPSGDRegressor
from dpoptim.estimators.network_fit import FEEDBACK_CLIP

DICE = {"method": "dice-sgd", "hidden_layer_sizes": (), "random_state": 0, "noise_seed": 1}


def rows(n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    x = np.clip(rng.normal(size=(n, 12)) + rng.normal(size=(n, 1)), -2, 2) / 2
    return x, x @ rng.normal(size=12)


def test_steps_stay_where_a_squared_loss_converges_without_clipping() -> None:
    """Of length 3.8 / curvature they diverge, with momentum 0.9; DP-SGD's are longer here."""
    x, signal = rows(1_500)
    y = np.clip(signal / 6, -1, 1)
    model = DPSGDRegressor(epsilon=4.0, delta=1e-5, target_bound=1.0, **DICE).fit(x, y)
    assert model.score(x, y) > 0.5
    assert model.learning_rate_ * 2 * (12 + 1) < 3.8


def test_a_classifier_clips_to_less_than_dp_sgd_would() -> None:
    x, signal = rows(1_500)
    classes = np.digitize(signal, np.quantile(signal, (0.2, 0.4, 0.6, 0.8)))
    fits = {
        clip_norm: DPSGDClassifier(
            epsilon=1.0, delta=1e-5, classes=range(5), clip_norm=clip_norm, **DICE
        )
        .fit(x, classes)
        .score(x, classes)
        for clip_norm in (None, FEEDBACK_CLIP, 6.0)
    }
    assert fits[None] == fits[FEEDBACK_CLIP] > fits[6.0]
