"""Generators of random numbers that a program holds: where they are, and their states."""

import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from opcode import opmap
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, cast

import numpy as np
import torch

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
MOST_OBJECTS = 20_000  # that are looked at for generators
LIBRARIES = {"torch", "numpy", "builtins", "dpoptim", *sys.stdlib_module_names} - {"__main__"}
# kinds, as tuples: a union that is written where it is asked for is made anew each time
BOUND = (MethodType, BuiltinMethodType)  # such as rng.random
# torch's last, which is asked in Python
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
SHARED = (FunctionType, *GENERATORS)
NEVER_SHARED = {*map(id, (type, ModuleType, str, bytes, int, float, bool, type(None), dict, tuple))}
ROWS = (list, tuple, set, frozenset, deque)
HOLD_NONE = (torch.Tensor, np.ndarray, str, bytes, int, float, type, ModuleType)


def everywhere(own: Sequence[Generator]) -> list[Generator]:
    """Numpy's and Python's generators, and one's own, each once."""
    # whose methods numpy's and Python's functions are
    shared = [vars(of)["random"].__self__ for of in (np.random, random)]
    return [*shared, *(each for each in own if not any(each is other for other in shared))]


def of_torch(generator: Generator) -> bool:
    return isinstance(generator, torch.Generator)


def states_of(generators: Iterable[Generator]) -> list[object]:
    """States of generators, which any draw changes; comparable."""
    return [comparable(state_of(generator)) for generator in generators]


def comparable(state: Any) -> object:
    if isinstance(state, Mapping):
        return tuple((key, comparable(value)) for key, value in state.items())
    if isinstance(state, torch.Tensor):
        state = state.cpu().numpy()
    return state.tobytes() if isinstance(state, np.ndarray) else state


def state_of(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


def set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def state_from(generator: Generator, seed: int) -> Any:
    """The state that such a generator has after this seed."""
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device).manual_seed(seed % 2**64).get_state()
    if isinstance(generator, random.Random):
        return type(generator)(seed).getstate()
    kind = cast("dict[str, Any]", state_of(generator))["bit_generator"]
    return getattr(np.random, kind)(seed).state


def generators_in(*parts: Any) -> list[Generator]:
    """Generators that a program's parts hold or name.

    Looked at are attributes, also of classes, containers and closures, and the globals that
    functions and methods of the program name; not what libraries hold for themselves.

    Args:
        parts: models, data sets, functions. `MOST_OBJECTS` of what they hold are looked at, one of
            each container in turn: a long list of records hides nothing beside it.
    """
    found: list[Generator] = []
    left, seen = deque([iter(parts)]), set[int]()
    # of the kinds that were met, by their ids
    ways: dict[int, Way] = {}
    looked_at = set[int]()
    while left and len(seen) < MOST_OBJECTS:
        contents = left.popleft()
        for value in contents:
            if value is None or id(value) in seen:
                continue
            kind = type(value)
            if value.__class__ is kind:
                way = ways.get(id(kind)) or ways.setdefault(id(kind), way_into(kind, value))
            else:  # it stands for something else
                way = way_into(kind, value)
            if way is holds_none:
                continue
            seen.add(id(value))
            left.append(contents)
            if way is is_one:
                found += [value] if has_state(value) else []
                break
            if id(kind) not in looked_at:
                looked_at.add(id(kind))
                left.append(iter(held_by_class(kind)))
            left.append(iter(list(islice(way(value), MOST_OBJECTS))))
            break
    return found


def has_state(generator: Generator) -> bool:
    """Whether there is anything to seed: not in what the operating system draws."""
    return not isinstance(generator, random.SystemRandom)


def way_into(kind: type, value: Any) -> "Way":
    """How to look at the contents of a kind's objects, of which ``value`` is one."""
    if isinstance(value, HOLD_NONE):
        return holds_none
    if isinstance(value, GENERATORS):
        return is_one
    way = next((way for kinds, way in WAYS if isinstance(value, kinds)), held_by_object)
    if slots := slots_of(kind):
        return lambda value: chain(way(value), in_slots(value, slots))
    return way


def holds_none(value: Any) -> Iterable[Any]:
    """Nothing, of a value that can hold no generator, and is not looked at."""
    return ()


def is_one(value: Any) -> Iterable[Any]:
    """Nothing, of a generator."""
    return ()


def held_by_partial(value: functools.partial[Any]) -> Iterable[Any]:
    return (value.func, *value.args, *value.keywords.values())


def held_by_bound(value: Any) -> Iterable[Any]:
    return (value.__self__, getattr(value, "__func__", None))


def held_by_dict(value: dict[Any, Any]) -> Iterable[Any]:
    return chain(held_by_object(value), value.values())


def held_by_rows(value: Iterable[Any]) -> Iterable[Any]:
    return chain(held_by_object(value), value)


def held_by_object(value: Any) -> Iterable[Any]:
    """Its attributes, without running any code of its own."""
    return getattr(value, "__dict__", {}).values()


def held_by_function(function: FunctionType) -> Iterable[Any]:
    """Contents of a closure, defaults, and the globals that the function names."""
    if of_library(function):
        return ()
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    named = function.__globals__
    shared = draws_or_calls(named[name] for name in globals_of(function.__code__) if name in named)
    return (*map(in_cell, function.__closure__ or ()), *defaults, *shared)


Way = Callable[[Any], Iterable[Any]]
# of a kind, its contents
WAYS: Sequence[tuple[Any, Way]] = (
    (functools.partial, held_by_partial),
    (BOUND, held_by_bound),
    (FunctionType, held_by_function),
    (dict, held_by_dict),
    (ROWS, held_by_rows),
)


def slots_of(kind: type) -> list[MemberDescriptorType]:
    """Places that a class and its bases have for ``__slots__``; Python's own classes aside."""
    bases = () if kind.__module__ == "builtins" else kind.__mro__
    places = (place for base in bases for place in vars(base).values())
    return [place for place in places if isinstance(place, MemberDescriptorType)]


def in_slots(value: Any, slots: Iterable[MemberDescriptorType]) -> Iterator[Any]:
    """Contents of an object's slots."""
    for slot in slots:
        with suppress(AttributeError):  # nothing is in it
            yield slot.__get__(value)


def in_cell(cell: CellType) -> Any:
    """Contents of a closure's cell; None before it is filled."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def globals_of(code: CodeType) -> frozenset[str]:
    """The names that code, and code within it, looks up outside of any function."""
    if id(code) not in _names:  # equal code has the same, but to compare it takes longer
        inner = [globals_of(each) for each in code.co_consts if isinstance(each, CodeType)]
        _names[id(code)] = code, frozenset(loaded_by(code)).union(*inner)
    return _names[id(code)][1]


_names: dict[int, tuple[CodeType, frozenset[str]]] = {}  # by the code's id, which it keeps


def loaded_by(code: CodeType) -> Iterator[str]:
    """Names in the instructions LOAD_GLOBAL, as `dis` finds them, in a thirtieth of its time."""
    number, numbers = 0, iter(code.co_code)
    for instruction, last_byte in zip(numbers, numbers, strict=True):
        number = number << 8 | last_byte
        if instruction == opmap["LOAD_GLOBAL"]:
            yield code.co_names[number >> 1]  # the lowest bit says something else
        if instruction != opmap["EXTENDED_ARG"]:
            number = 0


def held_by_class(kind: type) -> list[Any]:
    """Methods and generators of a class and its bases."""
    own = [base for base in kind.__mro__ if not of_library(base)]
    return draws_or_calls(each for base in own for each in vars(base).values())


def draws_or_calls(values: Iterable[Any]) -> list[Any]:
    """Generators and functions; whatever else is shared by all would be looked at without end."""
    given = [each for each in values if id(type(each)) not in NEVER_SHARED]
    bare = [getattr(each, "__func__", each) for each in given]  # of static and class methods
    bare += [each.__self__ for each in given if isinstance(each, BOUND)]
    return [each for each in bare if isinstance(each, SHARED)]


def of_library(of: Any) -> bool:
    """Whether a function or class is of a library that draws by torch's or numpy's generators."""
    return in_library(str(of.__module__))


@functools.cache
def in_library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES
