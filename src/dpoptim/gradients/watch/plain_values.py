"""Values in plain attributes of a model, to be put back: numbers, strings, flags, small tensors.

So are those inside of lists, dictionaries and objects such as configurations, and which modules a
model has at its places. Trials run a model on made-up records, of which nothing may stay in it.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpoptim.gradients.watch.contents import Contents
from dpoptim.gradients.watch.plain_attributes import (
    MOST_OBJECTS,
    NUMBERS,
    OF_EVERY_MODULE,
    SKIPPED,
    SKIPPED_PACKAGES,
    holds_numbers,
    is_transformed,
)

COPIED = 1 << 16  # numbers of a tensor whose values are put back, too
ABSENT = object()
Place = tuple[int, Any]  # which holder, and what it has the value under
Kept = dict[Place, tuple[Any, Tensor | None]]  # with a copy of what a tensor holds


class PlainValues:
    """Where a model holds plain values, and those of when this is made.

    Attributes:
        before: what was held.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names, self._holders = list[str](), list[Any]()
        for name, holder in holders_in(Contents.of(model)):
            self._names.append(name)
            self._holders.append(holder)
        self.before = self._all()

    def taken(self) -> Kept:
        """Values held now; of places that got a module where there was none, what was before."""
        now = self._all()
        for place in [place for place, (value, _) in now.items() if isinstance(value, nn.Module)]:
            if not isinstance(self.before.get(place, (None,))[0], nn.Module):
                del now[place]
                now |= {place: self.before[place]} if place in self.before else {}
        return now

    def _all(self) -> Kept:
        return {
            (number, key): (value, copy_of(value))
            for number, holder in enumerate(self._holders)
            for key, value in entries(holder)
        }

    def replaced(self, now: Kept) -> bool:
        """Whether a module has another one in its place."""
        return any(
            isinstance(self.before.get(place, (None,))[0], nn.Module) for place in self.changed(now)
        )

    def changed(self, now: Kept) -> list[Place]:
        """Places that hold something else than before, likeliest to matter first."""
        places = {**self.before, **now}
        found = [place for place in places if not same(self.before.get(place), now.get(place))]
        # a module that was replaced has a flag beside it that says why
        return sorted(found, key=lambda place: isinstance(self._held(place, now), nn.Module))

    def put(self, kept: Kept) -> None:
        """Have these values held, and none that came later."""
        now = self.taken()
        for place in {**now, **kept}:
            if not same(now.get(place), kept.get(place)):
                self.put_one(place, kept)

    def put_one(self, place: Place, kept: Kept) -> None:
        """Have one value held, or none there."""
        number, key = place
        holder, (value, copy) = self._holders[number], kept.get(place, (ABSENT, None))
        if isinstance(holder, dict):
            if value is ABSENT:
                holder.pop(key, None)
            else:
                holder[key] = value
        else:  # all that a list has
            holder.clear()
            holder.extend(value)
        if copy is not None and not torch.equal(value, copy):
            with torch.no_grad():
                value.copy_(copy)

    def name_of(self, place: Place) -> str:
        """A place's name, as a program would write it."""
        number, key = place
        return ".".join(part for part in (self._names[number], str(key)) if part)

    def _held(self, place: Place, now: Kept) -> Any:
        return now.get(place, self.before.get(place, (None, None)))[0]


def holders_in(model: Contents) -> Iterator[tuple[str, Any]]:
    """Dictionaries and lists in which a model has plain values, by name; not of too many."""
    seen = {id(m) for _, m in model.modules}
    left = list[tuple[str, Any]]()
    for name, module in model.modules:
        yield name, module._modules
        yield name, vars(module)
        own = {key: each for key, each in vars(module).items() if key not in OF_EVERY_MODULE}
        left += inside_of(name, own)
    while left and len(seen) < MOST_OBJECTS:
        name, value = left.pop()
        if is_opened(value) and id(value) not in seen:
            seen.add(id(value))
            for holder in (value, getattr(value, "__dict__", None)):
                if type(holder) is dict or isinstance(holder, list | deque):
                    yield name, holder
                    left += inside_of(name, holder)


def is_opened(value: Any) -> bool:
    """Whether what a value holds is looked at."""
    closed = value is None or isinstance(value, (*NUMBERS, *SKIPPED, Tensor, np.ndarray))
    return not closed and not type(value).__module__.startswith(SKIPPED_PACKAGES)


def inside_of(name: str, holder: Any) -> list[tuple[str, Any]]:
    """Contents of a holder, by name."""
    found = holder.items() if isinstance(holder, dict) else enumerate(holder)
    prefix = f"{name}." if name else ""
    return [(f"{prefix}{key}", each) for key, each in found]


def entries(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Plain values of a holder, and what they are held under; of a list all that it has, as one."""
    if not isinstance(holder, dict):
        yield "", tuple(holder)
        return
    for key, value in holder.items():
        own = isinstance(key, str) and key in OF_EVERY_MODULE and "_modules" in holder
        if not own and (
            value is None
            or isinstance(value, (*NUMBERS, str, bytes, nn.Module))
            or holds_numbers(value)
        ):
            yield key, value


def copy_of(value: Any) -> Tensor | None:
    if not isinstance(value, Tensor) or is_transformed(value) or value.layout != torch.strided:
        return None
    plain = type(value) is Tensor and not value.is_inference() and value.numel() <= COPIED
    return value.detach().clone() if plain else None


def same(a: tuple[Any, Tensor | None] | None, b: tuple[Any, Tensor | None] | None) -> bool:
    """Whether two places hold the same, or nothing."""
    if a is None or b is None:
        return a is b
    if isinstance(a[0], (*NUMBERS, str, bytes)):
        return type(a[0]) is type(b[0]) and repr(a[0]) == repr(b[0])  # NaN is not equal to itself
    if isinstance(a[0], tuple) and isinstance(b[0], tuple):
        return len(a[0]) == len(b[0]) and all(map(alike, a[0], b[0]))
    if a[0] is not b[0]:
        return False
    return a[1] is None or b[1] is None or torch.equal(a[1], b[1])


def alike(a: Any, b: Any) -> bool:
    numbers = isinstance(a, (*NUMBERS, str, bytes))
    return a is b or (numbers and type(a) is type(b) and repr(a) == repr(b))
