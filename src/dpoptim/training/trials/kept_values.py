"""Values that a loss and a collate function keep from call to call, outside of the model.

In closures, globals, objects they are methods of, attributes: lists of past losses, running
numbers, counts of calls. A later call may read them, so that one record moves others' losses; a
trial does not show it where that begins after many calls. So a change is named in the guarantee.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from dpoptim.gradients.watch.contents import Contents
from dpoptim.gradients.watch.plain_attributes import Found, HeldValues, held_by, parts_of
from dpoptim.training.randomness.generators import GENERATORS, globals_of, in_cell, of_library


class KeptValues:
    """Values that functions of a program keep when this is made, to be compared with later.

    Args:
        functions: by what to call them; None: there is none.
        model: whose contents are watched elsewhere.

    **Guarantee.** `changed` names a function if a tensor, an array or a number that can be reached
    from it is another one than at the beginning, or holds other values. Not seen: what iterators,
    caches, libraries and files hold, more than 64 MiB that keep their addresses and versions, and
    programs that hold tens of thousands of objects.
    """

    def __init__(
        self, functions: Mapping[str, Callable[..., Any] | None], model: nn.Module
    ) -> None:
        self._model = model
        self._functions = {name: each for name, each in functions.items() if each is not None}
        found = {name: self._found(each) for name, each in self._functions.items()}
        self._held = {name: HeldValues(each) for name, each in found.items() if each is not None}

    def changed(self) -> tuple[str, ...]:
        """The functions that hold something else by now."""
        now = {name: self._found(self._functions[name]) for name in self._held}
        return tuple(
            name
            for name, found in now.items()
            if found is None or not self._held[name].same(found, everything=False)
        )

    def _found(self, function: Callable[..., Any]) -> Found | None:
        try:
            return held_by([function], Contents.of(self._model), contents_of)
        except Exception:  # whatever objects of the program raise when they are looked at
            return None


def contents_of(value: Any) -> Iterable[Any]:
    """Contents of a container, an object, or a function: closure, defaults, globals it names."""
    if isinstance(value, FunctionType):
        return () if of_library(value) else (*of_function(value), *parts_of(value))
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, GENERATORS):  # their states are seeded
        return ()
    return (*parts_of(value), *of_classes(type(value)))


def of_function(function: FunctionType) -> Iterator[Any]:
    yield from map(in_cell, function.__closure__ or ())
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    named = function.__globals__
    yield from (named[name] for name in sorted(globals_of(function.__code__)) if name in named)


def of_classes(kind: type) -> Iterator[Any]:
    """Contents of a program's class and its bases: methods, numbers."""
    for base in kind.__mro__:
        if not of_library(base):
            yield from (getattr(each, "__func__", each) for each in vars(base).values())
