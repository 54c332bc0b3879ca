"""A model's own random generators, found by one walk where it has not changed since."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn

from dpoptim.training.randomness.generators import Generator, generators_in

Found = dict[int, tuple[list[int], list[Generator]]]  # by the model's id, with its attributes' ids
_found: ContextVar[Found | None] = ContextVar("what was found", default=None)


@contextmanager
def found_once() -> Iterator[None]:
    """Look for generators once in the trials inside, which take a walk of everything each."""
    before = _found.set({})
    try:
        yield
    finally:
        _found.reset(before)


def generators_of(model: nn.Module, *, anew: bool = False) -> list[Generator]:
    """`generators_in` a model; within `found_once` those found before.

    Unless one of its modules has another attribute since.

    Args:
        anew: look again, as after a pass that may have made some in what the attributes hold.
    """
    known = _found.get()
    if known is None:
        return generators_in(model)
    attributes = [
        id(value)
        for module in model.modules()
        for key, value in vars(module).items()
        if key != "training"
    ]
    before, found = known.get(id(model), ([], []))
    if anew or before != attributes:
        found = generators_in(model)
        known[id(model)] = attributes, found
    return found
