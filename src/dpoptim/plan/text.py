"""A plan as a JSON document."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dpoptim.accounting.guarantee import Guarantee
from dpoptim.documents import DIGEST, dump, load, with_digest
from dpoptim.privacy_unit import RECORD

if TYPE_CHECKING:
    from dpoptim.plan import Plan

FORMAT = "dpoptim.plan/2"
PLAN_KEYS = {
    *(
        "format",
        "method",
        "n",
        "batch_size",
        "steps",
        "noise_multiplier",
        "neighboring",
        "unit",
        "guarantee",
    ),
    DIGEST,
}


def text_of(plan: Plan) -> str:
    """The document; see `Plan.to_json`."""
    document = {
        "format": FORMAT,
        "method": {"name": plan.method.name, **finite(asdict(plan.method))},  # type: ignore[call-overload]
        "n": plan.n,
        "batch_size": plan.batch_size,
        "steps": plan.steps,
        "noise_multiplier": plan.noise_multiplier,
        "neighboring": plan.neighboring,
        **({} if plan.unit == RECORD else {"unit": asdict(plan.unit)}),
        "guarantee": plan.guarantee.to_json(),
    }
    return dump(with_digest(document))


def finite(settings: dict[str, Any]) -> dict[str, Any]:
    """Strict JSON has no infinity."""
    return {key: "inf" if value == math.inf else value for key, value in settings.items()}


def read_text(text: str) -> dict[str, Any]:
    """The document that `text_of` wrote. ValueError if it is none, or was changed."""
    return load(text, what="plan", format=FORMAT, fix="pass what Plan.to_json() returned")


def settings_in(data: dict[str, Any]) -> dict[str, Any]:
    """The method's name and settings. KeyError, TypeError for entries that are not a plan's."""
    if surplus := data.keys() - PLAN_KEYS:
        raise KeyError(f"unknown entries {sorted(surplus)}")
    if not isinstance(data["method"], dict) or not isinstance(data["guarantee"], dict):
        raise TypeError("its method and its guarantee must be objects")
    return {key: math.inf if value == "inf" else value for key, value in data["method"].items()}


def differences(one: str, other: str) -> str:
    """Name what two documents say differently; their guarantees only where all else is alike."""
    first, second = (read_text(text) for text in (one, other))

    def told(data: dict[str, Any]) -> dict[str, Any]:
        rest = {key: data[key] for key in data.keys() - {"format", "guarantee", DIGEST}}
        method = {key: value for key, value in data["method"].items() if key != "name"}
        return {**rest, "method": data["method"]["name"], **method}

    a, b = (told(data) for data in (first, second))
    if a == b:
        a, b = first["guarantee"], second["guarantee"]
    keys = sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
    return ", ".join(f"{key}={a.get(key)!r} there and {b.get(key)!r} here" for key in keys)


def same_number(a: float, b: float) -> bool:
    """Whether they are equal up to what another version of a numerical library may change."""
    return math.isclose(a, b, rel_tol=1e-6)


def refuse_other_promise(stored: Guarantee, computed: Guarantee) -> None:
    """Refuse a document whose guarantee is not what its settings give."""
    same_words = (stored.status, stored.unit) == (computed.status, computed.unit)
    if not (same_words and same_number(stored.epsilon, computed.epsilon)):
        raise ValueError(
            f"text promises {stored}, but its settings give {computed}; it was edited. Make a new "
            "plan."
        )
