"""Fits of an estimator and of its clones, as searches make them: what they cost together.

`GridSearchCV` and `cross_val_score` fit clones, and the guarantee of each is of its own fit. So an
estimator shares a count of fits with its clones, and says what they cost together. It holds events
and numbers of records, which are public.
"""

import math
import os
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple, Self
from uuid import uuid4
from weakref import WeakValueDictionary

from dp_accounting import DpEvent, NeighboringRelation
from sklearn.base import BaseEstimator

from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.accounting.budget_words import spent
from dpoptim.accounting.event_json import event_text
from dpoptim.accounting.guarantee import Guarantee, neighboring_name, rounded_up
from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.ledger_records import delta_of, scope_on_ledger
from dpoptim.estimators.table import READ_OFF
from dpoptim.training.other_runs import DO_NOT_ADD_UP

ON_TRUST = "on trust: preprocessing and settings were not read off these records"
ALONE = "this fit alone: others on the same records add to it, and no ledger counts them"
RESTATED = "the same fit as its ledger states it"
FROM_EARLIER = "started from an earlier fit: the guarantee of that fit adds to this one's"
ELSEWHERE = "its copies in other processes are not counted in that"
ARRIVED = "a copy from another process was fitted: the fits of all copies add up"
FIX = (
    "So the same records pay for all; scores on held-out private records come on top, protected by "
    "nothing. Fix: choose settings by dpoptim.tuning (tune_on_public, DPSearchCV)"
)
LEDGER = (
    "; with ledger=dpoptim.Ledger(path, epsilon=, delta=, neighboring={!r}) every fit counts, and "
    "none exceeds a budget"
)
_counting: ContextVar[bool] = ContextVar("counting", default=True)
_here: "WeakValueDictionary[str, FitCount]" = WeakValueDictionary()  # counts of this process


def label_of(name: str, epsilon: float, delta: float) -> str:
    """A ledger's label for a fit: the ledger states all runs at one delta, this at its own."""
    return f"{name} (epsilon={epsilon:g} at delta={delta:g})"


def with_scope(guarantee: Guarantee, scope: tuple[str, ...]) -> Guarantee:
    """The guarantee of one fit with further notes: of which fits it speaks, and what is trusted."""
    notes = dict.fromkeys((*guarantee.notes, *scope, ON_TRUST))
    # first what nothing can be protected by: a rare label names a record
    return replace(guarantee, notes=tuple(sorted(notes, key=lambda note: note != READ_OFF)))


class RepeatedFitWarning(UserWarning):
    """Clones of an estimator were fitted, as a search does: what all fits cost together.

    It comes after 2, 4, 8, ... fits, and after one on more records than all before, which ends a
    search (if that is a clone's second fit, after the next clone's first); and after the first for
    another unit or relation, with which none of them adds up. The notes of every
    ``privacy_`` have it, too. An error by ``warnings``' filters, it comes when a fit is done and
    charged.
    """


@contextmanager
def uncounted() -> Iterator[None]:
    """Leave out the fits in this ``with``: of public records, or parts of what counts whole."""
    token = _counting.set(False)
    try:
        yield
    finally:
        _counting.reset(token)


class Fit(NamedTuple):
    """The event of a fit, what it guarantees, and on how many records; public.

    Attributes:
        whole: whether the event is all that the model has cost; not of one chunk of several.
    """

    event: DpEvent
    guarantee: Guarantee
    records: int
    whole: bool = True


class Paid(NamedTuple):
    """The price of what an estimator has learnt, as it is kept and pickled with it; public.

    Attributes:
        event: as `event_text` writes it; "": no event is all of it.
        records: so many.
    """

    event: str
    records: int


class FitCount:
    """The fits of an estimator and of its clones in this process.

    Args:
        arrived: whether it was unpickled in another process than it was pickled in.
    """

    def __init__(self, *, arrived: bool = False) -> None:
        self._name = uuid.uuid4().hex
        _here[self._name] = self
        self._fits: list[Fit] = []
        self._ledgers: set[str] = set()  # that they were charged to; "": none
        self._arrived, self._sent = arrived, False
        self._due = False  # whether the time to warn has come, and it was a fit by hand
        self._unsaid, self._fix = "", ""

    def __repr__(self) -> str:
        return f"FitCount of {len(self._fits)}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, tuple[str, int]]:
        self._sent = True
        return arrived, (self._name, os.getpid())

    def add(self, fit: Fit, ledger: Ledger | None, *, by_hand: bool) -> Guarantee:
        """Count a fit; its guarantee, whose notes say what all cost.

        Args:
            by_hand: whether the estimator was fitted before itself, as no search does.
        """
        # after 2, 4, 8, ... fits; and for the whole table after its folds, as a search ends
        largest = max((each.records for each in self._fits), default=0)
        other_kind = bool(self._fits) and not kinds_of([fit]) <= kinds_of(self._fits)
        self._fits.append(fit)
        self._ledgers.add("" if ledger is None else ledger.id)
        self._due |= math.log2(len(self._fits)).is_integer() or fit.records > largest or other_kind
        scope = self._scope(ledger, fit)
        relation = neighboring_name(fit.guarantee.neighboring)
        self._fix = FIX + (LEDGER.format(relation) if ledger is None else "")
        if self._arrived:  # always the same words, which are shown once in each process
            self._unsaid = ARRIVED
        elif self._has_company and self._due and (other_kind or not by_hand):
            self._due = False
            self._unsaid = "; ".join(note for note in scope if note != ALONE)
        return with_scope(fit.guarantee, scope)

    @property
    def _has_company(self) -> bool:
        return len(self._fits) > 1 or self._sent or self._arrived

    @property
    def fits(self) -> list[Fit]:
        """All that were counted, oldest first."""
        return self._fits

    def _scope(self, ledger: Ledger | None, fit: Fit) -> tuple[str, ...]:
        on_ledger = scope_of(fit, ledger)
        # nothing beside a ledger that knows of all of them
        if not self._has_company or (ledger is not None and len(self._ledgers) == 1):
            return on_ledger
        counted = (
            f"all {len(self._fits)} fits of it and its clones so far: {price_together(self._fits)}"
        )
        return (*on_ledger, counted, *([ELSEWHERE] if self._sent or self._arrived else []))

    def say(self, who: str) -> None:
        """Warn of repeated fits, if the last one was the time to."""
        unsaid, self._unsaid = self._unsaid, ""
        if unsaid:
            warnings.warn(f"{who}: {unsaid}. {self._fix}.", RepeatedFitWarning, stacklevel=4)


def scope_of(fit: Fit, ledger: Ledger | None) -> tuple[str, ...]:
    """Notes on what a fit costs as its ledger states it, and on the other runs there."""
    if ledger is None:
        return (ALONE,)
    own, delta = fit.guarantee, delta_of(ledger.budget)
    restated: tuple[str, ...] = ()
    if delta != own.delta and own.status == "proven":
        there = compute_epsilon(fit.event, delta, own.neighboring)
        restated = (f"{RESTATED}: epsilon={rounded_up(there.epsilon)} at delta={delta:g}",)
    return (*restated, *scope_on_ledger(ledger, own.delta))


def kinds_of(fits: Sequence[Fit]) -> set[tuple[NeighboringRelation, str]]:
    """The relations and units of fits; of more than one kind, they do not add up."""
    return {(each.guarantee.neighboring, each.guarantee.unit) for each in fits}


def price_together(fits: Sequence[Fit]) -> str:
    """The price of all fits, in words; none of fits for other units or relations.

    **Guarantee.** By composition, at the last fit's delta, whoever the records are; those that
    only some fits have seen are protected better. A fit of another kind costs the last one's units
    too, and no theorem here says how much: so there is no sum, not even of those that are alike.
    """
    last = fits[-1].guarantee
    if len(kinds_of(fits)) > 1:
        return DO_NOT_ADD_UP
    whole = spent(
        None, [each.event for each in fits], last.delta, neighboring_name(last.neighboring)
    )
    unproven = [each.guarantee.status for each in fits if each.guarantee.status != "proven"]
    return str(replace(whole, unit=last.unit, status=[*unproven, whole.status][0]))


def arrived(name: str = "", process: int = 0) -> FitCount:
    """The count of a copy: its own in the process that pickled it, if it is there still.

    Args:
        name, process: of the count; earlier versions told neither.
    """
    here = _here.get(name) if process == os.getpid() else None
    return FitCount(arrived=True) if here is None else here


class CountsFits(BaseEstimator):
    """Base of everything that learns privately in scikit-learn's manner."""

    ledger: Ledger | None
    privacy_: Any  # the `Guarantee` of the last fit; None where nothing was read
    ledger_run_: str | None  # the id of the last fit's charge on its ledger
    _paid: Paid
    _fit_id: str  # of the last fit, whose parts have it, too

    def __sklearn_clone__(self) -> Any:
        clone: Any = super().__sklearn_clone__()
        clone._fit_count = self._count
        return clone

    @property
    def _count(self) -> FitCount:
        """Shared with clones; made when first needed, since a new estimator has settings alone."""
        count: FitCount = self.__dict__.setdefault("_fit_count", FitCount())
        return count

    def _counted(self, fit: Fit) -> Guarantee:
        """The guarantee of a fit with its scope, and the count with this fit."""
        self._paid = Paid(event_text(fit.event) if fit.whole else "", fit.records)
        self._fit_id = uuid4().hex
        if not _counting.get():
            ledger = self.ledger
            return with_scope(fit.guarantee, scope_of(fit, ledger))
        by_hand = getattr(self, "privacy_", None) is not None
        return self._count.add(fit, self.ledger, by_hand=by_hand)

    def _fitted_parts(self) -> tuple[Any, ...]:
        """The estimators in this one that its fit has fitted: steps of a pipeline, a winner."""
        winner = getattr(self, "best_estimator_", None)
        return () if winner is None else (winner,)

    def _note_charge(self, run: str | None) -> None:
        """Keep the id of the last fit's charge."""
        self.ledger_run_ = run

    def _warn_of_repeats(self) -> None:
        self._count.say(type(self).__name__)
