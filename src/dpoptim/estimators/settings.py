"""Settings that everything has in common that learns privately in scikit-learn's manner."""

import reprlib
import types
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from numbers import Real
from typing import Any, ClassVar, Literal, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.public_numbers import RELATIONS, relation_of
from dpoptim.estimators.repeats import CountsFits
from dpoptim.opacus_words import KnowsOpacus

Delta = float | Literal["auto"]
ALTERNATIVES = (Union, types.UnionType)


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateSettings(KnowsOpacus, CountsFits):
    """Base of estimators and transformers: a dataclass, whose fields are scikit-learn's settings.

    They are stored untouched. What is learnt is no argument.

    Args:
        label: public text for the ledger's entry; None: the class's name.
    """

    epsilon: float | None = None
    delta: Delta = "auto"
    neighboring: str | None = None
    ledger: Ledger | None = None
    noise_seed: int | None = None
    label: str | None = None
    relations: ClassVar[tuple[str, ...]] = RELATIONS  # that it can protect records under
    reads_sparse: ClassVar[bool] = True  # tables of SciPy

    @property
    def relation(self) -> str:
        """The neighbouring relation of its fits, by name."""
        return relation_of(self.neighboring, self.ledger, self.relations)

    @property
    def _named(self) -> str:
        """The name of its fits in the ledger."""
        return type(self).__name__ if self.label is None else self.label

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.noise_seed is None
        tags.input_tags.sparse = self.reads_sparse
        return tags


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
