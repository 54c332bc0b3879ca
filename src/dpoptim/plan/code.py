"""Classes of a plan that are not this library's own: written down, and never taken by their name.

A plan's JSON names its method, and reading it makes the method of that name. Two classes can have
one name, and one may take part in other records, add other noise or clip to another bound than its
price says. So the JSON also names the class of every part of other code, and whoever reads it must
come to the same classes, or is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dpoptim import registry
from dpoptim.assumptions import CODE_OF_OTHERS
from dpoptim.origins import of_this_library, package_of, written_as
from dpoptim.printable import printable

if TYPE_CHECKING:
    from dpoptim.accounting.guarantee import Guarantee
    from dpoptim.plan import Plan

CODE = "code"  # the entry of a plan's JSON, which older ones lack


def parts_of(plan: Plan) -> Iterator[tuple[str, type]]:
    """The class of each part that says who takes part, with which noise, at what price."""
    method = plan.method
    yield "method", type(method)
    yield "sampler", type(plan.sampler)
    yield "mechanism", type(plan.mechanism)
    yield "clipping rule", type(method.rule)
    for field in fields(method):  # type: ignore[arg-type]
        yield from kinds_in(f"setting {field.name}", getattr(method, field.name))


def kinds_in(place: str, value: Any) -> Iterator[tuple[str, type]]:
    """The classes of a setting and of what it is made of; plain and numpy's numbers have none."""
    if isinstance(value, tuple | list):
        for number, each in enumerate(value):
            yield from kinds_in(f"{place}[{number}]", each)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from kinds_in(f"{place}[{name!r}]", each)
    if is_dataclass(value):
        for field in fields(value):
            yield from kinds_in(f"{place}.{field.name}", getattr(value, field.name))
    if type(value).__module__ != "builtins" and not isinstance(value, np.generic):
        yield place, type(value)


def packages_of_others(plan: Plan) -> list[str]:
    """The packages whose code the plan rests on beside this library's."""
    others = (package_of(kind) for _, kind in parts_of(plan) if not of_this_library(kind))
    return list(dict.fromkeys(others))


def code_of(plan: Plan) -> dict[str, str]:
    """Name each part that its name and settings alone do not stand for, as ``"module:Class"``."""
    found = {part: written_as(kind) for part, kind in parts_of(plan) if not of_this_library(kind)}
    method = written_as(type(plan.method))
    listed = registry.BUILT_IN.get(plan.method.name, method)
    return found if listed == method else {"method": method, **found}


HOW_TO_REGISTER = (
    "Fix: dpoptim.register_method(that class), under a name of its own, before the plan is read; "
    "an installed package lists it by an entry point."
)
OF_ITS_METHOD = (
    "Fix: register a method that makes this part itself (dpoptim.register_method), or use "
    "dpoptim's own class."
)


def kind_listed(name: str, stated: Mapping[str, str] | None) -> Any:
    """Return the class that a method's name stands for here, if it is the one that was meant.

    Args:
        stated: what `code_of` named; None: nothing, or of an earlier version.

    Raises:
        ValueError: there is no method of this name, or another class has it.
    """
    meant = (stated or {}).get("method")
    if meant is not None and name not in registry.method_names():
        raise ValueError(
            f"text is a plan by the class {printable(meant)!r}, and no method is registered here "
            f"by its name, {printable(name)!r}. {HOW_TO_REGISTER}"
        )
    make = registry.entry(name).make
    if meant is not None and meant != written_as(make):  # type: ignore[arg-type]
        raise ValueError(another_class("method", meant, written_as(make)))  # type: ignore[arg-type]
    return make


def another_class(part: str, meant: str, here: str) -> str:
    """Say that names and settings have led to a class other than the plan's."""
    return (
        f"text is a plan whose {part} is of the class {printable(meant)!r}, and here it would be "
        f"{printable(here)!r}: another class of the same name, which may do something else. "
        f"{HOW_TO_REGISTER if part == 'method' else OF_ITS_METHOD}"
    )


def refuse_other_code(stated: Mapping[str, str] | None, noted: Guarantee, plan: Plan) -> None:
    """Refuse a plan that was read, if a part of it is of another class than the one that was meant.

    Args:
        stated: what `code_of` named; None: nothing, or of an earlier version, whose guarantee named
            packages.
        noted: the guarantee as it stands in the document.

    Raises:
        ValueError: naming both classes.
    """
    here = {part: written_as(kind) for part, kind in parts_of(plan)}
    for part in () if stated is None else {**stated, **code_of(plan)}:
        meant = stated.get(part, "one of dpoptim's own") if stated else ""
        if meant != here.get(part):
            raise ValueError(another_class(part, meant, here.get(part, "no part at all")))
    known = {CODE_OF_OTHERS.format(package) for package in packages_of_others(plan)}
    for note in noted.notes:
        if note.startswith(CODE_OF_OTHERS.partition("{")[0]) and note not in known:
            raise ValueError(
                f"text is a plan with the note {printable(note)!r}, and here it would be made of "
                f"other code of the same name. {HOW_TO_REGISTER}"
            )


def code_in(data: Mapping[str, Any]) -> dict[str, str] | None:
    """The entry of a plan's document. TypeError if it is no such entry; None of earlier versions.

    A plan of this library's parts alone has none either: its document is that of an earlier one.
    """
    code = data.get(CODE)
    if code is not None and not (
        isinstance(code, dict) and code and all(isinstance(each, str) for each in code.values())
    ):
        raise TypeError("its code must name classes")
    return code
