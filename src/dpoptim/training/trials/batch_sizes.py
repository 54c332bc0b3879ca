"""How many records a trial may take beside a few, by what a record costs.

Some programs mix records in large batches only, such as statistics that want eight.
"""

import math
from typing import Any

from torch import Tensor

from dpoptim.runtime.torch_internals import DispatchMode, pytree

# Multiplications of a forward pass with a batch that is tried: some milliseconds on one core. An
# operator that multiplies nothing takes as long as `LEAST` for each number.
MOST_WORK, LEAST = 1 << 25, 8
MULTIPLE = 8  # of which a larger batch has a number of records: whole groups, if there are groups
# operators that form products, and the place of the argument whose last axis is added up
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}


class Work(DispatchMode):
    """Counts multiplications, roughly.

    Attributes:
        done: so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.done = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = sum(t.numel() for t in pytree.tree_leaves(result) if isinstance(t, Tensor))
        self.done += made * max(LEAST, added_up(func.__name__.split(".")[0], args))
        return result


def added_up(name: str, args: tuple[Any, ...]) -> int:
    """How many products an operator adds up for each number that it makes."""
    if name in PRODUCTS:
        return int(args[PRODUCTS[name]].shape[-1])
    if name == "convolution":
        return math.prod(args[1].shape[1:])
    if "attention" in name:
        return 2 * int(args[1].shape[-2])
    if any(word in name for word in ("rnn", "lstm", "gru")):
        return sum(t.numel() for t in args if isinstance(t, Tensor)) // max(1, args[0].numel())
    return 1


def larger_size(work: int, few: int, expected: int) -> int | None:
    """A number of records to try beside a few; None where it would cost too much.

    Args:
        work: of a forward pass with so ``few`` records.
        expected: of a batch in training, which is not exceeded by more than `MULTIPLE`.
    """
    affordable = MOST_WORK * few // max(1, work) // MULTIPLE * MULTIPLE
    size = min(affordable, -(-expected // MULTIPLE) * MULTIPLE)
    return size if size > few else None
