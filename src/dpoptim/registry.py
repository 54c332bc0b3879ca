"""The one list of methods, for command line, JSON, estimators, audits, certificate, documents.

Names are known without importing what they stand for. A third party adds a method by an entry
point in the group ``dpoptim.methods`` (the entry's name is the method's, its value
``"package.module:Class"``), or by `register_method`.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from dpoptim.arguments import one_of
from dpoptim.origins import written_as

GROUP = "dpoptim.methods"
SOLVER = "dpoptim.methods.whole_run:WholeRun"
BUILT_IN = {
    "dp-sgd": "dpoptim.methods.dp_sgd:DPSGD",
    "dice-sgd": "dpoptim.methods.dice_sgd:DiceSGD",
    "dp-ftrl": "dpoptim.methods.dp_ftrl:DPFTRL",
    "value-sgd": "dpoptim.methods.value_clipped_sgd:ValueClippedSGD",
    "sparse-sgd": "dpoptim.methods.sparse_sgd:SparseSGD",
    "sufficient-statistics": SOLVER,
    "momentum-gd": SOLVER,
    "noisy-gd": SOLVER,
    "kl-spider": SOLVER,
    "adaptive-gd": SOLVER,
    "proximal-point": SOLVER,
    "accelerated-srgd": SOLVER,
}
_registered: dict[str, type[Any]] = {}
AnyMethod = TypeVar("AnyMethod", bound=type[Any])


@dataclass(frozen=True)
class Entry:
    """A method as it is listed.

    Attributes:
        name: on the command line and in JSON.
        summary: one line for people.
        trains: what it can train, in words.
        make: the class; its fields are the settings.
        solver: whether `dpoptim.solvers` carries it out, and not `dpoptim.attach`.
    """

    name: str
    summary: str
    trains: str
    make: Callable[..., Any]
    solver: bool

    def checked(self, source: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings, if the method has all of them.

        Args:
            source: the argument or option that they were given by, for the message.

        Raises:
            ValueError: naming the one that it does not have.
        """
        known = [field.name for field in fields(self.make)] if is_dataclass(self.make) else []
        for name in settings:
            if name not in known:
                raise ValueError(
                    f"{source}: the method {self.name} has no setting {name!r}; it has "
                    f"{', '.join(known)}."
                )
        return dict(settings)


def register_method(method: AnyMethod) -> AnyMethod:
    """List a method; also a class decorator.

    A class that is defined again, as a notebook's cell does, takes its own earlier place.

    Args:
        method: a subclass of `dpoptim.methods.TrainingMethod` with a ``name`` and a ``summary`` of
            its own.

    Returns:
        the method, as it was given.

    Raises:
        TypeError: it is none, lacks one of them, or has settings without a default.
        ValueError: the name is taken.

    Examples:
        >>> from dataclasses import dataclass
        >>> from dpoptim.methods import DPSGD, register_method
        >>> @register_method
        ... @dataclass(frozen=True)
        ... class Cautious(DPSGD):
        ...     name = "cautious"
        ...     summary = "DP-SGD with a smaller clip norm."
        >>> from dpoptim.registry import unregister_method
        >>> unregister_method("cautious")
    """
    check_method(method)
    taken = _registered.get(method.name, method)
    if method.name in BUILT_IN or written_as(taken) != written_as(method):
        raise ValueError(
            f"name={method.name!r} is the name of another method; choose one that no method has."
        )
    _registered[method.name] = method
    return method


def unregister_method(name: str) -> None:
    """Take a method off the list that `register_method` put there."""
    del _registered[name]


def check_method(method: object) -> None:
    """Refuse what cannot be listed, with the reason."""
    from dpoptim.methods.method import TrainingMethod

    if not (isinstance(method, type) and issubclass(method, TrainingMethod)):
        raise TypeError(
            f"method must be a subclass of dpoptim.methods.TrainingMethod, got {method!r}."
        )
    for attribute in ("name", "summary"):
        if not isinstance(getattr(method, attribute, None), str):
            raise TypeError(
                f"{method.__name__}.{attribute} is missing; give the class a text of that name."
            )
    for setting in inspect.signature(method).parameters.values():
        named = setting.kind not in (setting.VAR_POSITIONAL, setting.VAR_KEYWORD)
        if named and setting.default is setting.empty and setting.name != "clip_norm":
            raise TypeError(
                f"{method.__name__}.{setting.name} has no default; give it one, so that audits, "
                "planner and documents can make the method from a clip norm alone."
            )


@cache
def _third_parties() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in BUILT_IN}


def method_names() -> tuple[str, ...]:
    """Return the names of all methods, built in first; imports none of them."""
    return tuple(dict.fromkeys((*BUILT_IN, *_third_parties(), *_registered)))


def entry(name: str) -> Entry:
    """Return a method by its name.

    Raises:
        ValueError: there is none of this name; or an entry point that is no method, or cannot be
            loaded.
    """
    one_of("method", name, method_names())
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        method = getattr(import_module(module), attribute)
        if BUILT_IN[name] == SOLVER:
            summary = import_module(module).SUMMARIES[name]
            return Entry(name, summary, method.trains, method, solver=True)
    elif name in _registered:
        method = _registered[name]
    else:
        method = loaded(_third_parties()[name])
    return Entry(name, method.summary, method.trains, method, solver=False)


def loaded(point: EntryPoint) -> type[Any]:
    """Return the method that another package lists.

    Raises:
        ValueError: naming the entry point and the fix.
    """
    listed = f"the entry point {point.name!r} in the group {GROUP!r}"
    if len({each.value for each in entry_points(group=GROUP, name=point.name)}) > 1:
        raise ValueError(f"{listed} is listed by two packages. Fix: uninstall one of them.")
    try:
        method: type[Any] = point.load()
    except Exception as error:  # whatever the import of foreign code raises
        raise ValueError(
            f"{listed} cannot be loaded ({type(error).__name__}: {error}). Fix: repair or "
            "uninstall the package that lists it."
        ) from error
    try:
        check_method(method)
    except TypeError as error:
        raise ValueError(f"{listed} is no method: {error}") from None
    if method.name != point.name:
        raise ValueError(
            f"{listed} names a method that calls itself {method.name!r}; use one name."
        )
    return method


def entries() -> dict[str, Entry]:
    """Return all methods by their names; imports them all.

    Those of other packages that cannot be loaded are left out, with a warning, as is one that has
    the name of a built-in one.
    """
    found = {}
    for point in entry_points(group=GROUP):
        if point.name in BUILT_IN:
            warnings.warn(
                f"another package's method {point.name!r} ({point.value}) is left out: dpoptim has "
                "one of that name. Fix: list it by another name.",
                stacklevel=2,
            )
    for name in method_names():
        try:
            found[name] = entry(name)
        except ValueError as error:
            warnings.warn(f"{name} is left out: {error}", stacklevel=2)
    return found
