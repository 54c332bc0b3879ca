"""A plan in words: what will happen, what that guarantees, and on what it rests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from dpoptim.accounting.guarantee import rounded_up
from dpoptim.assumptions import METHOD_OF_OTHERS, PLACES_ARE_KEPT, Assumption, enforced, trusted

if TYPE_CHECKING:
    from dpoptim.plan import Plan

COMPARED = {
    "add-or-remove-one": "with any one {unit} as without it",
    "zero-out": "with any one {unit} as with nothing in its place",
    "replace-one": "with any one {unit} as with another in its place",
}


def basis_of(plan: Plan) -> tuple[Assumption, ...]:
    """The guarantee's basis, from the plan alone."""
    unit = plan.unit.name
    relation = {
        "add-or-remove-one": f"n={plan.n} is a public number that was not derived from the data",
        "zero-out": f"n={plan.n} is public; a neighbour has one {unit} that contributes nothing",
        "replace-one": f"n={plan.n} is public; a neighbour has one {unit} of another value",
    }[plan.neighboring]
    in_code = (
        *plan.method.assumptions(plan.shape),
        enforced(plan.sampler.promise()),
        enforced(plan.sampler.releases(plan.steps)),
    )
    return (
        *(replace(each, text=of_each(unit, each.text)) for each in in_code),
        trusted(relation),
        plan.unit_assumption,
        *(trusted(METHOD_OF_OTHERS.format(package)) for package in packages_of_others(plan)),
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


def packages_of_others(plan: Plan) -> list[str]:
    """The packages but this one whose code says who takes part, with which noise, at what price."""
    parts = (plan.method, plan.sampler, plan.mechanism)
    packages = dict.fromkeys(type(part).__module__.partition(".")[0] for part in parts)
    return [package for package in packages if package != "dpoptim"]


def of_each(unit: str, text: str) -> str:
    """A promise about each record, said of each unit that counts as one."""
    return text.replace("each record", f"each {unit}")


def described(plan: Plan, basis: Sequence[Assumption]) -> str:
    """The plan for a person to read, with what its guarantee rests on."""
    chosen = [
        f"{field.name}={value!r}"
        for field in fields(plan.method)  # type: ignore[arg-type]
        if (value := getattr(plan.method, field.name)) != field.default
    ]
    lines = [
        f"{type(plan.method).__name__}({', '.join(chosen)})",
        f"  data         n = {plan.n}, expected batch {plan.batch_size}",
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
