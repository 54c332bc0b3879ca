"""The ledger of a data set: what was promised about its records, written down before it is spent.

Every run that looks at private data first reserves its whole event here. A reservation counts in
full from then on, whether the run finishes, crashes or is stopped early. Only a run that is ended
for good gives back, to the budget, what it has not released. `budget.py` says which runs a budget
admits and what may be given back, and proves it.

Only public values are stored: events (mechanisms and their parameters), labels, times and the
budget.

**Guarantee** (budgeted ledger). The releases of all admitted runs together are (epsilon, delta)-DP
for the ledger's relation if (1) every run on the data reserves here, in this one ledger; (2) each
does what its event says; (3) its parameters were chosen from public values and earlier outputs,
not from the data; (4) the file is not replaced by an older copy; (5) what a resumed run repeats
was not released before. The ledger cannot check these five; the gate sees to (1) and (2) for runs
of this library.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import dp_accounting as dp

from dpoptim.accounting.budget import FilterKind
from dpoptim.accounting.budget_words import BudgetExceeded, Remaining
from dpoptim.accounting.event_json import event_text
from dpoptim.accounting.guarantee import neighboring_name
from dpoptim.accounting.ledger_records import LedgerRecords
from dpoptim.accounting.ledger_refusals import (
    known_run,
    open_run,
    refuse_former_holder,
    refuse_other_neighbours,
    refuse_to_resume,
    require_accountant,
)
from dpoptim.accounting.ledger_runs import Reservation, Runs
from dpoptim.accounting.ledger_schema import Entry, Kind
from dpoptim.accounting.ledger_settings import Wanted, require_forms, utc_now
from dpoptim.accounting.ledger_store import LedgerStore
from dpoptim.errors import LedgerError
from dpoptim.opacus_words import KnowsOpacus
from dpoptim.printable import printable, storable

__all__ = ["BudgetExceeded", "Ledger", "LedgerError", "Remaining", "Reservation"]


class Ledger(KnowsOpacus, LedgerRecords):
    """Reservations on one data set, durable and safe between processes.

    Args:
        path: an SQLite file, made if it does not exist (its directory must); None keeps the ledger
            in memory, for tests and for data that is used in this process only.
        dataset: a name for people; by default the file's stem.
        epsilon, delta: the budget, both or neither (no budget: everything is admitted and written
            down).
        neighboring: the one relation of all reservations; "add-or-remove-one" by default.
        filter: how a budget is kept across runs, see `budget.py`. "renyi" by default; "basic" also
            admits several runs where RDP has no answer (Poisson sampling under replace-one), for a
            larger share of the budget each.

    All but `path` are fixed when the ledger is made. Opening it again adopts what is stored;
    whatever is named then must agree with it.

    Raises LedgerError if the path is no usable ledger or disagrees with what is named; ValueError
    for a budget out of range.

    Examples:
        >>> import dpoptim
        >>> ledger = dpoptim.Ledger(epsilon=3.0, delta=1e-6)  # in memory; give a path to keep it
        >>> plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        ...     n=10_000, batch_size=500, epochs=5, epsilon=1.0, delta=1e-6
        ... )
        >>> _ = ledger.reserve(plan.event, neighboring=plan.neighboring, label="a first run")
        >>> len(ledger.entries())
        1
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
        name = None if dataset is None else storable(dataset)
        wanted = Wanted(name, epsilon, delta, relation, filter)
        default_name = "unnamed" if file is None else printable(file.stem)
        self._store = LedgerStore(file, wanted.as_new(dataset=default_name, created=utc_now()))
        wanted.require_agreement(self._store.settings, self._where)
        self._take(self._store)
        self._sync()

    def new_id(self) -> str:
        """An id for a run that is saved before it is charged; see `reserve`."""
        return uuid.uuid4().hex

    def reserve(
        self,
        event: dp.DpEvent,
        *,
        neighboring: str | dp.NeighboringRelation,
        label: str,
        run: str | None = None,
        checkpoints: Sequence[str] = (),
    ) -> Reservation:
        """Charge a run's whole event, on disk when this returns, before any noisy value exists.

        Args:
            event: everything the run may release, for a noise multiplier over the per-record norm
                bound.
            neighboring: the relation the run's sensitivities hold for; must be the ledger's.
            label: a name for people, 1 to 200 characters. It is stored: put nothing private in it.
            run: the id, which `new_id` gave; by default a new one.
            checkpoints: SHA-256 of each checkpoint that was saved before this charge: on disk with
                it, so a kill at any moment leaves a run that can be taken up, or no charge.

        Raises BudgetExceeded if the budget does not admit it, LedgerError if it could not be
        written (do not run then) or holds a run of this id, TypeError or ValueError for an event
        that has no stored form or that no accountant can evaluate.
        """
        if not isinstance(label, str) or not 1 <= len(label) <= 200:
            raise ValueError(f"label: expected 1 to 200 characters, got {label!r}")
        require_forms(run, checkpoints)
        name, begun = run or self.new_id(), utc_now()
        entry = Entry(Kind.RESERVED, name, begun, storable(label), event_text(event))
        saved = [Entry(Kind.SAVED, name, begun, body=f"0 0 {digest}") for digest in checkpoints]

        def decide(runs: Runs) -> list[Entry]:
            if name in runs.by_id:
                raise LedgerError(
                    f"{self._where}: this run is charged already, by whoever went on from the same "
                    "checkpoint. Fix: resume from the checkpoint that was saved last."
                )
            # may take seconds, so not inside the transaction
            self._admit((event,), neighboring, runs)
            of = [] if self.unit == runs.unit else [Entry(Kind.UNIT, name, begun, body=self.unit)]
            return [entry, *of, *saved]

        with self._lock:
            self._warn_if_it_takes_all(event)
            self._append(decide)
            self.made.append(entry.run)
            return self._runs.by_id[entry.run]

    def check(
        self, event: dp.DpEvent, neighboring: str | dp.NeighboringRelation, *later: dp.DpEvent
    ) -> None:
        """Raises what `reserve` would raise now for this event and, after it, for `later` ones."""
        with self._lock:
            self._admit((event, *later), neighboring, self._sync())

    def commit(self, reservation: Reservation) -> None:
        """Mark the run as completed, which counted before and counts after. Twice is harmless.

        Raises LedgerError if somebody has taken the run up since: of two holders, one completes it.
        """

        def decide(runs: Runs) -> Entry | None:
            found = known_run(runs, reservation.id, self._where, "commit it where it was made")
            refuse_former_holder(found, reservation.resumed, self._where)
            done = found.state != "open"
            return None if done else Entry(Kind.COMMITTED, found.id, utc_now())

        self._append(decide)

    def reenter(self, reservation_id: str, *, resumed: int) -> None:
        """Mark a completed run as open, in its own process; earlier checkpoints are void.

        Args:
            resumed: as for `begin_releases`.

        Raises LedgerError if the run was ended, or taken up elsewhere meanwhile.
        """

        def decide(runs: Runs) -> Entry | None:
            found = known_run(runs, reservation_id, self._where, "go on with it where it was made")
            if found.state == "committed" and found.resumed == resumed:
                return Entry(Kind.REENTERED, found.id, utc_now())
            open_run(runs, reservation_id, resumed, self._where)
            return None

        self._append(decide)

    def resume(
        self,
        reservation_id: str,
        event: dp.DpEvent,
        *,
        released: int = 0,
        checkpoint: str | None = None,
    ) -> Reservation:
        """The open reservation of a run that continues, so that it is not charged again.

        The charge covers each of the event's releases once. A run that goes back to a checkpoint
        draws fresh noise for the steps after it, so no value released after that checkpoint may
        have left the process that died; and two processes must not continue one run. Each call is
        counted in `Reservation.resumed`, what may be released again in `Reservation.repeated`;
        `describe` shows both.

        Args:
            released: how many releases the checkpoint remembers.
            checkpoint: its SHA-256; the ledger must know it now, too. None: not asked.

        Raises LedgerError if the reservation is unknown or committed, was made for another event,
        has not begun so many releases, or was entered again since the checkpoint was saved.
        """

        times = 0

        def decide(runs: Runs) -> Entry:
            nonlocal times
            found = known_run(runs, reservation_id, self._where, "reserve the run anew")
            times = found.resumed + 1
            refuse_to_resume(runs, found, event, released, checkpoint, self._where)
            return Entry(Kind.RESUMED, found.id, utc_now(), body=str(released))

        with self._lock:
            self._append(decide)
            # as this call made it, whoever has come since
            return replace(self._runs.by_id[reservation_id], resumed=times)

    def begin_releases(self, reservation_id: str, count: int, *, resumed: int) -> None:
        """Write down that the run may begin its releases up to number `count`; before it does.

        Args:
            resumed: how often the run had been taken up when the caller began. Raises LedgerError
                if somebody has taken it up since.
        """

        def decide(runs: Runs) -> Entry | None:
            found = open_run(runs, reservation_id, resumed, self._where)
            if count <= found.begun:
                return None
            return Entry(Kind.BEGUN, found.id, utc_now(), body=str(count))

        self._append(decide)

    def end(self, reservation_id: str, part: dp.DpEvent, *, released: int, resumed: int) -> None:
        """Ends a run for good, and charges the budget for what it released instead of its plan.

        Nothing more can be released on the reservation once this returns: it cannot be taken up,
        and whoever still holds it is refused. Who calls it must have stopped releasing before.

        Args:
            part: the event of at least all that was released, by everybody who has held the
                reservation.
            released: so many releases, for people to read.
            resumed: as for `begin_releases`.

        Raises LedgerError if nothing can be given back (`why_nothing_is_returned`), the run is
        over, or somebody has taken it up since; nothing has changed then.

        **Guarantee.** "Giving back" in `accounting.budget`: the ledger's guarantee stands, whenever
        runs are ended, and whatever that depends on.
        """
        body = f"{int(released)} {event_text(part)}"

        def decide(runs: Runs) -> Entry:
            found = open_run(runs, reservation_id, resumed, self._where)
            if why := self._why_nothing_is_returned(runs, found):
                raise LedgerError(f"{self._where}: nothing can be given back: {why}")
            return Entry(Kind.ENDED, found.id, utc_now(), body=body)

        self._append(decide)

    def note_checkpoint(
        self, reservation_id: str, released: int, digest: str, *, resumed: int, begun: int | None
    ) -> None:
        """Write down that the run will save a checkpoint: its SHA-256, after so many releases.

        Args:
            resumed: as for `begin_releases`.
            begun: so many releases have been begun along the run, interrupted ones included; None
                where nothing was released since it was taken up: as many as the ledger knows of.
        """

        def decide(runs: Runs) -> Entry:
            found = open_run(runs, reservation_id, resumed, self._where)
            known = found.begun if begun is None else begun
            return Entry(Kind.SAVED, found.id, utc_now(), body=f"{released} {known} {digest}")

        self._append(decide)

    def close(self) -> None:
        """Releases a ledger in memory; a file is open only while an operation lasts."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _append(self, decide: Callable[[Runs], Entry | Sequence[Entry] | None]) -> None:
        """Writes what is decided on the runs as they are; decides again if others were faster."""
        with self._lock:
            while True:
                runs = self._sync()
                decided = decide(runs)
                entries = [decided] if isinstance(decided, Entry) else decided or ()
                if not entries or self._store.append(entries, after=runs.head):
                    self._sync()
                    return

    def _admit(
        self, events: Sequence[dp.DpEvent], neighboring: str | dp.NeighboringRelation, runs: Runs
    ) -> None:
        refuse_other_neighbours(
            runs,
            neighboring_name(neighboring),
            self.unit,
            self.neighboring,
            printable(self.dataset),
            self._where,
        )
        require_accountant(events)
        if self.budget is not None:
            runs.admit(events, self.budget, self.dataset)
