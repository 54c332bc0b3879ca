"""Random numbers that never change, to compare runs of a model, or batches, that draw noise."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from dpoptim.gradients.hooks.forwards import AS_THEY_ARE
from dpoptim.gradients.layers.looped import RECORD
from dpoptim.runtime.dispatch_internals import DRAWN, drawing_operators_run_by
from dpoptim.runtime.torch_internals import pytree

MIDDLE = 0.625
RARE = 2.0**-10  # below the probability of all but rare events
UNEVEN = 0.25
# Steps from a row's numbers to the next one's, and from place to place in it: any share of them is
# below it, in each row at other places.
GOLDEN_RATIO, PLASTIC_RATIO = 0.618033988749895, 0.754877666246693
ROWS: ContextVar[Sequence[int] | None] = ContextVar("whose numbers are drawn", default=None)


@contextmanager
def drawn_for(rows: Sequence[int]) -> Iterator[None]:
    """Let each of these rows have random numbers of its own, the same in any batch."""
    before = ROWS.set(rows)
    try:
        yield
    finally:
        ROWS.reset(before)


def rows_that_run() -> Sequence[int] | None:
    """The rows of `drawn_for`; of a module that runs record by record the one at its place."""
    rows, place = ROWS.get(), RECORD.get()
    return rows if rows is None or place is None else [rows[place]]


class FixedNoise:
    """Fills what random operators return with constants, the same for a record in any batch.

    While it is entered, in this thread. Dropout keeps everything, permutations turn the order
    round, so that what mixes records by them is seen; ranges, means and deviations are kept, as a
    batch may decide them. What draws inside a fused kernel stays random. Within `drawn_for`,
    uniform, normal and whole numbers are each row's own, where they have an axis of rows: what adds
    them up, such as the number of positions that are masked in a batch, is seen. An axis that is as
    long as for another number of rows, before, is none of rows, though it may have as many
    (Informer's sampled keys).

    Args:
        uniform: in (0, 1), what is drawn instead of a uniform or a normal number, on its scale.
        quantile: in (0, 1), where whole numbers are taken from their range, and up to which
            probability a coin shows tails.
        alike: whether rows have the same numbers even so.
        own_coins: whether coins are each row's own, too; dropout throws some.

    Attributes:
        drew: whether anything was drawn.
        by_others: whether by any generator but torch's own.
        shared: whether uniform, normal or whole numbers were drawn without an axis of rows.
    """

    def __init__(
        self,
        uniform: float = MIDDLE,
        *,
        quantile: float = RARE,
        alike: bool = False,
        own_coins: bool = False,
    ) -> None:
        self._entered = ExitStack()
        self._uniform, self._quantile = uniform, quantile
        self._alike, self._own_coins = alike, own_coins
        self._most = 0  # rows of a run
        # of rows, by what is drawn and its number of axes, as a run of the most rows shows
        self._axes: dict[tuple[str, int], int] = {}
        # for how many rows a shape was drawn first; 0: for several numbers of them
        self._rows_of: dict[tuple[str, torch.Size], int] = {}
        self.drew = self.by_others = self.shared = False

    def __enter__(self) -> Self:
        self._entered.enter_context(drawing_operators_run_by(self._draw))
        return self

    def __exit__(self, *raised: object) -> None:
        self._entered.close()

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = drawn_by(func)
        self.drew = True
        if name in COMPUTED:
            func(*pytree.tree_map_only(Tensor, Tensor.clone, args))  # modes may refuse it
            return COMPUTED[name](*args)
        self.by_others |= kwargs.get("generator") not in (None, torch.default_generator)
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if name == "bernoulli":
            given.setdefault("p", given["self"].clone())
        result = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._fix(leaf, name, given)
        return result

    def _fix(self, drawn: Tensor, name: str, given: dict[str, Any]) -> None:
        if self._is_for_each(drawn.shape, name):
            self._fix(one := drawn[0].clone(), name, given)
            drawn.copy_(one.expand_as(drawn))
            return
        axis = self._axis_of_rows(drawn, name)
        if name.startswith("randperm"):
            drawn.copy_(torch.arange(len(drawn), device=drawn.device).flip(0))
        elif name.startswith("bernoulli"):
            p = given.get("p", 0.5)
            own = self._own_coins and axis is not None
            ones = p > (self._own(drawn.float(), axis) if own else self._quantile)
            drawn.copy_(ones) if isinstance(ones, Tensor) else drawn.fill_(ones)
        elif drawn.is_floating_point():
            least, width = scale_of(name, given)
            unit = self._even(drawn) if axis is None else self._own(drawn, axis)
            drawn.copy_(least + width * unit)
        else:
            least = given.get("low", given.get("from", 0))
            end = given.get("high", given.get("to"))
            values = end - least if isinstance(end, int) else 1
            wide = drawn.double()
            unit = wide.fill_(self._quantile) if axis is None else self._own(wide, axis)
            drawn.copy_(least + (unit * values).floor())

    def _axis_of_rows(self, drawn: Tensor, name: str) -> int | None:
        """The axis along which rows have numbers of their own; None: there is none."""
        rows, looks = rows_that_run(), (name, drawn.dim())
        if rows is None:
            return None
        follows = not self._is_for_any(len(rows), name, drawn.shape)
        if len(rows) > self._most:
            self._most, self._axes = len(rows), {}
        if follows and len(rows) == self._most and len(rows) in drawn.shape:
            self._axes[looks] = drawn.shape.index(len(rows))
        axis = self._axes.get(looks) if follows else None
        if axis is None or drawn.shape[axis] != len(rows):
            self.shared |= not name.startswith(("randperm", "bernoulli"))
            return None
        return None if self._alike else axis

    def _is_for_any(self, rows: int, name: str, shape: torch.Size) -> bool:
        """Whether this shape is drawn for other numbers of rows, too."""
        first = self._rows_of.setdefault((name, shape), rows)
        if first != rows:
            self._rows_of[name, shape] = 0
        return first != rows

    def _is_for_each(self, shape: torch.Size, name: str) -> bool:
        """Whether a vectorised model draws for each row what it draws for a whole batch else."""
        rows = ROWS.get()
        vectorised = AS_THEY_ARE.get() and rows is not None and shape[:1] == (len(rows),)
        return vectorised and self._rows_of.get((name, shape[1:])) == 0

    def _own(self, drawn: Tensor, axis: int | None) -> Tensor:
        """In (0, 1), for each row and each place in it; other rows and longer ones change none."""
        unit = torch.full_like(drawn, self._uniform)
        for of, size in enumerate(drawn.shape):
            at: Any = range(size) if of != axis else rows_that_run()
            step = GOLDEN_RATIO if of == axis else PLASTIC_RATIO ** (drawn.dim() - of)
            along = torch.tensor(list(at), device=drawn.device, dtype=drawn.dtype) * step
            unit += along.reshape(-1, *[1] * (drawn.dim() - of - 1))
        return (unit % 1).clamp(RARE, 1 - RARE)

    def _even(self, drawn: Tensor) -> Tensor:
        """Uneven along the last of several axes: what is even is nothing to a layer norm."""
        u = self._uniform
        if drawn.dim() < 2:
            return torch.full_like(drawn, u)
        places = torch.arange(drawn.shape[-1], device=drawn.device, dtype=drawn.dtype)
        return (u + UNEVEN * min(u, 1 - u) * places.sin()).expand_as(drawn)


def see_one_row(noise: FixedNoise | None, run: Callable[[], object]) -> None:
    """Let noise see what is drawn for one row, whose numbers tell axes of rows from other ones."""
    if noise is not None:
        with suppress(Exception):  # whatever the user's loss raises on a record alone
            run()


@cache
def drawn_by(func: Any) -> str:
    """Name of an operator that draws random numbers in the open; of another one, none.

    Not of recurrent layers and attention, whose kernels draw within, and whose results depend on
    what they are given.
    """
    name: str = func.__name__.split(".")[0]
    draws = name.startswith(DRAWN) and torch.Tag.nondeterministic_seeded in func.tags
    return name if draws or name in COMPUTED else ""


def kept(x: Tensor, *_options: Any) -> tuple[Tensor, Tensor]:
    """Dropout that keeps everything."""
    return x.clone(), torch.ones_like(x, dtype=torch.bool)


def middling(x: Tensor, slopes: Tensor, lower: float, upper: float, *_options: Any) -> Tensor:
    """A randomised leaky ReLU with the mean of its slopes, as in evaluation mode.

    Args:
        slopes: written for the backward pass.
    """
    slopes.fill_(1.0).masked_fill_(x <= 0, (lower + upper) / 2)
    return x * slopes


# operators whose results are computed from what they are given, with random numbers
COMPUTED: dict[str, Callable[..., Any]] = {
    "native_dropout": kept,
    "_fused_dropout": kept,
    "rrelu_with_noise": middling,
    "rrelu_with_noise_": lambda x, *rest: x.copy_(middling(x, *rest)),
    "rrelu_with_noise_functional": lambda x, slopes, *rest: (
        middling(x, drawn := slopes.clone(), *rest),
        drawn,
    ),
}


def scale_of(name: str, given: dict[str, Any]) -> tuple[Any, Any]:
    """Zero and unit of what an operator draws: numbers or tensors."""
    if name.startswith("uniform"):
        least, end = given.get("from", 0.0), given.get("to", 1.0)
        return least, end - least
    if "normal" in name:
        return given.get("mean", 0.0), given.get("std", 1.0)
    if name.startswith("exponential"):
        return 0.0, 1 / given.get("lambd", 1.0)
    if name.startswith("cauchy"):
        return given.get("median", 0.0), given.get("sigma", 1.0)
    return 0.0, 1.0
