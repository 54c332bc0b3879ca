"""A guarantee says everything it depends on, never rounds down, and survives JSON exactly."""

import dataclasses
import json
import math
import re

import pytest
from dp_accounting import NeighboringRelation
from hypothesis import given
from hypothesis import strategies as st

from dpoptim.accounting.guarantee import Guarantee, neighboring_name, parse_neighboring

NAMES = {
    "add-or-remove-one": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace-one": NeighboringRelation.REPLACE_ONE,
    "zero-out": NeighboringRelation.REPLACE_SPECIAL,
}


def guarantee(**changes):
    entries = {
        "epsilon": 1.987,
        "delta": 1e-5,
        "neighboring": "add-or-remove-one",
        "accountant": "PLD",
    }
    return Guarantee(**(entries | changes))


@pytest.mark.parametrize(("name", "relation"), NAMES.items())
def test_relations_have_one_name_each(name, relation):
    assert parse_neighboring(name) is relation
    assert parse_neighboring(relation) is relation
    assert neighboring_name(relation) == name


@pytest.mark.parametrize("wrong", ["add-remove", "REPLACE_ONE", "", None, 1])
def test_unknown_relations_are_refused_with_the_choices(wrong):
    with pytest.raises(
        ValueError,
        match=r"neighboring: .*'add-or-remove-one', 'replace-one', "
        r"'zero-out'",
    ):
        parse_neighboring(wrong)


def test_text():
    assert str(guarantee()) == "epsilon=1.99 at delta=1e-05 (add-or-remove-one, PLD)"


@pytest.mark.parametrize(
    ("epsilon", "shown"),
    [
        (2.0, "2.00"),
        (2.000001, "2.01"),
        (1.99999, "2.00"),
        (9.991, "10.00"),
        (114.21, "115"),
        (123456.2, "123457"),
        (0.1 + 0.2, "0.301"),
        (0.3, "0.300"),
        (1.2341e-5, "0.0000124"),
        (0.0, "0"),
        (math.inf, "inf"),
    ],
)
def test_epsilon_is_rounded_up(epsilon, shown):
    assert str(guarantee(epsilon=epsilon)).startswith(f"epsilon={shown} at")


@given(
    epsilon=st.floats(0, 1e12, allow_subnormal=False), delta=st.floats(0, 1, allow_subnormal=False)
)
def test_text_never_understates(epsilon, delta):
    shown = re.match(r"epsilon=(\S+) at delta=(\S+) ", str(guarantee(epsilon=epsilon, delta=delta)))
    assert float(shown[1]) >= epsilon
    assert float(shown[2]) >= delta
    assert float(shown[1]) <= max(1.01 * epsilon, epsilon + 1 if epsilon >= 100 else 0)


def test_text_never_hides_what_weakens_the_promise():
    text = str(
        guarantee(
            status="unproven (counterexample known)",
            notes=("seeded: not for release",),
            unit="user",
        )
    )
    assert "unproven (counterexample known)" in text
    assert "seeded: not for release" in text
    assert "per user" in text


@given(
    epsilon=st.floats(0, allow_nan=False),
    delta=st.floats(0, 1),
    neighboring=st.sampled_from(sorted(NAMES)),
    notes=st.lists(st.text(min_size=1), max_size=3),
)
def test_json_round_trip_is_exact(epsilon, delta, neighboring, notes):
    original = guarantee(
        epsilon=epsilon,
        delta=delta,
        neighboring=neighboring,
        notes=notes,
        status="unproven",
        unit="user",
    )
    text = json.dumps(original.to_json(), allow_nan=False)
    assert Guarantee.from_json(json.loads(text)) == original


def test_frozen_and_hashable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        guarantee().epsilon = 0.0
    assert len({guarantee(), guarantee(notes=[])}) == 1


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"epsilon": -0.1}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"delta": 1.5}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"neighboring": "none"}, "neighboring"),
        ({"accountant": ""}, "accountant"),
        ({"status": None}, "status"),
        ({"unit": ""}, "unit"),
        ({"notes": ("",)}, "notes"),
    ],
)
def test_bad_values_are_refused_by_name(changes, match):
    with pytest.raises(ValueError, match=f"^{match}:"):
        guarantee(**changes)


def test_a_single_string_is_not_a_tuple_of_notes():
    with pytest.raises(TypeError, match="notes"):
        guarantee(notes="seeded")


@pytest.mark.parametrize("change", ["drop", "add"])
def test_stored_guarantees_with_other_entries_are_refused(change):
    data = guarantee().to_json()
    if change == "drop":
        del data["status"]
    else:
        data["sigma"] = 1.0
    with pytest.raises(ValueError, match="entries"):
        Guarantee.from_json(data)
