"""Refusals of a ledger: which run may write what, as its entries are now.

``where`` names the ledger in messages.
"""

from collections.abc import Sequence

import dp_accounting as dp

from dpoptim.accounting.canonical import canonical
from dpoptim.accounting.event_json import event_text
from dpoptim.accounting.ledger_runs import DONE, Reservation, Runs
from dpoptim.errors import LedgerError, TakenUpElsewhereError
from dpoptim.printable import printable
from dpoptim.privacy_unit import RECORD


def known_run(runs: Runs, reservation_id: str, where: str, fix: str) -> Reservation:
    """The run of this reservation. LedgerError if there is none here."""
    found = runs.by_id.get(reservation_id)
    if found is None:
        raise LedgerError(f"{where}: no reservation {reservation_id!r} here; {fix}")
    return found


def open_run(runs: Runs, reservation_id: str, resumed: int, where: str) -> Reservation:
    """The run, if it is open and its caller holds it: has been taken up ``resumed`` times."""
    fix = "continue the run on the ledger that it was charged to"
    found = known_run(runs, reservation_id, where, fix)
    if found.state != "open":
        raise LedgerError(
            f"{where}: the run {printable(found.label)!r} was {DONE[found.state]}; make a new plan"
        )
    refuse_former_holder(found, resumed, where)
    return found


def refuse_former_holder(found: Reservation, resumed: int, where: str) -> None:
    """Refuse whoever held the run before it was taken up from a checkpoint."""
    if found.resumed != resumed:
        raise TakenUpElsewhereError(
            f"{where}: the run {printable(found.label)!r} was taken up from a checkpoint "
            "meanwhile, and goes on there; only one process may go on with it"
        )


def refuse_other_neighbours(
    runs: Runs, relation: str, unit: str, ours: str, dataset: str, where: str
) -> None:
    """Refuse a run whose guarantee compares other data sets than those of the ledger.

    Args:
        relation, unit: the run's. ours: the ledger's relation.
    """
    if relation != ours:
        raise LedgerError(
            f"{where}: this ledger counts under {ours}, the run under {relation}; all runs on a "
            f"data set keep one. Fix: dpoptim.Ledger(..., neighboring={relation!r}), in a file of "
            f"its own; or neighboring={ours!r} for the run, where it has that."
        )
    named = {runs.unit} - {RECORD.name}
    if others := (named | {run.unit for run in runs.by_id.values()}) - {unit}:
        raise LedgerError(
            f"{where}: runs on this ledger protect each {others.pop()}, this one each {unit}; "
            "guarantees of records and of persons do not add up. Fix: persons=, the owner of each "
            f"record, in all runs or in none; or a ledger of {dataset!r} for each."
        )


def require_accountant(events: Sequence[dp.DpEvent]) -> None:
    """TypeError or ValueError for an event without a stored form, or that no accountant reads.

    Without a budget, too.
    """
    for event in events:
        event_text(event)
        canonical(event)


def refuse_to_resume(
    runs: Runs,
    found: Reservation,
    event: dp.DpEvent,
    released: int,
    checkpoint: str | None,
    where: str,
) -> None:
    """Refuse to take a run up where `Ledger.resume` says so."""
    if event_text(found.event) != event_text(event):
        raise LedgerError(
            f"{where}: reservation {found.id!r} ({printable(found.label)}) was made for "
            f"{found.event}, not for {event}; continue with the plan it was made for, or reserve "
            "the new one"
        )
    if found.state != "open":
        raise LedgerError(
            f"{where}: the run {printable(found.label)!r} was {DONE[found.state]}, its "
            "reservation is used up; reserve the further steps anew"
        )
    if not 0 <= released <= found.begun:
        raise LedgerError(
            f"{where}: the run {printable(found.label)!r} has begun at most {found.begun} "
            f"releases, its checkpoint says {released}; the checkpoint was changed, or the ledger "
            "is an older copy"
        )
    if checkpoint is not None and runs.saved.get(checkpoint) != (found.id, released):
        raise LedgerError(
            f"{where}: the run {printable(found.label)!r} was completed and entered again "
            "meanwhile, so its earlier checkpoints cannot go on; make a new plan"
        )
