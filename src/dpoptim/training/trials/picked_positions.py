"""Positions that data pick, by a mask or by lengths, of all records in a row.

Where a mask has no gaps, these look like records and positions folded together. Made-up records
may have no gap, since nobody knows by which number a model tells padding.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from dpoptim.runtime.torch_internals import DispatchMode, pytree
from dpoptim.training.trials.made_up_records import Sample

# Operators whose results have as many rows as data say.
PICKING = (
    "nonzero",
    "nonzero_numpy",
    "_pack_padded_sequence",
    "repeat_interleave",
    "unique_dim",
    "unique_consecutive",
    "unique_dim_consecutive",
    "_unique",
    "_unique2",
)


class PickedPositions(DispatchMode):
    """Follows tensors with an axis of picked positions through the operations of a model.

    Args:
        rows: made-up records, of a number unlike every other axis.
        data: tensors that hold them.

    Attributes:
        any: whether some tensor has as many picked positions as records and positions together.
    """

    def __init__(self, rows: int, data: Iterable[Tensor]) -> None:
        super().__init__()
        self._rows, self.any = rows, False
        # by storage of what is made of data: how many positions were picked for it
        self._picked = WeakIdKeyDictionary()
        for t in data:
            self._note(t, set())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        known = [sizes for t in given if (sizes := self._sizes(t)) is not None]
        if not known:
            return result
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.dim()]
        own, before = (
            self._made_by(func.__name__.split(".")[0], args, made),
            set[int]().union(*known),
        )
        for t in made:
            self._note(t, own | before & {*t.shape})
        return result

    def on_first(self, x: Any) -> bool:
        """Whether a tensor's first axis is one of picked positions."""
        return isinstance(x, Tensor) and x.dim() > 0 and len(x) in (self._sizes(x) or ())

    def _sizes(self, t: Tensor) -> set[int] | None:
        """How many positions were picked for what has a tensor's memory; None: it is no data."""
        storage = storage_of(t)
        found: set[int] | None = None if storage is None else self._picked.get(storage)
        return found

    def _note(self, t: Tensor, sizes: set[int]) -> None:
        self.any |= bool(sizes)
        if (storage := storage_of(t)) is not None:
            self._picked[storage] = sizes | self._picked.get(storage, set())

    def _made_by(self, name: str, args: tuple[Any, ...], made: Sequence[Tensor]) -> set[int]:
        """Numbers of positions that an operator picks, if they may be taken for folded ones."""
        found = {len(t) for t in made if name in PICKING}
        if name in ("index", "index_select") and self._sizes(args[0]) is not None:
            found = picked_by(*args[:3])
        elif name == "cat" and not any(args[1:]) and all(map(self._is_one_record, args[0])):
            found = {len(t) for t in made}
        elif name == "masked_select":  # of numbers, which become rows of any length
            found = divisors(len(made[0]))
        return {size for size in found if size > self._rows and size % self._rows == 0}

    def _is_one_record(self, piece: Tensor) -> bool:
        """Whether what is joined with others may be positions of a single record."""
        return self._sizes(piece) is not None and len(piece) % self._rows != 0


def divisors(numbers: int) -> set[int]:
    small = [size for size in range(1, math.isqrt(numbers) + 1) if numbers % size == 0]
    return {*small, *(numbers // size for size in small)}


def picked_by(x: Tensor, *by: Any) -> set[int]:
    """How many positions indices pick, of all records', or a mask does.

    Args:
        by: indices, one for each axis; or an axis and its indices.
    """
    indices = by[0] if isinstance(by[0], list | tuple) else [None] * by[0] + [by[1]]
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    rows = [] if masks or indices[0] is None or indices[1:] else [indices[0].numel()]
    return {*(int(mask.sum()) for mask in masks), *rows}


def storage_of(t: Tensor) -> torch.UntypedStorage | None:
    """A tensor's memory; None: it is of a kind that has none of its own."""
    try:
        return t.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


@torch.no_grad()
def layers_of_picked(model: nn.Module, sample: Sample) -> tuple[frozenset[str], bool]:
    """Names of modules that are given picked positions, and whether any tensor has some."""
    names = set[str]()
    given = pytree.tree_leaves((sample.args, sample.kwargs))
    picked = PickedPositions(sample.rows, (t for t in given if isinstance(t, Tensor)))

    def note(name: str, given: Any) -> None:
        if any(map(picked.on_first, pytree.tree_leaves(given))):
            names.add(name)

    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: note(name, (args, kwargs)), with_kwargs=True
        )
        for name, module in model.named_modules()
    ]
    try:
        with picked:
            sample.call(model)
    finally:
        for hook in hooks:
            hook.remove()
    return frozenset(names), picked.any
