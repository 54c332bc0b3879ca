"""Plain attributes of a model, which are neither parameters nor buffers.

Tensors, arrays and numbers, also those inside of lists, dictionaries, data classes, other objects
and modules that are not registered.

A state dict does not hold them, so that they do not leave with it; but a later forward pass may
read them, and a pickled model has them. Many models keep what they computed last there, for others
to look at. So a change is not refused, but must be said.
"""

import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpoptim.gradients.watch.contents import Contents
from dpoptim.gradients.watch.values import Values, address
from dpoptim.runtime.torch_internals import is_functorch_tensor, version_of

Found = tuple[list["Holder"], list[Any]]
Holder = Tensor | NDArray[Any]

# bytes that are read at each release; of more, versions and addresses, and all values at the end
READ_ALWAYS = 1 << 26
MOST_OBJECTS = 20_000  # that are looked at; a model that holds more counts as one that changes them
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
NUMBERS = (bool, int, float, complex, np.generic)
# What holds no values, or such as come from releases alone; nobody reads a model's loss in them.
SKIPPED = (
    *(str, bytes, type, ModuleType),
    *(torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler),
)
SKIPPED_PACKAGES = ("torch._", "torch.distributed.", "dpoptim.")


class PlainAttributes:
    """Plain attributes of a model when this is made, to be compared with later.

    Attributes:
        change: whether `compare` found something else; then nothing is compared any more.

    **Guarantee.** ``change`` is true after ``compare(everything=True)`` if a tensor, an array or a
    number that can be reached from the modules' attributes, by containers and by attributes of
    objects, is another one than at the beginning, or holds other values. Not seen: what functions,
    iterators, Python's modules and PyTorch's own objects hold.
    """

    def __init__(self, model: Contents) -> None:
        self.change = False
        self._held = HeldValues(in_attributes(model))

    def compare(self, now: Contents, *, everything: bool) -> None:
        """Note whether something has changed.

        Args:
            now: the model's contents.
            everything: read large tensors and arrays, too.
        """
        self.change = self.change or not self._held.same(in_attributes(now), everything)


class HeldValues:
    """Tensors, arrays and numbers that were found somewhere, to be compared with later ones.

    Args:
        found: by `held_by`.
    """

    def __init__(self, found: Found) -> None:
        self._holders, self._numbers = found
        parts: tuple[list[tuple[str, Tensor]], ...] = ([], [])
        size = 0
        for place, holder in enumerate(self._holders):
            if is_transformed(holder):
                continue
            size += holder.nbytes
            values = holder if isinstance(holder, Tensor) else bytes_of_array(holder)
            parts[size > READ_ALWAYS].append((str(place), values))
        self._versions = [version(holder) for holder in self._holders]
        self._small, self._large = map(Values, parts)

    def same(self, found: Found, everything: bool) -> bool:
        """Whether what is found now are the same holders and numbers, with the same values.

        Args:
            everything: read large tensors and arrays, too.
        """
        holders, numbers = found
        return (
            len(holders) == len(self._holders)
            and all(a is b for a, b in zip(holders, self._holders, strict=True))
            and numbers == self._numbers
            and [version(holder) for holder in holders] == self._versions
            and self._small.changed() is None
            and not (everything and self._large.changed() is not None)
        )


def in_attributes(model: Contents) -> Found:
    """The tensors, arrays, numbers and lengths of a model's plain attributes; see `held_by`."""
    values = (
        value
        for _, m in model.modules
        for key, value in vars(m).items()
        if key not in OF_EVERY_MODULE
    )
    return held_by(values, model) or ([], [object()])  # is equal to no other


def held_by(
    values: Iterable[Any], model: Contents, contents: Callable[[Any], Iterable[Any]] | None = None
) -> Found | None:
    """The tensors, arrays, numbers and lengths in values, as they are found; None: in too many.

    Args:
        model: whose modules, parameters and buffers are left out.
        contents: of a container or object; None: `parts_of`.
    """
    contents = contents or parts_of
    holders: list[Holder] = []
    numbers: list[Any] = []
    seen = {id(each) for _, each in (*model.modules, *model.parameters, *model.buffers)}
    left = list(values)
    while left:
        if max(len(seen), len(left), len(numbers)) > MOST_OBJECTS:
            return None
        value = left.pop()
        if isinstance(value, NUMBERS):
            numbers.append((type(value), repr(value)))  # NaN is not equal to itself
        if value is None or isinstance(value, (*NUMBERS, *SKIPPED)) or id(value) in seen:
            continue
        seen.add(id(value))
        if holds_numbers(value):
            holders.append(value)
        elif not type(value).__module__.startswith(SKIPPED_PACKAGES):
            inside = list(islice(contents(value), MOST_OBJECTS + 1))
            numbers.append(len(inside))
            left += inside
    return holders, numbers


def holds_numbers(value: Any) -> bool:
    """Whether it is a tensor, or an array of numbers."""
    return isinstance(value, Tensor) or (
        isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
    )


def bytes_of_array(array: NDArray[Any]) -> Tensor:
    """An array's memory as a tensor of bytes, uncopied: of any type, order of bytes, and strides.

    PyTorch lacks some types, and strides that lead backwards; subclasses index in their own ways.
    """
    array = array.view(np.ndarray)
    forwards = tuple(slice(None, None, -1 if stride < 0 else 1) for stride in array.strides)
    with warnings.catch_warnings(action="ignore"):  # of arrays for reading only: it is only read
        return torch.from_numpy(array[forwards][..., None].view(np.uint8))


def is_transformed(value: Holder) -> bool:
    """Whether a tensor is left of a call under torch.func, as recurrent layers keep one.

    It has no memory of its own, and is compared by which object it is.
    """
    return isinstance(value, Tensor) and is_functorch_tensor(value)


def parts_of(value: Any) -> Iterator[Any]:
    """Contents of a container or an object."""
    if isinstance(value, dict):  # another mapping may be a store, which would be read
        yield from dict.keys(value)  # a class's own may import all that it names (transformers')
        yield from dict.values(value)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from value
    elif isinstance(value, np.ndarray):
        yield from value.flat
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots: str | Collection[str] = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                yield getattr(value, slot)


def version(holder: Holder) -> tuple[int, int]:
    """The version, which most writes into a tensor change, but not ``.data`` nor arrays."""
    if is_transformed(holder):
        return 0, 0
    if isinstance(holder, Tensor):
        return (0 if holder.is_inference() else version_of(holder), address(holder))
    return 0, holder.ctypes.data
