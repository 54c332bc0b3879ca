"""Networks by every listed optimizer: with every method, at the same charge, told the noise."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from torch import nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.estimators import DPSGDClassifier, DPSGDRegressor
from dpoptim.optim import AdamBC
from dpoptim.optimizers import OPTIMIZERS, optimizer
from dpoptim.planning.choice import taken_back
from dpoptim.planning.ranking import REACH, adaptive_learning_rate
from dpoptim.recipes import noise_walk

X = np.random.default_rng(0).uniform(-1, 1, (600, 3))
Y = (X[:, 0] > 0).astype(int)
SETTINGS: dict[str, Any] = {
    "epsilon": 6.0,
    "delta": 1e-4,
    "classes": [0, 1],
    "hidden_layer_sizes": (),
    "batch_size": 100,
    "epochs": 4,
    "noise_seed": 0,
    "random_state": 0,
}
METHODS: dict[str, dict[str, Any]] = {
    "dp-sgd": {},
    "dp-ftrl": {"sampling": "cyclic-poisson", "bands": 2},
    "dice-sgd": {},
    "value-sgd": {},
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS)
def test_every_optimizer_goes_with_every_method_at_the_same_charge(method: str, name: str) -> None:
    with dpoptim.Ledger(neighboring="zero-out") as ledger:
        made = DPSGDClassifier(
            **SETTINGS, method=method, method_options=METHODS[method], optimizer=name
        )
        model = clone(made).set_params(ledger=ledger).fit(X, Y)
        (entry,) = ledger.entries()
    chosen = dpoptim.registry.entry(method).make(clip_norm=1.0, **METHODS[method])
    plan = chosen.plan(
        n=600, batch_size=100, epochs=4, epsilon=6.0, delta=1e-4, neighboring="zero-out"
    )
    assert entry.event == plan.event
    assert 5.9 < model.privacy_.epsilon <= 6.0
    assert model.score(X, Y) > 0.75
    assert model.optimizer_ == str(optimizer(name))
    if OPTIMIZERS[name].adaptive:
        assert model.learning_rate_ == adaptive_learning_rate(8, plan.steps, taken_back(plan))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("method", "options"), [*METHODS.items(), ("dp-ftrl", {}), ("dp-ftrl", {"noise": "toeplitz"})]
)
def test_by_default_noise_moves_the_weights_as_far_by_every_method(
    method: str, options: dict[str, Any], name: str
) -> None:
    """Whatever a method calls its noise multiplier, and however much of its noise lasts."""
    model = DPSGDClassifier(
        **SETTINGS | {"epsilon": 0.1}, method=method, method_options=options, optimizer=name
    )
    plan, by = model._plan(600, 1e-4, epsilon=0.1), optimizer(name)
    rate = model._learning_rate(plan, 1_000, by)
    moved = rate / (1 - by.momentum) * noise_walk(plan) * 1_000**0.5
    if by.kind.adaptive:  # gradients are divided by what a step's noise makes them
        drawn = [plan.query.released_deviation(step) for step in range(plan.steps)]
        moved /= float(np.sqrt(np.mean(np.square(drawn)))) / plan.batch_size
    assert moved == pytest.approx(REACH, rel=0.02 if method != "dp-ftrl" else 0.4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_network_is_that_of_a_loop_by_the_same_optimizer(name: str) -> None:
    given: dict[str, Any] = {
        "sgd": {"momentum": 0.5},
        "adam": {"betas": (0.5, 0.9)},
        "adam_bc": {"betas": (0.5, 0.9)},
    }[name]
    settings = SETTINGS | {"learning_rate": 0.05, "iterate": "last", "data_norm": 2.0}
    settings["clip_norm"] = 1.0
    model = DPSGDClassifier(**settings, optimizer=name, **given).fit(X, Y)
    plan = dpoptim.DPSGD(1.0).plan(
        n=600, batch_size=100, epochs=4, epsilon=6.0, delta=1e-4, neighboring="zero-out"
    )
    network = model._new(3, 2)
    by = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adam_bc": AdamBC,
    }[name](network.parameters(), lr=0.05, **given)
    data = TensorDataset(torch.from_numpy(X).float(), torch.from_numpy(Y))
    loss = nn.CrossEntropyLoss(reduction="none")
    with dpoptim.attach(plan, network, by, data, noise_seed=0) as private:
        for x, y in private.batches(physical_batch_size=4096):
            private.backward(loss(network(x), y))
            by.step()
    for ours, theirs in zip(model.network_.parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dp-sgd", {"noise_schedule": (2.0, 1.0)}),
        ("dp-sgd", {"clip_norm": dpoptim.PlannedClipNorm((1.0, 0.1))}),
        ("dp-ftrl", {}),
        ("dice-sgd", {"feedback_clip": 0.5}),
    ],
    ids=str,
)
def test_it_is_told_the_noise_of_each_step(
    method: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    honest = AdamBC.step

    def step(self: AdamBC, *given: Any) -> Any:
        told.append(self.param_groups[0]["noise_std"])
        return honest(self, *given)

    monkeypatch.setattr(AdamBC, "step", step)
    model = DPSGDClassifier(
        **SETTINGS, method=method, method_options=options, optimizer="adam_bc"
    ).fit(X, Y)
    plan = model._plan(600, 1e-4, epsilon=6.0)
    norms = getattr(options.get("clip_norm"), "norms", (1.0,))
    expected = [
        plan.query.released_deviation(step)
        * norms[step * len(norms) // plan.steps]
        / plan.expected_batch(step)
        for step in range(plan.steps)
    ]
    assert told == pytest.approx(expected)
    assert min(told) > 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer": "rmsprop"}, "optimizer must be one of 'sgd', 'adam', 'adam_bc'"),
        ({"optimizer": "adam", "momentum": 0.9}, "Fix: leave out momentum, or use optimizer='sgd'"),
        ({"betas": (0.9, 0.999)}, "Fix: leave out betas, or use optimizer='adam' or 'adam_bc'"),
        ({"optimizer": "adam", "betas": (0.9, 1.0)}, r"betas\[1\] must be in \[0, 1\)"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"learning_rate": -1.0}, "learning_rate must be"),
        (
            {
                "optimizer": "adam_bc",
                "method": "dp-ftrl",
                "method_options": {"noise": "tree"},
            },
            "Fix: noise='best' or 'independent', or another optimizer",
        ),
    ],
)
def test_bad_settings_are_refused_before_anything_is_spent(
    settings: dict[str, Any], said: str
) -> None:
    with dpoptim.Ledger(neighboring="zero-out") as ledger:
        model = DPSGDClassifier(**SETTINGS, ledger=ledger).set_params(**settings)
        with pytest.raises(ValueError, match=said):
            model.fit(X, Y)
        assert not ledger.entries()


@pytest.mark.figures
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["adam", "adam_bc"])
def test_regression(name: str) -> None:
    x = np.random.default_rng(1).uniform(-1, 1, (2_000, 3))
    y = 2 * x[:, 0] - x[:, 1]
    model = DPSGDRegressor(
        4.0, 1e-5, optimizer=name, target_bound=3.0, noise_seed=0, random_state=0
    ).fit(x, y)
    assert model.score(x, y) > 0.8


def test_settings_are_stored_untouched() -> None:
    model = DPSGDClassifier(optimizer="adam", betas=(0.8, 0.9), learning_rate=0.1)
    copied = clone(model).get_params()
    assert (copied["optimizer"], copied["betas"], copied["momentum"]) == ("adam", (0.8, 0.9), None)
