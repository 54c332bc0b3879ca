"""Generators of random numbers that a program holds: where they are, and their states."""

import functools
import random
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dis import get_instructions
from itertools import islice
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
MOST_OBJECTS = 20_000  # that are looked at for generators
LIBRARIES = {"torch", "numpy", "builtins", "dpoptim", *sys.stdlib_module_names} - {"__main__"}
# kinds, as tuples: a union that is written where it is asked for is made anew each time
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
HOLD_NONE = (torch.Tensor, np.ndarray, str, bytes, int, float, type, ModuleType)
ROWS = (list, tuple, set, frozenset, deque)
SHARED = (FunctionType, *GENERATORS)


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
        parts: models, data sets, functions. The nearest `MOST_OBJECTS` of what they hold are
            looked at.
    """
    found: list[Generator] = []
    left, seen, kinds = deque(parts), set[int](), set[type]()
    while left and len(seen) < MOST_OBJECTS:
        value = left.popleft()
        if value is None or id(value) in seen or isinstance(value, HOLD_NONE):
            continue
        seen.add(id(value))
        if isinstance(value, GENERATORS):
            found += [value] if has_state(value) else []
            continue
        left.extend(islice(held(value), MOST_OBJECTS))
        for kind in {*type(value).__mro__} - kinds:
            kinds.add(kind)
            left.extend(held_by_class(kind))
    return found


def has_state(generator: Generator) -> bool:
    """Whether there is anything to seed: not in what the operating system draws."""
    return not isinstance(generator, random.SystemRandom)


def held(value: Any) -> Iterable[Any]:
    """Contents of a container, a function or an object, without running any code of its own."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, ROWS):
        return value
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, FunctionType):
        return held_by_function(value)
    own: Mapping[str, Any] = getattr(value, "__dict__", {})
    return own.values()


def held_by_function(function: FunctionType) -> Iterable[Any]:
    """Contents of a closure, defaults, and the globals that the function names."""
    if of_library(function):
        return ()
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    named = function.__globals__
    shared = draws_or_calls(named[name] for name in globals_of(function.__code__) if name in named)
    return (*map(contents, function.__closure__ or ()), *defaults, *shared)


def contents(cell: CellType) -> Any:
    """What a closure holds in one of its cells; None before it is filled."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


@functools.cache
def globals_of(code: CodeType) -> frozenset[str]:
    """The names that code, and code within it, looks up outside of any function."""
    inner = [globals_of(each) for each in code.co_consts if isinstance(each, CodeType)]
    own = {str(each.argval) for each in get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    return frozenset(own).union(*inner)


def held_by_class(kind: type) -> list[Any]:
    """Methods and generators of a class, without those of its bases."""
    return [] if of_library(kind) else draws_or_calls(vars(kind).values())


def draws_or_calls(values: Iterable[Any]) -> list[Any]:
    """Generators and functions; whatever else is shared by all would be looked at without end."""
    bare = (getattr(each, "__func__", each) for each in values)  # of static and class methods
    return [each for each in bare if isinstance(each, SHARED)]


def of_library(of: Any) -> bool:
    """Whether a function or class is of a library that draws by torch's or numpy's generators."""
    return str(of.__module__).partition(".")[0] in LIBRARIES
