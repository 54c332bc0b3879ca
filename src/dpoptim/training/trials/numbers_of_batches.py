"""Numbers that all records of a batch make, such as a mean, and what they would be beside others.

A guard on such a number, ``if losses.max() > 6: losses = losses * 0.01``, lets one record change
what all others add. While no record of a trial reaches it, no comparison of gradients shows it. So
each such number has another one, as if some more record had been in the batch, and a program is
run on as if that were the number, wherever it decides something.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from dpoptim.runtime.torch_internals import OUTSIDE_BACKWARD, graph_task, pytree

LARGEST, LEAST = ("max", "amax"), ("min", "amin")  # one more record moves these in one direction
REDUCTIONS = frozenset(
    (
        *(*LARGEST, *LEAST, "aminmax", "any", "all", "count_nonzero", "sum", "mean", "prod"),
        *("nansum", "nanmean", "median", "nanmedian", "quantile", "nanquantile", "kthvalue"),
        *("norm", "vector_norm", "matrix_norm", "std", "var", "std_mean", "var_mean", "dist"),
        *("logsumexp", "dot", "vdot", "cross_entropy", "kl_div", "trace"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
    )
)
# What hands numbers to Python, which decides by them out of sight.
READS = frozenset(
    (
        *("item", "tolist", "numpy", "__array__", "is_nonzero", "equal", "allclose"),
        *("__bool__", "__float__", "__int__", "__index__", "__complex__", "__contains__"),
    )
)
# Functions with another slope on either side of a number; of two tensors max and min, too.
KINKS = frozenset(
    (
        *("where", "clamp", "clamp_min", "clamp_max", "clip", "relu", "relu6", "leaky_relu"),
        *("maximum", "minimum", "fmax", "fmin", "abs", "absolute", "__abs__", "floor", "ceil"),
        *("round", "trunc", "sign", "sgn", "heaviside", "threshold", "hardtanh"),
    )
)
HOLD_NONE = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size}
SMALLER = 1e-6  # times itself, where no number can be below zero
MOST_OF_HALF = 1e4
COUNTED = 1000  # more, of what is counted
MORE_CALLS, SOME_CALLS = 4, 1000  # than without other numbers, in loops that these may not end


class TooManyCallsError(RuntimeError):
    """A program does not come to an end with other numbers."""


@dataclass(frozen=True)
class Change:
    """How numbers of a batch are changed.

    Attributes:
        size: by how much, what may be of any size.
        down: whether means, sums and the like become less; what is largest, never does.
        counts: whether counts are changed, too.
        most_calls: of functions, after which a program is stopped.
    """

    size: float
    down: bool
    counts: bool
    most_calls: int

    def other(self, name: str, out: Tensor, given: list[Tensor]) -> Tensor:
        """The number as it would be beside some record, with the gradient that it has."""
        if out.dtype == torch.bool:
            return {"any": torch.ones_like(out), "all": torch.zeros_like(out)}.get(name, out)
        if not is_sized(name, out, given):
            return out
        if not out.is_floating_point():
            return out + COUNTED if self.counts and not self.down else out
        half = torch.finfo(out.dtype).max < 1e6
        size = min(self.size, MOST_OF_HALF) if half else self.size
        if name in (*LARGEST, *LEAST):
            return out + (size if name in LARGEST else -size)
        if self.down and bool((out.detach() >= 0).all()) and not any(has_below_zero(given)):
            return out + (SMALLER - 1) * out.detach()
        return out + (-size if self.down else size)


def is_sized(name: str, out: Tensor, given: list[Tensor]) -> bool:
    """Whether a number may be changed by some size, up or down: a float, or a count of flags."""
    counted = name in ("sum", "count_nonzero") and given[0].dtype == torch.bool
    return out.is_floating_point() or counted


def has_below_zero(given: list[Tensor]) -> Iterator[bool]:
    """Whether tensors have numbers below zero."""
    return (t.is_floating_point() and bool((t.detach() < 0).any()) for t in given)


class NumbersOfBatches(TorchFunctionMode):
    """Follows numbers that several records make; lets others decide in their places, if asked to.

    Numbers are followed through what is computed of them alone. They decide where Python reads
    them, where a function has a kink, and where they meet what has an axis of records. Elsewhere,
    as in a sum of terms, they are themselves.

    Args:
        rows: of the batch: a size, and multiples of it, that no axis has but the records'.
        change: None: to watch only.
        backwards: whether numbers of backward passes are followed, too: of users' hooks on
            gradients and their own functions' backward passes.

    Attributes:
        decided: how often a number of the batch did.
        reads: whether Python read what is no such number, such as all losses.
        sized: whether any that did was changed by some size, or up or down.
        calls: of functions, so far.
    """

    def __init__(self, rows: int, change: Change | None = None, *, backwards: bool = False) -> None:
        super().__init__()
        self._rows, self._change, self._backwards = rows, change, backwards
        self._other = WeakIdKeyDictionary()  # and whether that is `is_sized`
        self._paused = 0
        self.reads = self.sized = False
        self.decided = self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._paused or (not self._backwards and graph_task() != OUTSIDE_BACKWARD):
            return func(*args, **(kwargs or {}))
        self.calls += 1
        if self._change is not None and self.calls > self._change.most_calls:
            raise TooManyCallsError
        return self._called(func, args, kwargs or {})

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        given = tensors_among((args, kwargs))
        numbers = [t for t in given if t in self._other] if self._other else []
        of_records = any(map(self._has_rows, given))
        sized = any(self._other[t][1] for t in numbers)
        if numbers and (of_records or decides(name, given, numbers)):
            self.decided += 1
            self.sized |= sized
            result = func(*self._others(args), **self._others(kwargs))
            self._follow(result, result, sized)
            return result
        self.reads |= name in READS and bool(given)
        result = func(*args, **kwargs)
        if numbers:
            self._run_beside(func, name, result, args, kwargs, sized)
        elif of_records and reduces(func, name, given):
            sized = any(is_sized(name, t, given) for t in tensors_among([result]))
            self._follow(result, self._changed(name, result, given), sized)
        return result

    @contextmanager
    def paused_inside(self, model: nn.Module) -> Iterator[None]:
        """Follow nothing inside of a model's forward passes."""

        def pause(*_: object) -> None:
            self._paused += 1

        def go_on(*_: object) -> None:
            self._paused -= 1

        hooks = [
            model.register_forward_pre_hook(pause),
            model.register_forward_hook(go_on, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _run_beside(
        self, func: Any, name: str, result: Any, args: Any, kwargs: Any, sized: bool
    ) -> None:
        """Run a function on the other numbers, too; what it writes into stays as it is."""
        others = self._others(args)
        if writes(name) and isinstance(others[0], Tensor):
            written = others[0].clone()
            func(written, *others[1:], **self._others(kwargs))
            self._follow(args[0], written, sized)
        else:
            self._follow(result, func(*others, **self._others(kwargs)), sized)

    def _has_rows(self, t: Tensor) -> bool:
        return any(size and size % self._rows == 0 for size in t.shape)

    def _others(self, values: Any) -> Any:
        return pytree.tree_map(
            lambda x: self._other.get(x, (x,))[0] if isinstance(x, Tensor) else x, values
        )

    def _follow(self, result: Any, other: Any, sized: bool) -> None:
        """Note what else a function's tensors without records would be."""
        leaves = zip(pytree.tree_leaves(result), pytree.tree_leaves(other), strict=True)
        for t, instead in leaves:
            if isinstance(t, Tensor) and not self._has_rows(t):
                self._other[t] = instead, sized

    def _changed(self, name: str, result: Any, given: list[Tensor]) -> Any:
        if self._change is None:
            return result
        leaves, form = pytree.tree_flatten(result)
        names = ("min", "max") if name == "aminmax" else [name] * len(leaves)
        others = [
            self._change.other(each, t, given) if isinstance(t, Tensor) else t
            for each, t in zip(names, leaves, strict=True)
        ]
        return pytree.tree_unflatten(others, form)


def tensors_among(values: Iterable[Any]) -> list[Tensor]:
    """The tensors of a call; a function has thousands."""
    found = list[Tensor]()
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) in (tuple, list):
            found += tensors_among(value)
        elif type(value) is dict:
            found += tensors_among(value.values())
        elif type(value) not in HOLD_NONE:
            found += (t for t in pytree.tree_leaves(value) if isinstance(t, Tensor))
    return found


def writes(name: str) -> bool:
    """Whether a function writes into its first argument."""
    written = name[3:-2] in ("add", "sub", "mul", "truediv", "and", "or", "xor", "pow", "mod")
    own = name.endswith("_") and not name.startswith("__")
    return own or name == "__setitem__" or (name.startswith("__i") and written)


def decides(name: str, given: list[Tensor], numbers: list[Tensor]) -> bool:
    """Whether a function of such numbers alone decides something by them."""
    plain = name.rstrip("_") if not name.startswith("__") else name
    if name in READS or plain in KINKS or (plain in ("max", "min") and len(given) > 1):
        return True
    flags = any(t.dtype == torch.bool for t in numbers)  # a loss times (loss < 10)
    return flags and any(t.is_floating_point() for t in given)


def reduces(func: Any, name: str, given: list[Tensor]) -> bool:
    """Whether a function may make numbers of a batch out of its records."""
    if name in ("max", "min"):
        return len(given) == 1
    module = getattr(func, "__module__", "")
    return name in REDUCTIONS or (module == "torch.nn.functional" and name.endswith("_loss"))
