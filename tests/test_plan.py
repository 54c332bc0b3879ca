"""A plan is what it says: calibrated, frozen, readable, and the same after a trip through JSON."""

import dataclasses
import json
import math
from typing import Any

import dp_accounting
import numpy as np
import pytest

import dpoptim
from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.documents import with_digest
from dpoptim.privacy_unit import Unit

GOOD: dict[str, Any] = {
    "n": 60_000,
    "batch_size": 512,
    "steps": 1000,
    "epsilon": 2.0,
    "delta": 1e-5,
}


def make(clip_norm: Any = 1.0, clipping: str = "flat", **changes: Any) -> dpoptim.Plan:
    arguments = {key: value for key, value in {**GOOD, **changes}.items() if value is not ...}
    return dpoptim.DPSGD(clip_norm=clip_norm, clipping=clipping).plan(**arguments)


@pytest.mark.parametrize("relation", ["add-or-remove-one", "zero-out", "replace-one"])
@pytest.mark.parametrize("batch_size", [512, 60_000])
def test_calibration_keeps_to_the_budget(relation: str, batch_size: int) -> None:
    plan = make(neighboring=relation, batch_size=batch_size, steps=100)
    assert 0.99 * 2 <= plan.guarantee.epsilon <= 2
    assert plan.guarantee.epsilon == compute_epsilon(plan.event, 1e-5, relation).epsilon
    assert plan.guarantee.status == "proven"


def test_the_event_is_what_the_sampler_does() -> None:
    plan = make(steps=10, epsilon=..., noise_multiplier=1.5)
    step = dp_accounting.PoissonSampledDpEvent(512 / 60_000, dp_accounting.GaussianDpEvent(1.5))
    assert plan.event == dp_accounting.SelfComposedDpEvent(step, 10)
    full = make(steps=10, epsilon=..., noise_multiplier=1.5, batch_size=60_000)
    assert full.event == dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(1.5), 10)


def test_epochs_become_whole_steps_rounded_up() -> None:
    assert (
        make(n=1000, batch_size=300, steps=..., epochs=1, epsilon=..., noise_multiplier=1.0).steps
        == 4
    )
    assert (
        make(n=1000, batch_size=100, steps=..., epochs=2.5, epsilon=..., noise_multiplier=1.0).steps
        == 25
    )
    assert (
        make(n=9300, batch_size=100, steps=..., epochs=1, epsilon=..., noise_multiplier=1.0).steps
        == 93
    )
    assert (
        make(n=10, batch_size=10, steps=..., epochs=0.01, epsilon=..., noise_multiplier=1.0).steps
        == 1
    )


def test_json_round_trip_is_exact() -> None:
    for plan in (
        make(),
        make(clipping="automatic", neighboring="zero-out"),
        make(epsilon=..., noise_multiplier=0),
    ):
        text = plan.to_json()
        json.loads(text, parse_constant=pytest.fail)  # strict: no NaN, no Infinity
        assert dpoptim.Plan.from_json(text) == plan


def test_an_edited_promise_is_refused() -> None:
    data = json.loads(make().to_json())
    data["guarantee"]["epsilon"] = 0.5
    with pytest.raises(ValueError, match="it was edited"):
        dpoptim.Plan.from_json(json.dumps(data))
    for factor in (0.5, 2.0):  # less noise is a lie, more noise another plan
        data = json.loads(make().to_json())
        data["noise_multiplier"] *= factor
        for text in (json.dumps(data), json.dumps(with_digest(data))):
            with pytest.raises(ValueError, match="it was edited"):
                dpoptim.Plan.from_json(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "not a plan"),
        ('{"format": "dpoptim.plan/99"}', "not a plan in the format"),
        ('{"format": "dpoptim.plan/2"}', "damaged plan"),
        ('{"format": "dpoptim.plan/2", "method": {"name": "nobody"}}', "damaged plan"),
    ],
)
def test_damaged_files_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dpoptim.Plan.from_json(text)


@pytest.mark.parametrize(
    "change",
    [
        {"method": ["DPSGD"]},
        {"method": {"name": ["DPSGD"]}},
        {"method": {"name": "DPSGD", "clip_norm": [1]}},
        {"guarantee": 3},
        {"n": "many"},
        {"n": 10**400},
        {"noise_multiplier": None},
        {"neighboring": []},
    ],
    ids=str,
)
def test_wrong_entries_are_refused_in_one_line(change: dict[str, Any]) -> None:
    data = json.loads(make().to_json()) | change
    with pytest.raises(ValueError, match=".") as refused:
        dpoptim.Plan.from_json(json.dumps(with_digest(data)))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"format": "dpoptim.plan/2", "n": NaN}', '{"n": 1, "n": 2}', "\x00"]
)
def test_what_is_no_strict_json(text: str) -> None:
    with pytest.raises(ValueError, match="not JSON"):
        dpoptim.Plan.from_json(text)


def test_a_plan_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().steps = 1  # type: ignore[misc]


def test_describe_says_what_the_guarantee_rests_on() -> None:
    text = make(neighboring="replace-one").describe()
    for part in (
        "DPSGD(clip_norm=1.0",
        "n = 60000",
        "1000 steps",
        "replace-one",
        "enforced",
        "trusted",
        "epsilon=2.00",
    ):
        assert part in text
    assert "no privacy" in make(epsilon=..., noise_multiplier=0).describe()


def test_no_noise_promises_nothing() -> None:
    plan = make(clip_norm=math.inf, epsilon=..., noise_multiplier=0)
    assert plan.guarantee.epsilon == math.inf
    assert plan.epsilon(1e-3) == math.inf
    assert plan.guarantee.status != "proven"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_size": 60_001}, "batch_size=60001 is larger than n"),
        ({"batch_size": 0}, "batch_size must be a whole number"),
        ({"batch_size": 0.5}, "batch_size must be a whole number"),
        ({"n": -1}, "n must be a whole number"),
        ({"n": True}, "n must be a number"),
        ({"n": "60000"}, "n must be a number"),
        ({"steps": 0}, "steps must be a whole number"),
        ({"epochs": 3}, "either epochs or steps"),
        ({"steps": ...}, "either epochs or steps"),
        ({"steps": ..., "epochs": -1}, "epochs must be"),
        ({"epsilon": 0}, "epsilon"),
        ({"epsilon": -1}, "epsilon"),
        ({"epsilon": math.inf}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"delta": 0}, "delta"),
        ({"delta": 1}, "delta"),
        ({"delta": 1e-15}, "delta"),
        ({"delta": ...}, "delta is missing"),
        ({"epsilon": ...}, "either epsilon .* or noise_multiplier"),
        ({"noise_multiplier": 1.0}, "either epsilon .* or noise_multiplier"),
        ({"epsilon": ..., "noise_multiplier": -1.0}, "noise_multiplier must be"),
        ({"epsilon": ..., "noise_multiplier": math.nan}, "noise_multiplier must be"),
        ({"clip_norm": 0}, "clip_norm must be"),
        ({"clip_norm": -1}, "clip_norm must be"),
        ({"clip_norm": 1e-9}, "clip_norm must be at least"),
        ({"n": math.inf}, "n must be a whole number"),
        ({"epsilon": ..., "noise_multiplier": 1e-6}, "noise_multiplier"),
        ({"epsilon": "2"}, "epsilon must be a number"),
        ({"delta": "1e-5"}, "delta must be a number"),
        ({"steps": 10**9}, "too long to account for"),
        ({"clip_norm": math.nan}, "clip_norm must be"),
        ({"clip_norm": math.inf}, "clip_norm is infinite"),
        ({"clip_norm": "1"}, "clip_norm must be"),
        ({"clipping": "soft"}, "clipping must be one of"),
        ({"neighboring": "swap"}, "neighboring"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(**changes)


def test_a_misspelt_keyword_is_refused() -> None:
    with pytest.raises(TypeError, match="cliping"):
        dpoptim.DPSGD(clip_norm=1.0, cliping="flat")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="epsilom"):
        dpoptim.DPSGD(clip_norm=1.0).plan(n=10, batch_size=1, steps=1, epsilom=1.0, delta=1e-5)  # type: ignore[call-arg]


def test_a_changed_copy_changes_its_promise() -> None:
    plan = make()
    weaker = dataclasses.replace(plan, noise_multiplier=0.5, steps=5000)
    assert weaker.guarantee.epsilon == weaker.epsilon(1e-5) > 10 * plan.guarantee.epsilon
    assert dataclasses.replace(plan, batch_size=60_000).sampler.sample_rate == 1


def test_an_infinite_clip_norm_survives_json() -> None:
    plan = make(clip_norm=math.inf, epsilon=..., noise_multiplier=0)
    assert dpoptim.Plan.from_json(plan.to_json()) == plan


def test_unknown_entries_are_refused() -> None:
    data = json.loads(make().to_json())
    data["epsilom"] = 1
    with pytest.raises(ValueError, match="epsilom"):
        dpoptim.Plan.from_json(json.dumps(with_digest(data)))


def test_numbers_of_numpy_are_numbers() -> None:
    plan = make(
        n=np.int64(60_000),
        batch_size=np.int32(512),
        clip_norm=np.float32(1.0),
        epsilon=np.float64(2.0),
    )
    assert plan == make()
    assert dpoptim.Plan.from_json(plan.to_json()) == plan


def test_enormous_epsilons_can_be_described() -> None:
    assert "epsilon" in make(epsilon=..., noise_multiplier=0.05).describe()


def test_a_delta_above_one_in_n_is_remarked_on() -> None:
    with pytest.warns(UserWarning, match=r"delta 0.05 is above 1/\(10 n\).*Fix: at most 0.001"):
        plan = make(n=100, batch_size=10, steps=10, delta=0.05)
    assert "publishing a record at random" in str(plan.guarantee)


@pytest.mark.filterwarnings("error:delta:UserWarning")
def test_a_delta_below_one_in_n_or_without_noise_is_not_warned_of() -> None:
    assert "publishing a record" in str(make(n=100, batch_size=10, steps=10, delta=0.005).guarantee)
    make(n=100, batch_size=10, steps=10, delta=0.05, epsilon=..., noise_multiplier=0)


def test_n_counts_whom_the_plan_protects() -> None:
    told = dataclasses.replace(make(), unit=Unit("person", 2)).describe()
    assert "n = 60000 (n counts persons), expected batch 512" in told
    assert "n = 60000, expected batch" in make().describe()
