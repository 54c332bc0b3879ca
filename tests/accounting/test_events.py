"""Events survive JSON exactly, and nothing is guessed."""

import json

import dp_accounting as dp
import numpy as np
import pytest

from dpoptim.accounting.event_json import event_from_json, event_to_json

GAUSSIAN = dp.GaussianDpEvent(1.1)
EVENTS = [
    dp.NoOpDpEvent(),
    GAUSSIAN,
    dp.LaplaceDpEvent(0.1 + 0.2),
    dp.ZCDpEvent(0.5),
    dp.ZCDpEvent(0.5, 0.25),
    dp.PoissonSampledDpEvent(500 / 60_000, GAUSSIAN),
    dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(1e-3, GAUSSIAN), 6000),
    dp.SampledWithoutReplacementDpEvent(1000, 100, GAUSSIAN),
    dp.ComposedDpEvent([]),
    dp.ComposedDpEvent([GAUSSIAN, dp.ComposedDpEvent([dp.LaplaceDpEvent(3.0), dp.NoOpDpEvent()])]),
]


@pytest.mark.parametrize("event", EVENTS, ids=repr)
def test_round_trip_through_text_is_exact(event):
    text = json.dumps(event_to_json(event), allow_nan=False)
    assert event_from_json(json.loads(text)) == event


def test_the_stored_form_is_fixed():
    event = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.25, GAUSSIAN), 3)
    assert event_to_json(event) == {
        "type": "SelfComposed",
        "event": {
            "type": "PoissonSampled",
            "sampling_probability": 0.25,
            "event": {"type": "Gaussian", "noise_multiplier": 1.1},
        },
        "count": 3,
    }


def test_numpy_numbers_become_plain_ones():
    data = event_to_json(dp.SelfComposedDpEvent(dp.GaussianDpEvent(np.float64(2.0)), np.int64(4)))
    assert type(data["count"]) is int
    assert type(data["event"]["noise_multiplier"]) is float


@pytest.mark.parametrize(
    "event",
    [
        dp.NonPrivateDpEvent(),
        dp.RandomizedResponseDpEvent(0.5, 2),
        dp.SelfComposedDpEvent(dp.UnsupportedDpEvent(), 2),
        "Gaussian",
    ],
)
def test_events_without_a_json_form_are_refused(event):
    with pytest.raises(TypeError, match="no JSON form"):
        event_to_json(event)


def test_a_non_finite_number_is_refused_with_its_place():
    with pytest.raises(ValueError, match=r"Gaussian\.noise_multiplier.*finite"):
        event_to_json(dp.GaussianDpEvent(float("inf")))


@pytest.mark.parametrize("data", [None, [], {}, {"type": "Laplacian"}, {"type": ["Gaussian"]}])
def test_unknown_types_are_refused(data):
    with pytest.raises(TypeError, match="data"):
        event_from_json(data)


@pytest.mark.parametrize(
    "data",
    [
        {"type": "Gaussian"},
        {"type": "Gaussian", "noise_multiplier": 1.0, "sensitivity": 1.0},
        {"type": "Gaussian", "noise_multiplier": "1.0"},
        {"type": "Gaussian", "noise_multiplier": True},
        {"type": "SelfComposed", "event": {"type": "NoOp"}, "count": 2.5},
        {"type": "SelfComposed", "event": {"type": "NoOp"}, "count": -1},
        {
            "type": "SelfComposed",
            "event": {"type": "Gaussian", "noise_multiplier": None},
            "count": 1,
        },
        {"type": "Composed", "events": {"type": "NoOp"}},
    ],
)
def test_malformed_fields_are_refused(data):
    with pytest.raises(ValueError, match=r"expected|has the fields"):
        event_from_json(data)
