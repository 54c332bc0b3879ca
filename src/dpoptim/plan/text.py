"""A plan written down: as a JSON document, and in words with what its guarantee rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from dpoptim.accounting.guarantee import Guarantee, rounded_up
from dpoptim.assumptions import METHOD_OF_OTHERS, PLACES_ARE_KEPT, Assumption, enforced, trusted
from dpoptim.documents import DIGEST, dump, load, with_digest
from dpoptim.plan.code import CODE, code_of, packages_of_others
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
        CODE,
    ),
    DIGEST,
}


def text_of(plan: Plan) -> str:
    """The document; see `Plan.to_json`."""
    document = {
        "format": FORMAT,
        "method": {"name": plan.method.name, **without_infinity(asdict(plan.method))},  # type: ignore[call-overload]
        "n": plan.n,
        "batch_size": plan.batch_size,
        "steps": plan.steps,
        "noise_multiplier": plan.noise_multiplier,
        "neighboring": plan.neighboring,
        **({} if plan.unit == RECORD else {"unit": asdict(plan.unit)}),
        "guarantee": plan.guarantee.to_json(),
        **({CODE: code} if (code := code_of(plan)) else {}),
    }
    return dump(with_digest(document))


def without_infinity(settings: dict[str, Any]) -> dict[str, Any]:
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


def told(data: dict[str, Any]) -> dict[str, Any]:
    """Entries of a document beside its guarantee, in one flat list, classes of others included."""
    rest = {key: data[key] for key in data.keys() - {"format", "guarantee", CODE, DIGEST}}
    settings = {key: value for key, value in data["method"].items() if key != "name"}
    classes = {f"class of the {part}": kind for part, kind in (data.get(CODE) or {}).items()}
    return {**rest, "method": data["method"]["name"], **settings, **classes}


def say_the_same(one: str, other: str) -> bool:
    """Whether two documents are of one plan, by what they say: their classes need not be at hand.

    Their guarantees may differ as much as versions of a numerical library do.
    """
    first, second = (read_text(text) for text in (one, other))
    if told(first) != told(second):
        return False
    a, b = (Guarantee.from_json(data["guarantee"]) for data in (first, second))
    same = a.delta == b.delta and (a.status, a.unit) == (b.status, b.unit)
    return same and same_number(a.epsilon, b.epsilon)


def differing_entries(one: str, other: str) -> str:
    """Name what two documents say differently; their guarantees only where all else is alike."""
    first, second = (read_text(text) for text in (one, other))
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


COMPARED = {
    "add-or-remove-one": "with any one {unit} as without it",
    "zero-out": "with any one {unit} as with nothing in its place",
    "replace-one": "with any one {unit} as with another in its place",
}


def basis_of(plan: Plan) -> tuple[Assumption, ...]:
    """The guarantee's basis, from the plan alone."""
    unit = plan.unit.name
    others = packages_of_others(plan)
    by_code = trusted if others else enforced  # what others' code promises is on trust
    promised = (
        *plan.method.assumptions(plan.shape),
        enforced(plan.sampler.promise()),
        enforced(plan.sampler.releases(plan.steps)),
    )
    in_code = (replace(each, text=of_each(unit, each.text)) for each in promised)
    return (
        *(by_code(each.text) if each.kind == "enforced" else each for each in in_code),
        relation_on_trust(plan.n, plan.neighboring, unit),
        plan.unit_assumption,
        *(trusted(METHOD_OF_OTHERS.format(package)) for package in others),
        trusted(
            "the data set yields every record without an error, by itself, whatever else is drawn"
        ),
        *([PLACES_ARE_KEPT] if plan.rests_on_places else []),
        trusted(
            "nobody exploits rounding or overflow in the model, the last bits of noisy "
            "numbers, or timing",
        ),
        trusted(
            "settings, preprocessing and stopping were not chosen by looking at the private data"
        ),
    )


def relation_on_trust(n: int, neighboring: str, unit: str) -> Assumption:
    """The number of records as public knowledge, and whom the relation compares with."""
    return trusted(
        {
            "add-or-remove-one": f"n={n} is a public number that was not derived from the data",
            "zero-out": f"n={n} is public; a neighbour has one {unit} that contributes nothing",
            "replace-one": f"n={n} is public; a neighbour has one {unit} of another value",
        }[neighboring]
    )


def of_each(unit: str, text: str) -> str:
    """A promise about each record, said of each unit that counts as one."""
    return text.replace("each record", f"each {unit}")


def plan_in_words(plan: Plan, basis: Sequence[Assumption]) -> str:
    """The plan for a person to read, with what its guarantee rests on."""
    chosen = [
        f"{field.name}={value!r}"
        for field in fields(plan.method)  # type: ignore[arg-type]
        if (value := getattr(plan.method, field.name)) != field.default
    ]
    whom = "" if plan.unit.name == RECORD.name else f" (n counts {plan.unit.name}s)"
    lines = [
        f"{type(plan.method).__name__}({', '.join(chosen)})",
        f"  data         n = {plan.n}{whom}, expected batch {plan.batch_size}",
        f"  length       {plan.steps} steps, about {plan.epochs:.4g} epochs",
        f"  noise        noise multiplier {plan.noise_multiplier:.6g}",
        f"  guarantee    {plan.guarantee}",
    ]
    if plan.guarantee.status == "proven":
        lines.append(
            f"  in words     no result is more than e^{rounded_up(plan.guarantee.epsilon)} "
            f"times as likely {COMPARED[plan.neighboring].format(unit=plan.guarantee.unit)}, "
            f"plus {plan.guarantee.delta:g}"
        )
    lines += [f"  {item.kind:<12} {item.text}" for item in basis]
    return "\n".join(lines)
