"""Fits of this process on the same records, by estimators that are no clones of each other.

A loop that makes an estimator for each setting fits all of them on one table, and the guarantee of
each is of its own fit. As `training.other_runs` does for runs, they are known again by the objects
that the program handed over, and what they cost together is said.
"""

import math
import warnings
import weakref
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import issparse

from dpoptim.accounting.guarantee import neighboring_name
from dpoptim.accounting.ledger import Ledger
from dpoptim.estimators.repeats import LEDGER, CountsFits, Fit, FitCount, kinds_of, price_together
from dpoptim.training.other_runs import DO_NOT_ADD_UP, OtherRunsWarning

FIX = "Each privacy_ is of its own fit. Fix: find settings on public records, or by dpoptim.tuning"


class Rows(NamedTuple):
    """Rows of an array in memory: every ``step``-th of ``count``; of None all, once."""

    array: "weakref.ref[Any]"
    places: tuple[int, int, int] | None

    @property
    def is_there(self) -> bool:
        return self.array() is not None

    def shares_records(self, other: "Rows") -> bool:
        """Whether both have a row of one array; also said where steps differ, and they may."""
        if self.array() is None or self.array() is not other.array():
            return False
        if self.places is None or other.places is None:
            return True
        (start, step, count), (its_start, its_step, its_count) = self.places, other.places
        if step == its_step and (start - its_start) % step:
            return False
        return start <= its_start + its_step * (its_count - 1) and its_start <= start + step * (
            count - 1
        )


class KnownFit(NamedTuple):
    """A fit, of which estimator and its clones, on which ledger ("": none) and rows."""

    fit: Fit
    clones: FitCount
    ledger: str
    rows: tuple[Rows, ...]

    @property
    def is_there(self) -> bool:
        return any(each.is_there for each in self.rows)

    def shares_records(self, other: "KnownFit") -> bool:
        return any(one.shares_records(two) for one in self.rows for two in other.rows)

    def adds_nothing_up_with(self, other: "KnownFit") -> bool:
        """Whether neither a count of clones nor a ledger has both."""
        return self.clones is not other.clones and (not self.ledger or self.ledger != other.ledger)


_known: list[KnownFit] = []  # of this process, oldest first


def warn_of_other_fits(learner: CountsFits, data: tuple[Any, ...], before: int) -> None:
    """Remember the fit that was just made, and warn if others learnt from the same records.

    It comes with the 2nd, 4th, 8th, ... fit on them, and with the first for other units or
    neighbours.

    Args:
        data: that ``fit`` was given. before: fits that were counted before it.

    **Guarantee.** Whether it warns, and what it says, is read off events, ledgers, and which
    objects the program handed over: not off records.
    """
    count: FitCount | None = vars(learner).get("_fit_count")
    if count is None or len(count.fits) == before:
        return  # it released nothing, or another fit counts it
    ledger: Ledger | None = learner.ledger
    rows = rows_in(data)
    this = KnownFit(count.fits[-1], count, "" if ledger is None else ledger.id, rows)
    _known[:] = [one for one in _known if one.is_there]
    others = [one for one in _known if one.shares_records(this)]
    _known.append(this)
    if not any(one.adds_nothing_up_with(this) for one in others):
        return
    earlier = [one.fit for one in others]
    fits = [*earlier, this.fit]
    other_kind = not kinds_of([this.fit]) <= kinds_of(earlier)
    if not other_kind and not math.log2(len(fits)).is_integer():
        return
    price = price_together(fits)
    cost = price if price == DO_NOT_ADD_UP else f"all together: {price}"
    relation = neighboring_name(this.fit.guarantee.neighboring)
    words = (
        f"{type(learner).__name__}: {len(fits)} fits of this process so far learnt from the same "
        f"records, and no ledger adds them up; {cost}. "
        f"{FIX}{LEDGER.format(relation)}."
    )
    warnings.warn(words, OtherRunsWarning, stacklevel=4)


def rows_in(data: tuple[Any, ...]) -> tuple[Rows, ...]:
    """Rows of all arguments that can be known again."""
    return tuple(found for each in data if (found := rows_of(each)) is not None)


def rows_of(given: Any) -> Rows | None:
    """Rows that can be known again: of an array, a series or sparse table, or a whole frame."""
    if hasattr(given, "columns"):  # the values of a frame may be made anew for each look
        return whole(given)
    array = array_in(given)
    if not isinstance(array, np.ndarray) or not array.ndim:
        return None
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    across = root.strides[0] if root.ndim else 0
    if issparse(given) or not array.size or not across or array.strides[0] % across:
        return whole(root)
    step, count = array.strides[0] // across, len(array)
    start = (array.ctypes.data - root.ctypes.data) // across
    if step < 0:
        start, step = start + step * (count - 1), -step
    return Rows(weakref.ref(root), (start, step, count) if step else None)


def array_in(given: Any) -> Any:
    """The array that a sparse table (but for a dictionary of keys), series or array has."""
    array = getattr(given, "data", None) if issparse(given) else given
    return array if isinstance(array, np.ndarray) else getattr(array, "values", None)


def whole(holder: Any) -> Rows | None:
    """All rows; None of what cannot be known again."""
    with suppress(TypeError):
        return Rows(weakref.ref(holder), None)
    return None
