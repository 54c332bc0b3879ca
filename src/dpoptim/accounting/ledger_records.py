"""Reports of a ledger, as values and as lines for people: its runs, charges, and what is left."""

import math
import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import dp_accounting as dp

from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.accounting.budget import Budget
from dpoptim.accounting.budget_words import Remaining, WholeBudgetWarning, spent, takes_all
from dpoptim.accounting.event_json import event_text
from dpoptim.accounting.guarantee import Guarantee, rounded_up
from dpoptim.accounting.ledger_refusals import known_run
from dpoptim.accounting.ledger_runs import Reservation, Runs, verify_entries
from dpoptim.accounting.ledger_store import LedgerStore
from dpoptim.errors import LedgerError
from dpoptim.notebook import as_table
from dpoptim.printable import printable
from dpoptim.privacy_unit import RECORD, Unit

MOST_COMPOSED = 16  # of runs on a budget: a fit should not wait for composing more
ON_LEDGER = "runs on its ledger together"
DELTA = 1e-6  # where a ledger without a budget states its runs


def delta_of(budget: Budget | None) -> float:
    """Where a ledger's text and page state epsilon."""
    return DELTA if budget is None else budget.delta


def lines_of(
    entries: Sequence[Reservation], shares: Sequence[float], delta: float, *, events: bool
) -> list[str]:
    """One line a run: time, label, epsilon, share of the budget if there is one, state and id.

    Args:
        events: whether its event is on a line of its own below.
    """
    known: dict[str, Guarantee] = {}
    lines = []
    for entry, share in zip(entries, shares, strict=False):  # others may add runs meanwhile
        text = event_text(entry.event)
        if text not in known:
            known[text] = compute_epsilon(entry.event, delta, entry.neighboring)
        part = "" if math.isnan(share) else f", {in_percent(share)} of the filter's bound"
        lines.append(
            f"  {entry.time}  {printable(entry.label)}: "
            f"epsilon={rounded_up(known[text].epsilon)} at delta={delta:g}{part} "
            f"[{state_of(entry)}] {entry.id}"
        )
        if events:
            lines.append(f"      {entry.event}")
    return lines


def in_percent(share: float) -> str:
    """A run's share of a filter's bound: at most all of it, which only a first run takes."""
    return f"{share:.1%}" if share < 1 else "all"


def why_shares_differ(budget: Budget) -> list[str]:
    """Why runs of one epsilon may take different shares, in one line."""
    if budget.order is None:
        return []
    return [
        f"  shares are of the filter's bound ({budget.currency}): runs of one epsilon take "
        "different ones, small batches with little noise the largest"
    ]


def state_of(entry: Reservation) -> str:
    """The state, and what became of the run on its way there."""
    again = f", resumed {entry.resumed} times" if entry.resumed else ""
    again += f", up to {entry.repeated} releases made again" if entry.repeated else ""
    if entry.part is not None:
        again += f" after {entry.begun} releases, which are what the budget counts"
    return f"{entry.state}{again}"


def composed_epsilon(entries: Sequence[Reservation], delta: float, neighboring: str) -> float:
    """Epsilon of all runs; infinite where no accountant composes them."""
    try:
        return spent(None, [entry.event for entry in entries], delta, neighboring).epsilon
    except ValueError:  # such as selections with Poisson samples, under replace-one
        return math.inf


def total_of(entries: Sequence[Reservation], budget: Budget | None, neighboring: str) -> str:
    """Cost of all runs together, in one line."""
    return f"  together  {cost_of(entries, budget, neighboring, DELTA)}"


def cost_of(
    entries: Sequence[Reservation], budget: Budget | None, neighboring: str, delta: float
) -> str:
    """Cost of all runs together: as composed, and what holds if one was planned on another.

    Args:
        delta: where it is stated without a budget; else at the budget's.
    """
    delta = delta if budget is None else budget.delta
    epsilon = composed_epsilon(entries, delta, neighboring)
    composed = f"epsilon={rounded_up(epsilon)} at delta={delta:g}"
    if len(entries) < 2:
        return composed
    composed += ", if no run's settings depended on what an earlier one released"
    if budget is None:
        return f"{composed}; without a budget nothing else is known"
    kept = f"at most epsilon={budget.epsilon:g} at delta={delta:g}, the budget"
    if epsilon >= budget.epsilon:  # of runs that were ended early it counts a part
        return kept
    return f"{composed}; if they did, {kept}"


def scope_on_ledger(ledger: "LedgerRecords", delta: float) -> tuple[str, ...]:
    """Notes on the cost of all runs on a ledger together, if there are several.

    Args:
        delta: where it is stated without a budget; else at the budget's.
    """
    entries = ledger.entries()
    if len(entries) < 2:
        return ()
    if ledger.budget is not None and len(entries) > MOST_COMPOSED:
        budget = ledger.budget
        cost = f"at most epsilon={budget.epsilon:g} at delta={budget.delta:g}, the budget"
    else:
        cost = cost_of(entries, ledger.budget, ledger.neighboring, delta)
    return (f"all {len(entries)} {ON_LEDGER}: {cost}",)


class LedgerRecords:
    """The reading side of `Ledger`, which sets what is read."""

    dataset: str
    neighboring: str
    budget: Budget | None
    unit = RECORD.name  # that runs reserved by way of this object protect
    of_all_ranks = False  # whether all processes of a run charge it together
    _store: LedgerStore
    _runs: Runs
    _lock: threading.RLock

    def _take(self, store: LedgerStore) -> None:
        """Set what is read of a ledger that nothing was read of."""
        stored, self._store = store.settings, store
        self.dataset, self.neighboring = stored.dataset, stored.neighboring
        self.budget = stored.budget
        self.made: list[str] = []  # ids of what was reserved by way of this object, oldest first
        self._lock = threading.RLock()
        self._runs = Runs(store.start(), self.neighboring, stored.unit)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copy of a run or an estimator charges the same data set

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is None:
            raise TypeError(
                "a ledger in memory cannot be pickled: charges elsewhere would be lost. Fix: "
                "Ledger(path)."
            )
        return _unpickled, (type(self), self.unit, *self._store.pickled(self._runs.head))

    @property
    def id(self) -> str:
        """A random name, which tells it from any other ledger, also one at the same path."""
        return self._store.settings.ledger

    def of_units(self, unit: str) -> Self:
        """This ledger, for runs that protect each ``"record"``, or each ``"person"``.

        Runs of both do not add up: `reserve` and `check` refuse those of another unit than the
        ledger's runs before.
        """
        view = object.__new__(type(self))
        view.__dict__ |= self.__dict__ | {"unit": Unit(unit).name}
        return view

    def why_nothing_is_returned(self, reservation_id: str) -> str:
        """Why the budget gets nothing back when this run ends early; "" if it does. Public."""
        with self._lock:
            runs = self._sync()
            found = known_run(
                runs, reservation_id, self._where, "ask the ledger that it was charged to"
            )
            return self._why_nothing_is_returned(runs, found)

    def _why_nothing_is_returned(self, runs: Runs, run: Reservation) -> str:
        if self.budget is None:
            return "this ledger has no budget"
        return runs.why_nothing_is_returned(run, self.budget)

    def knows_checkpoint(self, reservation_id: str, released: int, digest: str) -> bool:
        """Whether the run saved this checkpoint, after so many releases."""
        with self._lock:
            return self._sync().saved.get(digest) == (reservation_id, released)

    def holds(self, reservation: Reservation) -> bool:
        """Whether the charge is there; False also where the ledger cannot be read."""
        try:
            with self._lock:
                return reservation.id in self._sync().by_id
        except LedgerError:
            return False

    def entries(self) -> list[Reservation]:
        """All reservations, oldest first."""
        with self._lock:
            return list(self._sync().by_id.values())

    @property
    def digest(self) -> str:
        """Covers settings and entries; written down elsewhere, it shows whether all remain."""
        with self._lock:
            return self._sync().head.digest

    def verify(self, *, digest: str | None = None) -> int:
        """Check the whole file: structure, chain, entries, and that the budget admitted each run.

        Args:
            digest: what `digest` was at some time; it must be one of the chain's.

        Returns the number of entries. Raises LedgerError for anything that is not as it should be.
        """
        return verify_entries(self._store, self.budget, self.neighboring, digest)

    def spent(self, delta: float | None = None) -> Guarantee:
        """The guarantee of the releases so far.

        One run: that run's own accounting. Several under a budget: the budget, since what a filter
        has used at a point that outputs chose is not a guarantee. Several without one:
        composition, valid only if all parameters were fixed beforehand; the guarantee says so.

        Use this where any run's settings, or whether there was one, depended on earlier outputs. If
        none did, `describe` says what all runs cost by composition (its line "together"), which is
        less while a budget is hardly used.

        Args:
            delta: default the budget's; required without a budget.
        """
        if delta is None:
            if self.budget is None:
                raise ValueError(
                    "delta: this ledger has no budget; name the delta to report epsilon at"
                )
            delta = self.budget.delta
        entries = self.entries()
        found = spent(self.budget, [entry.event for entry in entries], delta, self.neighboring)
        return replace(found, unit=entries[0].unit if entries else self.unit)

    def remaining(self) -> Remaining:
        """The rest of the budget; printable."""
        with self._lock:
            runs = self._sync()
            charges = [] if self.budget is None else runs.charges(self.budget)
            return Remaining.of(self.budget, charges, len(runs.by_id))

    def shares(self) -> list[float]:
        """Each run's part of the budget, as a share of its filter's bound, oldest first.

        A single run may take more than 1 of the bound: it is admitted by its own epsilon.

        Raises:
            ValueError: there is no budget to share.
        """
        if self.budget is None:
            raise ValueError("this ledger has no budget, so its runs take no share of one.")
        with self._lock:
            return [charge / self.budget.limit for charge in self._sync().charges(self.budget)]

    def __repr__(self) -> str:
        name = f"Ledger of {printable(self.dataset)!r} ({self.neighboring})"
        try:
            return f"<{name}: {self.remaining()}>"
        except LedgerError as error:
            return f"<{name}: {error}>"

    def _repr_html_(self) -> str:
        """For notebooks: `describe` as a table."""
        return as_table(self.describe())

    def describe(self, *, events: bool = False) -> str:
        """The ledger for a person: the sum of its runs, budget, what is left, and each run.

        Args:
            events: whether each run's event, by which other accountants compute its epsilon, is
                below it.
        """
        entries = self.entries()
        by = "" if not entries or entries[0].unit == RECORD.name else f", per {entries[0].unit}"
        name = printable(self.dataset)
        head = f"Ledger of data set {name!r} ({self.neighboring}{by}), {self._where}"
        lines = [head, f"  {self.remaining()}"]
        if not entries:
            return "\n".join(lines)
        shares = [math.nan] * len(entries) if self.budget is None else self.shares()
        lines.insert(1, total_of(entries, self.budget, self.neighboring))
        lines += lines_of(entries, shares, delta_of(self.budget), events=events)
        lines += [] if self.budget is None else why_shares_differ(self.budget)
        return "\n".join(lines)

    def takes_all(self, event: dp.DpEvent) -> str:
        """The warning that a run of this event would leave nothing to later ones; "" if none.

        Of a first run alone: later ones are not admitted where they do not fit. Public.
        """
        with self._lock:
            first = not self._sync().by_id
        return takes_all(self.budget, event) if first and self.budget is not None else ""

    def _warn_if_it_takes_all(self, event: dp.DpEvent) -> None:
        if said := self.takes_all(event):
            warnings.warn(f"{self._where}: {said}.", WholeBudgetWarning, stacklevel=3)

    @property
    def path(self) -> Path | None:
        """The ledger's file; None: it is in memory."""
        return self._store.path

    @property
    def durable(self) -> bool:
        """Whether reservations outlive the process."""
        return self.path is not None

    @property
    def _where(self) -> str:
        return "in memory" if self.path is None else printable(str(self.path))

    def _sync(self) -> Runs:
        """The runs with what was written in the meantime, by whomever."""
        with self._lock:
            new, head = self._store.read(self._runs.head)
            if new:
                self._runs.add(new, head)
            return self._runs


def _unpickled(kind: type[LedgerRecords], unit: str, *kept: Any) -> LedgerRecords:
    """A ledger whose file is looked at when it is asked or charged: to predict, nobody needs it."""
    ledger = object.__new__(kind)
    ledger._take(LedgerStore.unpickled(*kept))
    return ledger.of_units(unit)
