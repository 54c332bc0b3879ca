"""The runs of a ledger, read entry by entry: what each was promised, and their sum."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import dp_accounting as dp

from dpoptim.accounting.budget import Budget
from dpoptim.accounting.budget_words import over_budget_error
from dpoptim.accounting.event_json import event_from_json
from dpoptim.accounting.ledger_schema import Entry, Head, Kind
from dpoptim.accounting.ledger_store import LedgerStore
from dpoptim.errors import LedgerError
from dpoptim.privacy_unit import RECORD, Unit

DONE = {"committed": "completed", "ended": "ended for good"}  # of runs that are over


@dataclass(frozen=True)
class Reservation:
    """One run's charge. `state` is "open" or "committed", which both count in full, or "ended".

    Attributes:
        begun: at most so many releases have been begun, counted along the run: a part that is done
            again counts from where it went on.
        repeated: at most so many were begun more than once, by parts that went on from a
            checkpoint.
        unit: whom its guarantee protects: a "record", or a "person" who has several.
        part: what an ended run has released, which is what a budget counts of it; `event` stays
            what is claimed for the run itself.
    """

    id: str
    time: str  # UTC, ISO 8601
    label: str
    event: dp.DpEvent
    neighboring: str
    state: str = "open"
    resumed: int = 0  # how often the run was taken up again
    begun: int = 0
    repeated: int = 0
    part: dp.DpEvent | None = None
    unit: str = RECORD.name


@dataclass
class Runs:
    """Grows by `add`; nothing is ever taken out.

    Attributes:
        head: the last entry that was added.
        unit: of runs that do not say.
        by_id: the reservations, oldest first.
        saved: the checkpoints that runs have written: SHA-256 -> (reservation, releases so far).
    """

    head: Head
    neighboring: str
    unit: str = RECORD.name
    by_id: dict[str, Reservation] = field(default_factory=dict)
    saved: dict[str, tuple[str, int]] = field(default_factory=dict)
    _whole: list[float] = field(default_factory=list)  # charges of the runs as planned

    def add(self, entries: Sequence[Entry], head: Head) -> None:
        """Take in the entries that lead to `head`. LedgerError for one that cannot be read."""
        for number, entry in enumerate(entries, self.head.count + 1):
            try:
                self._add(entry)
            except (TypeError, ValueError, KeyError, OverflowError, RecursionError) as error:
                raise LedgerError(
                    f"entry {number} of the ledger cannot be read ({type(error).__name__}); "
                    "upgrade dpoptim, or restore the file from a backup"
                ) from error
        self.head = head

    def _add(self, entry: Entry) -> None:
        if entry.kind == Kind.RESERVED:
            if entry.run in self.by_id:
                raise ValueError("a reservation was made twice")
            event = event_from_json(json.loads(entry.body))
            made = Reservation(entry.run, entry.time, entry.label, event, self.neighboring)
            self.by_id[entry.run] = replace(made, unit=self.unit)
            return
        run = self.by_id[entry.run]
        again = entry.kind == Kind.REENTERED
        before = "committed" if again else "open"
        if run.state != before or entry.kind not in _CHANGES:
            raise ValueError(f"an entry {entry.kind!r} cannot follow")
        if again:  # what it released since they were saved was looked at
            self.saved = {key: of for key, of in self.saved.items() if of[0] != run.id}
        if entry.kind == Kind.SAVED:
            released, _, digest = entry.body.split(" ")
            self.saved[digest] = (run.id, _count(released))
        self.by_id[run.id] = _CHANGES[entry.kind](run, entry.body)

    def charges(self, budget: Budget) -> list[float]:
        """Each run's share of the budget, in its filter's currency."""
        runs = list(self.by_id.values())
        for run in runs[len(self._whole) :]:
            self._whole.append(budget.charge(run.event, len(self._whole) + 1)[0])
        return [
            whole if run.part is None else budget.charge_of_part(whole, run.part)
            for run, whole in zip(runs, self._whole, strict=True)
        ]

    def why_nothing_is_returned(self, run: Reservation, budget: Budget) -> str:
        """See `Budget.why_nothing_is_returned`."""
        self.charges(budget)
        return budget.why_nothing_is_returned(self._whole[list(self.by_id).index(run.id)])

    def admit(self, events: Sequence[dp.DpEvent], budget: Budget, dataset: str) -> None:
        """BudgetExceeded if the budget does not admit runs of these events, one after the other."""
        charges = self.charges(budget)
        for place, event in enumerate(events):
            if place:  # the one before it is there then
                charges = [*charges, budget.charge(events[place - 1], len(charges) + 1)[0]]
            short = budget.shortfall(charges, event)
            if short is not None:
                raise over_budget_error(budget, short, runs=len(charges), dataset=dataset)


def _begun(run: Reservation, body: str) -> Reservation:
    return replace(run, begun=max(run.begun, _count(body)))


def _saved(run: Reservation, body: str) -> Reservation:
    return replace(run, begun=_count(body.split(" ")[1]))  # now it is known exactly


def _resumed(run: Reservation, body: str) -> Reservation:
    again = max(0, run.begun - _count(body))
    return replace(run, begun=_count(body), resumed=run.resumed + 1, repeated=run.repeated + again)


def _committed(run: Reservation, body: str) -> Reservation:
    return replace(run, state="committed")


def _ended(run: Reservation, body: str) -> Reservation:
    released, _, event = body.partition(" ")
    part = event_from_json(json.loads(event))
    return replace(run, state="ended", begun=_count(released), part=part)


def _of_unit(run: Reservation, body: str) -> Reservation:
    return replace(run, unit=Unit(body).name)


def _reentered(run: Reservation, body: str) -> Reservation:
    return replace(run, state="open")


_CHANGES = {
    Kind.UNIT: _of_unit,
    Kind.BEGUN: _begun,
    Kind.SAVED: _saved,
    Kind.RESUMED: _resumed,
    Kind.COMMITTED: _committed,
    Kind.ENDED: _ended,
    Kind.REENTERED: _reentered,
}


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("expected a count")
    return int(text)


def verify_entries(
    store: LedgerStore, budget: Budget | None, neighboring: str, digest: str | None
) -> int:
    """The number of entries; see `Ledger.verify`.

    Raises LedgerError for anything that is not as it should be.
    """
    store.identify()
    at, runs = store.start(), Runs(store.start(), neighboring, store.settings.unit)
    entries, head = store.read(at)
    seen = {at.digest}
    for entry in entries:
        if entry.kind == Kind.RESERVED and budget is not None:
            runs.admit([event_from_json(json.loads(entry.body))], budget, store.settings.dataset)
        at = entry.after(at)
        seen.add(at.digest)
        runs.add([entry], at)
    if digest is not None and digest not in seen:
        raise LedgerError(
            f"no state of this ledger has the digest {digest}: it was written anew, or replaced by "
            "an older copy"
        )
    return head.count
