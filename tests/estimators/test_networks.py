"""The networks as their users meet them: scikit-learn's conventions, accuracy, errors, and what
may be said of privacy.
"""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits

import dpoptim
from dpoptim.estimators import DPSGDClassifier, DPSGDRegressor
from dpoptim.estimators.repeats import ALONE, ON_TRUST
from dpoptim.methods import PrivateQuantile
from dpoptim.preprocessing import DPClassCounts

SEEDED: Any = {"epsilon": 1e4, "delta": 1e-3, "noise_seed": 0, "random_state": 0}
TOY = [
    DPSGDClassifier(**SEEDED, epochs=10, learning_rate=1.5),
    DPSGDRegressor(**SEEDED, epochs=20, learning_rate=2.0, target_bound=10.0),
]


def digits() -> tuple[np.ndarray, ...]:
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order] / 16, y[order]
    return x[:1400], y[:1400], x[1400:], y[1400:]


def test_digits() -> None:
    x, y, x_test, y_test = digits()
    before = torch.random.get_rng_state()
    model = DPSGDClassifier(
        4.0, 1e-5, data_norm=4.0, classes=range(10), noise_seed=1, random_state=0
    ).fit(x, y)
    # the caller's generator is left alone
    assert torch.equal(before, torch.random.get_rng_state())
    assert model.score(x_test, y_test) > 0.8
    assert 3.9 < model.privacy_.epsilon <= 4.0
    assert model.privacy_.status == "proven"
    assert model.privacy_.notes == ("seeded: not for release", ALONE, ON_TRUST)
    np.testing.assert_allclose(model.predict_proba(x_test).sum(1), 1)


@pytest.mark.parametrize("epochs", [2, 10])
@pytest.mark.parametrize("scatter", [0.05, 0.3])
@pytest.mark.thinned(2)
def test_few_epochs_of_a_regression_end_no_worse_than_the_mean(epochs: int, scatter: float) -> None:
    """With steps as long as suit many epochs, R2 is between -61 and 0.9 here."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        x = rng.choice([-1.0, 1.0], (1_800, 6)) if seed % 2 else rng.uniform(-1, 1, (1_800, 6))
        y = scatter * (x @ rng.normal(size=6) / 2 + 0.5 * rng.normal(size=1_800))
        model = DPSGDRegressor(
            4.0, 1e-5, epochs=epochs, target_bound=1.0, noise_seed=seed, random_state=seed
        ).fit(x[:1_500], y[:1_500])
        assert model.score(x[1_500:], y[1_500:]) > 0.1


@pytest.mark.figures
def test_regression_beyond_lines() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (20_000, 2))
    y = 3 * np.sin(3 * x[:, 0]) + x[:, 1]
    model = DPSGDRegressor(2.0, 1e-6, target_bound=4.0, noise_seed=0, random_state=0).fit(x, y)
    assert model.score(x, y) > 0.8  # a line reaches 0.6


def test_fits_are_charged_to_a_ledger_and_can_go_on() -> None:
    x, y, x_test, y_test = digits()
    with dpoptim.Ledger(neighboring="zero-out", epsilon=1.5, delta=1e-5) as ledger:
        short: Any = {"epochs": 3, "classes": range(10), "noise_seed": 0, "random_state": 0}
        model = DPSGDClassifier(1.0, 1e-5, ledger=ledger, **short).fit(x, y)
        with pytest.raises(dpoptim.BudgetExceeded):
            model.fit(x, y)
        model.set_params(ledger=None, warm_start=True)
        first = model.score(x_test, y_test)
        for _ in range(3):
            model.fit(x, y)
        assert model.score(x_test, y_test) > first
        assert "earlier fit" in str(model.privacy_)
        model.set_params(hidden_layer_sizes=(8,)).fit(x, y)  # which begins anew
        assert "earlier fit" not in str(model.privacy_)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"epsilon": 0}, "epsilon: expected a positive"),
        ({"activation": "sigmoid"}, "activation must be one of 'tanh'"),
        ({"hidden_layer_sizes": (0,)}, "hidden_layer_sizes must be"),
        ({"clip_norm": 0}, "clip_norm must be"),
        ({"clip_norm": PrivateQuantile(0.5)}, "Fix: method_options={'clip_norm': PrivateQ"),
        ({"batch_size": 10**6}, "batch_size"),
        ({"classes": [0, 1]}, "none of the declared classes"),
        ({"neighboring": "add-or-remove-one"}, "n is missing"),
        ({"n": 7}, "n=7 is not the number of records"),
        ({"data_norm": -1}, "data_norm must be"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], said: str) -> None:
    x, y, *_ = digits()
    with pytest.raises(ValueError, match=said):
        DPSGDClassifier(**settings).fit(x, y)
    with pytest.raises(ValueError, match="target_bound must be"):
        DPSGDRegressor(target_bound=0).fit(x, y)


def test_public_class_weights() -> None:
    """A rare class is found more often, at the same guarantee; weights from the labels are
    refused.
    """
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4000, 2)), (rng.random(4000) < 0.08).astype(int)
    x[y == 1] += 1.0
    settings: Any = {"classes": [0, 1], "epochs": 20, "noise_seed": 0, "random_state": 0}
    plain = DPSGDClassifier(2.0, 1e-5, **settings).fit(x, y)
    counts = DPClassCounts([0, 1], epsilon=0.5, delta=1e-5, noise_seed=0).fit(y)
    weighted = DPSGDClassifier(2.0, 1e-5, class_weight=counts.class_weight(), **settings).fit(x, y)
    assert weighted.predict(x[y == 1]).mean() > plain.predict(x[y == 1]).mean() + 0.2
    assert weighted.privacy_ == plain.privacy_
    for wrong, said in (
        ("balanced", "must be a mapping"),
        ({7: 1.0}, "none of the classes"),
        ({0: -1.0}, "at least 0"),
    ):
        with pytest.raises(ValueError, match=said):
            DPSGDClassifier(class_weight=wrong, **settings).fit(x, y)


@pytest.mark.parametrize("fit", ["partial_fit", "fit"])
def test_an_interrupted_fit_leaves_the_network_as_its_guarantee_says(
    fit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the same chunk, given once more, would count once and have been seen twice."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (200, 3))
    y = (x[:, 0] > 0).astype(int)
    settings: Any = {"epsilon": 4.0, "epochs": 4, "noise_seed": 0, "warm_start": fit == "fit"}
    model = DPSGDClassifier(classes=[0, 1], **settings)
    getattr(model, fit)(x, y)
    before, claimed = [p.detach().clone() for p in model.network_.parameters()], model.privacy_
    backward, calls = dpoptim.PrivateTraining.backward, iter(range(3))

    def interrupted(*args: Any) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        backward(*args)

    monkeypatch.setattr(dpoptim.PrivateTraining, "backward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(model, fit)(x[::-1], y[::-1])
    assert model.privacy_ is claimed
    assert not model.network_.training
    assert all(map(torch.equal, before, model.network_.parameters()))


def test_chunks_of_a_stream_go_on_from_each_other() -> None:
    """Each may spend the whole budget; what earlier chunks taught is kept, and the guarantee is the
    worst of theirs.
    """
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (1500, 3))
    y = (x[:, 0] > 0).astype(int)
    seeded: Any = {"epochs": 4, "noise_seed": 0, "random_state": 0}
    model = DPSGDClassifier(
        epsilon=4.0, delta=1e-5, data_norm=1.8, hidden_layer_sizes=(8,), **seeded
    )
    with pytest.raises(ValueError, match="classes must be passed on the first call"):
        model.partial_fit(x, y)
    with dpoptim.Ledger(neighboring="zero-out") as ledger:
        model.set_params(ledger=ledger)
        for i in range(3):
            part = slice(500 * i, 500 * (i + 1))
            model.partial_fit(x[part], y[part], classes=[0, 1])
        assert len(ledger.entries()) == 3
        assert model.privacy_.epsilon <= 4.0
        assert any("no record is in two chunks" in note for note in model.privacy_.notes)
        assert model.score(x, y) > 0.85
        lasting = [p.detach().clone() for p in model.network_.parameters()]
        model.set_params(epsilon=1e-3).partial_fit(x[:500], y[:500])
        assert 3.9 < model.privacy_.epsilon <= 4.0  # of the chunks before
        assert any(
            not torch.equal(a, b)
            for a, b in zip(lasting, model.network_.parameters(), strict=False)
        )
        with pytest.raises(ValueError, match="same in every call"):
            model.partial_fit(x, y, classes=[0, 1, 2])
    line = DPSGDRegressor(
        epsilon=8.0, data_norm=1.8, target_bound=1.0, hidden_layer_sizes=(8,), **seeded
    )
    for i in range(3):
        line.partial_fit(x[i::3], x[i::3, 0])
    assert line.score(x, x[:, 0]) > 0.3


METHODS: dict[str, dict[str, Any]] = {
    "dp-ftrl": {"momentum": 0.9, "decay": "cosine"},
    "dice-sgd": {"feedback_clip": 0.5},
    "value-sgd": {"bound": "sharp"},
    "dp-sgd": {"clip_norm": PrivateQuantile(0.5, when="all along")},
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_the_registry_trains_networks(method: str) -> None:
    """The ledger is charged for the method's own event, at the estimator's epsilon."""
    x = np.random.default_rng(0).uniform(-1, 1, (600, 3))
    ledger = dpoptim.Ledger(neighboring="zero-out")
    model = DPSGDClassifier(
        4.0,
        1e-4,
        classes=[0, 1],
        hidden_layer_sizes=(),
        batch_size=100,
        epochs=4,
        method=method,
        method_options=METHODS[method],
        ledger=ledger,
        noise_seed=0,
        random_state=0,
    )
    model = clone(model).set_params(ledger=ledger).fit(x, (x[:, 0] > 0).astype(int))
    assert 3.9 < model.privacy_.epsilon <= 4
    chosen = dpoptim.registry.entry(method).make(**{"clip_norm": 1.0} | METHODS[method])
    (entry,) = ledger.entries()
    expected = chosen.plan(
        n=600, batch_size=100, epochs=4, epsilon=4.0, delta=1e-4, neighboring="zero-out"
    )
    assert entry.event == expected.event
    assert model.score(x, (x[:, 0] > 0).astype(int)) > 0.7


def test_methods_that_cannot_train_networks_are_refused() -> None:
    x, y = np.ones((4, 2)), [0, 1, 0, 1]
    with pytest.raises(ValueError, match=r"DPLogisticRegression\(solver='kl-spider'\)"):
        DPSGDClassifier(method="kl-spider", classes=[0, 1]).fit(x, y)
    with pytest.raises(
        ValueError, match="method_options: the method dp-sgd has no setting 'noise'"
    ):
        DPSGDClassifier(method_options={"noise": "best"}, classes=[0, 1]).fit(x, y)
    with pytest.raises(ValueError, match="method must be one of"):
        DPSGDClassifier(method="sgd", classes=[0, 1]).fit(x, y)
    unproven = DPSGDClassifier(
        method="dice-sgd", method_options={"accounting": "paper"}, batch_size=10, delta=1e-3
    )
    with (
        pytest.warns(UserWarning, match="theorem is false"),
        pytest.raises(ValueError, match="no proven guarantee"),
    ):
        unproven.epsilon_after([], n=100, epsilon=1.0, delta=1e-3)


def test_a_network_ends_with_the_iterate_asked_for_in_the_ball_asked_for() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (200, 2))
    settings: Any = {**SEEDED, "epochs": 4, "batch_size": 50, "classes": [False, True]}

    def weights(**options: Any) -> torch.Tensor:
        fitted = DPSGDClassifier(**settings | options).fit(x, x[:, 0] > 0)
        return torch.cat([p.detach().flatten() for p in fitted.network_.parameters()])

    start = weights(iterate="last", learning_rate=1e-12)
    ends = {which: weights(iterate=which) for which in ("average", "last", "random")}
    assert not torch.equal(ends["last"], ends["average"])
    assert not torch.equal(ends["last"], ends["random"])
    assert float((ends["last"] - start).norm()) > 0.02
    for which in ends:
        held = weights(iterate=which, projection=0.01)
        assert float((held - start).norm()) <= 0.01 * (1 + 1e-5)
    with pytest.raises(ValueError, match="iterate must be one of"):
        weights(iterate="best")


def test_logarithms_of_probabilities() -> None:
    x, y, x_test, _ = digits()
    model = DPSGDClassifier(**SEEDED, epochs=2).fit(x, y)
    np.testing.assert_allclose(
        np.exp(model.predict_log_proba(x_test)), model.predict_proba(x_test), atol=1e-12
    )


def test_chunks_of_another_unit_are_refused_and_predictions_keep_theirs() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (600, 2))
    y = x @ [1.0, -2.0]
    model = DPSGDRegressor(8.0, 1e-4, target_bound=4.0, epochs=2, noise_seed=0, random_state=0)
    before = model.partial_fit(x[:300], y[:300]).predict(x)
    model.set_params(target_bound=8.0, noise_seed=1)
    np.testing.assert_array_equal(model.predict(x), before)
    with pytest.raises(ValueError, match="target_bound=8 must stay 4"):
        model.partial_fit(x[300:], y[300:])
    np.testing.assert_array_equal(model.predict(x), before)
