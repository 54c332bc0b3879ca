"""Settings of another type than their annotation says, refused by their names."""

import reprlib
import types
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import fields
from functools import cache
from numbers import Real
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

ALTERNATIVES = (Union, types.UnionType)


def refuse_other_types(settings: Any) -> None:
    """Refuse values that cannot be what they are annotated as. Args: settings: a dataclass.

    Ranges are for whoever uses a value. Scikit-learn wants settings checked in ``fit``.

    Raises:
        ValueError: a value of another type, or none of the choices.
    """
    for name, hint in hints_of(cast(Hashable, type(settings))).items():
        value = getattr(settings, name)
        if not fits(value, hint):
            allowed = " or ".join(words_of(hint))
            # a table that stands there by mistake is private
            short = isinstance(value, Real | str | np.bool_ | types.NoneType)
            got = reprlib.repr(value) if short else type(value).__name__
            raise ValueError(f"{name} must be {allowed}, got {got}.")


@cache
def hints_of(kind: Hashable) -> dict[str, Any]:
    """Annotations of the settings of a dataclass, by name."""
    try:
        hints = get_type_hints(kind)
    except NameError:  # a user's own estimator, with names for type checkers alone
        return {}
    return {each.name: hints[each.name] for each in fields(cast(Any, kind)) if each.init}


def fits(value: object, hint: Any) -> bool:
    """Whether a value may be what is annotated; numpy's numbers are numbers."""
    origin = get_origin(hint) or hint
    if origin in ALTERNATIVES:
        return any(fits(value, each) for each in get_args(hint))
    if origin is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if origin in (int, float):
        return isinstance(value, Real) and not isinstance(value, bool)
    if is_sequence(origin):
        # arrays and series count as sequences
        return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    other = (bool, np.bool_) if origin is bool else origin
    known = other is not Any and isinstance(other, type | tuple)
    return not known or isinstance(value, other)


def is_sequence(origin: Any) -> bool:
    """Whether a type is one of sequences; text and mappings are none."""
    is_iterable = isinstance(origin, type) and issubclass(origin, Iterable)
    return is_iterable and not issubclass(origin, str | Mapping)


def words_of(hint: Any) -> list[str]:
    """The annotation in words."""
    origin = get_origin(hint) or hint
    if origin in ALTERNATIVES:
        return [word for each in get_args(hint) for word in words_of(each)]
    if origin is Literal:
        choices = [repr(choice) for choice in get_args(hint)]
        return choices if len(choices) == 1 else [f"one of {', '.join(choices)}"]
    named: dict[Any, str] = {
        **{bool: "True or False", int: "a whole number", float: "a number", str: "text"},
        **{Mapping: "a mapping", types.NoneType: "None", Callable: "a function"},
    }
    if origin in named:
        return [named[origin]]
    if is_sequence(origin):
        return ["a sequence"]
    return [f"a {origin.__module__.partition('.')[0]}.{origin.__name__}"]
