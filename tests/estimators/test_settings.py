"""Settings of other types, or out of all range, are refused by their names."""

from dataclasses import fields
from typing import Any, Literal

import numpy as np
import pytest

import dpoptim
import dpoptim.estimators
import dpoptim.preprocessing
from dpoptim.estimators import (
    DPLinearRegression,
    DPLogisticRegression,
    DPSGDClassifier,
    DPSGDRegressor,
)
from dpoptim.estimators.settings import PrivateSettings, fits, refuse_other_types

X = np.linspace(-1, 1, 80).reshape(40, 2)
Y = np.arange(40) % 2
KINDS: list[Any] = [
    kind
    for module in (dpoptim.estimators, dpoptim.preprocessing)
    for kind in map(vars(module).get, module.__all__)
    if isinstance(kind, type) and issubclass(kind, PrivateSettings)
]
NEEDED = {"target_bound": 2.0, "lower": -1.0, "upper": 1.0, "epsilon": 1.0}


class Nothing:
    """What no setting may be."""


def fitted(kind: Any, **settings: Any) -> Any:
    own = {each.name for each in fields(kind) if each.init}
    model = kind(**{**{name: NEEDED[name] for name in own & {*NEEDED}}, **settings})
    return model.fit(Y) if kind is dpoptim.preprocessing.DPClassCounts else model.fit(X, Y)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, each.name) for kind in KINDS for each in fields(kind) if each.init],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_each_setting_is_named(kind: Any, name: str) -> None:
    if name == "random_state":  # which scikit-learn reads
        with pytest.raises(ValueError, match="cannot be used to seed"):
            fitted(kind, random_state=Nothing())
        return
    with pytest.raises(ValueError, match=rf"\b{name} must be "):
        fitted(kind, **{name: Nothing()})


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (DPLinearRegression, {"ledger": "ledger.db"}, "ledger must be a dpoptim.Ledger or None"),
        (DPLinearRegression, {"fit_intercept": -1}, "fit_intercept must be True or False, got -1"),
        (DPLinearRegression, {"loss": "mse"}, "loss must be one of 'squared', 'huber', got 'mse'"),
        (DPLinearRegression, {"noise_seed": -1}, "noise_seed must be an integer >= 0"),
        (DPLinearRegression, {"data_norm": 1e300}, "data_norm must be between"),
        (DPLinearRegression, {"clip_norm": 1e-300}, "clip_norm must be between"),
        (DPLinearRegression, {"steps": 10**30}, "steps must be a whole number from 1 to"),
        (DPLogisticRegression, {"classes": []}, "the number of classes must be greater than one"),
        (DPSGDClassifier, {"epochs": 1e300}, "epochs of 1e.300 make a run that is too long"),
        (DPSGDClassifier, {"learning_rate": 1e300}, "learning_rate must be between"),
        (DPSGDClassifier, {"hidden_layer_sizes": 1e300}, "hidden_layer_sizes must be a whole"),
        (DPSGDRegressor, {"method_options": "x"}, "method_options must be a mapping or None"),
    ],
)
def test_what_is_out_of_range_is_refused(kind: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fitted(kind, **settings)


def test_of_a_huge_epsilon_it_is_said_that_it_promises_nothing() -> None:
    said = str(fitted(DPLinearRegression, epsilon=1e300).privacy_)
    assert "promises next to nothing" in said
    with pytest.raises(ValueError, match=r"epsilon must be at most 1e\+300"):
        fitted(DPLinearRegression, epsilon=1e308)


def test_one_hidden_layer_may_be_a_number() -> None:
    model = fitted(DPSGDClassifier, hidden_layer_sizes=3, epochs=1)
    assert model.predict_proba(X).shape == (40, 2)


@pytest.mark.parametrize(
    ("value", "hint", "may"),
    [
        (np.float32(2), float, True),
        (np.int64(2), int, True),
        (np.bool_(True), bool, True),
        (True, int, False),
        (np.ones(2), list[float], True),
        ("ab", tuple[str, ...], False),
        ({}, list[int], False),
        (None, float | None, True),
        ("c", Literal["a", "b"], False),
        (np.ones(2), Literal["a", "b"], False),
        (Nothing(), Any, True),
    ],
)
def test_what_fits(value: object, hint: Any, *, may: bool) -> None:
    assert fits(value, hint) == may


def test_settings_as_they_are_made_fit() -> None:
    for kind in KINDS:
        refuse_other_types(kind(**({"lower": 0.0} if "lower" in kind.__dict__ else {})))
