"""The ledger of a data set: what was promised about its records, written down before it is spent.

Every run that looks at private data first reserves its whole event here. A reservation counts in full
from then on, whether the run finishes, crashes or is stopped early; nothing lowers it. `budget.py` says
which runs a budget admits and proves it.

Only public values are stored: events (mechanisms and their parameters), labels, times and the budget.

**Guarantee** (budgeted ledger). The releases of all admitted runs together are (epsilon, delta)-DP for
the ledger's relation if (1) every run on the data reserves here, in this one ledger; (2) each does what
its event says; (3) its parameters were chosen from public values and earlier outputs, not from the data;
(4) the file is not replaced by an older copy; (5) what a resumed run repeats was not released before.
The ledger cannot check these five; the gate sees to (1) and (2) for runs of this library.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import dp_accounting as dp

from dpoptim.accounting.balance import BudgetExceeded, Remaining, refusal, spent
from dpoptim.accounting.budget import FilterKind
from dpoptim.accounting.canonical import canonical
from dpoptim.accounting.events import event_from_json, event_to_json
from dpoptim.accounting.guarantee import Guarantee, neighboring_name
from dpoptim.accounting.ledger_settings import LedgerError, Wanted
from dpoptim.accounting.ledger_store import LedgerStore, Row

__all__ = ["BudgetExceeded", "Ledger", "LedgerError", "Remaining", "Reservation"]


@dataclass(frozen=True)
class Reservation:
    """One run's charge. `state` is "open" or "committed"; both count in full."""

    id: str
    time: str  # UTC, ISO 8601
    label: str
    event: dp.DpEvent
    neighboring: str
    state: str = "open"
    resumed: int = 0  # how often the run was taken up again


class Ledger:
    """Reservations on one data set, durable and safe between processes.

    Args:
        path: an SQLite file, made if it does not exist (its directory must); None keeps the ledger in
            memory, for tests and for data that is used in this process only.
        dataset: a name for people; by default the file's stem.
        epsilon, delta: the budget, both or neither (no budget: everything is admitted and written down).
        neighboring: the one relation of all reservations; "add-or-remove-one" by default.
        filter: how a budget is kept across runs, see `budget.py`. "renyi" by default; "basic" also
            admits several runs where RDP has no answer (Poisson sampling under replace-one), for a
            larger share of the budget each.

    All but `path` are fixed when the ledger is made. Opening it again adopts what is stored; whatever is
    named then must agree with it.

    Raises LedgerError if the path is no usable ledger or disagrees with what is named; ValueError for a
    budget out of range.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        dataset: str | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        neighboring: str | dp.NeighboringRelation | None = None,
        filter: FilterKind | None = None,
    ) -> None:
        file = None if path is None else Path(path).expanduser().absolute()  # also after a chdir
        relation = None if neighboring is None else neighboring_name(neighboring)
        wanted = Wanted(dataset, epsilon, delta, relation, filter)
        default_name = "unnamed" if file is None else file.stem
        self._store = LedgerStore(file, wanted.as_new(dataset=default_name, created=_now()))
        stored = self._store.settings
        wanted.require_agreement(stored, self._where)
        self.dataset = stored.dataset
        self.neighboring = stored.neighboring
        self.budget = stored.budget

    def reserve(self, event: dp.DpEvent, *, neighboring: str | dp.NeighboringRelation, label: str) -> Reservation:
        """Charges a run's whole event; on disk when this returns. Call it before any noisy value exists.

        Args:
            event: everything the run may release, for a noise multiplier over the per-record norm bound.
            neighboring: the relation the run's sensitivities hold for; must be the ledger's.
            label: a name for people, 1 to 200 characters. It is stored: put nothing private in it.

        Raises BudgetExceeded if the budget does not admit it, LedgerError if it could not be written
        (do not run then), TypeError or ValueError for an event that has no stored form or that no
        accountant can evaluate.
        """
        if not isinstance(label, str) or not 1 <= len(label) <= 200:
            raise ValueError(f"label: expected 1 to 200 characters, got {label!r}")
        row = Row(id=uuid.uuid4().hex, time=_now(), label=label, event=_text(event))
        while True:
            earlier = self.entries()
            self._admit(event, neighboring, earlier)  # may take seconds, so not inside the transaction
            if self._store.append(row, after=len(earlier)):
                return self._reservation(row)

    def check(self, event: dp.DpEvent, neighboring: str | dp.NeighboringRelation) -> None:
        """Raises what `reserve` would raise for this event now; writes nothing."""
        _text(event)
        self._admit(event, neighboring, self.entries())

    def commit(self, reservation: Reservation) -> None:
        """Marks the run as completed. It counted before and counts after; doing it twice is harmless."""
        if not self._store.mark_committed(reservation.id):
            raise LedgerError(f"{self._where}: no reservation {reservation.id!r} here; commit it where it was made")

    def resume(self, reservation_id: str, event: dp.DpEvent) -> Reservation:
        """The open reservation of a run that continues, so that it is not charged again.

        The charge covers each of the event's releases once. A run that goes back to a checkpoint draws
        fresh noise for the steps after it, so no value released after that checkpoint may have left
        the process that died; and two processes must not continue one run. Each call is counted in
        `Reservation.resumed` and shown by `describe`.

        Raises LedgerError if the reservation is unknown or committed, or was made for another event.
        """
        found = {entry.id: entry for entry in self.entries()}.get(reservation_id)
        if found is None:
            raise LedgerError(f"{self._where}: no reservation {reservation_id!r} here; reserve the run anew")
        if _text(found.event) != _text(event):
            raise LedgerError(
                f"{self._where}: reservation {reservation_id!r} ({found.label}) was made for {found.event}, "
                f"not for {event}; continue with the plan it was made for, or reserve the new one"
            )
        if not self._store.mark_resumed(reservation_id):
            raise LedgerError(
                f"{self._where}: the run {found.label!r} was completed, its reservation is used up; "
                "reserve the further steps anew"
            )
        return replace(found, resumed=found.resumed + 1)

    def entries(self) -> list[Reservation]:
        """All reservations, oldest first."""
        return [self._reservation(row) for row in self._store.rows()]

    def spent(self, delta: float | None = None) -> Guarantee:
        """What may be claimed for the releases so far.

        One run: that run's own accounting. Several under a budget: the budget, since what a filter has
        used at a point that outputs chose is not a guarantee. Several without one: composition, valid
        only if all parameters were fixed beforehand; the guarantee says so.

        Args:
            delta: default the budget's; required without a budget.
        """
        if delta is None:
            if self.budget is None:
                raise ValueError("delta: this ledger has no budget; name the delta to report epsilon at")
            delta = self.budget.delta
        return spent(self.budget, self._events(), delta, self.neighboring)

    def remaining(self) -> Remaining:
        """What the budget still admits; printable."""
        return Remaining.of(self.budget, self._events())

    def describe(self) -> str:
        """The ledger for a person: budget, what is left, and each run."""
        lines = [
            f"Ledger of data set {self.dataset!r} ({self.neighboring}), {self._where}",
            f"  {self.remaining()}",
        ]
        for entry in self.entries():
            again = f", resumed {entry.resumed} times" if entry.resumed else ""
            lines.append(f"  {entry.time}  {entry.label}: {entry.event} [{entry.state}{again}] {entry.id}")
        return "\n".join(lines)

    def close(self) -> None:
        """Releases a ledger in memory; a file is open only while an operation lasts."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copy of a run or an estimator charges the same data set

    def __reduce__(self) -> tuple[type[Ledger], tuple[Path]]:
        if self._store.path is None:
            raise TypeError("a ledger in memory cannot be pickled: charges elsewhere would be lost. Fix: Ledger(path).")
        return Ledger, (self._store.path,)

    @property
    def durable(self) -> bool:
        """Whether reservations outlive the process."""
        return self._store.path is not None

    @property
    def _where(self) -> str:
        return "in memory" if self._store.path is None else str(self._store.path)

    def _events(self) -> list[dp.DpEvent]:
        return [entry.event for entry in self.entries()]

    def _admit(self, event: dp.DpEvent, neighboring: str | dp.NeighboringRelation, earlier: list[Reservation]) -> None:
        relation = neighboring_name(neighboring)
        if relation != self.neighboring:
            raise LedgerError(
                f"{self._where}: this ledger counts under {self.neighboring}, the run under {relation}; "
                f"plan the run for {self.neighboring}, or keep all its data set's runs under {relation}"
            )
        canonical(event)  # an event that no accountant can read is refused without a budget, too
        events = [entry.event for entry in earlier]
        if self.budget is not None and (short := self.budget.shortfall(events, event)) is not None:
            raise refusal(self.budget, short, runs=len(events), dataset=self.dataset)

    def _reservation(self, row: Row) -> Reservation:
        try:
            event = event_from_json(json.loads(row.event))
        except (TypeError, ValueError) as error:
            raise LedgerError(
                f"{self._where}: reservation {row.id} cannot be read ({error}); upgrade dpoptim, or restore the file"
            ) from error
        return Reservation(row.id, row.time, row.label, event, self.neighboring, row.state, row.resumed)


def _text(event: dp.DpEvent) -> str:
    """The event's stored form; equal texts are equal events."""
    return json.dumps(event_to_json(event), sort_keys=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
