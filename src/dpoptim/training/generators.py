"""Generators of random numbers that a program holds: where they are, and their states."""

import functools
import inspect
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
MOST_OBJECTS = 20_000  # that are looked at for generators
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
    """Generators that a program's parts hold: in attributes, containers and closures.

    Args:
        parts: models, data sets, functions. The nearest `MOST_OBJECTS` of what they hold are
            looked at.
    """
    found: list[Generator] = []
    left, seen = deque(parts), set[int]()
    while left and len(seen) < MOST_OBJECTS:
        value = left.popleft()
        if value is None or isinstance(value, HOLD_NONE) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Generator):
            found += [value] if has_state(value) else []
        else:
            left.extend(islice(held(value), MOST_OBJECTS))
    return found


def has_state(generator: Generator) -> bool:
    """Whether there is anything to seed: not in what the operating system draws."""
    return not isinstance(generator, random.SystemRandom)


def held(value: Any) -> Iterable[Any]:
    """Contents of a container, a function or an object, without running any code of its own."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset | deque):
        return value
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, MethodType):
        return (value.__self__,)
    if isinstance(value, FunctionType):
        return (*inspect.getclosurevars(value).nonlocals.values(), *(value.__defaults__ or ()))
    return getattr(value, "__dict__", {}).values()
