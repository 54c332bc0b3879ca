"""A run directory whose run has not ended: its plan, written before its charge, and no certificate.

Killed at any moment, a run so leaves what tells an officer which charge is whose.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dpoptim.accounting.event_json import event_text
from dpoptim.accounting.ledger import Ledger
from dpoptim.files import write_atomically
from dpoptim.plan import Plan
from dpoptim.printable import printable
from dpoptim.runs.interrupted import SECRET
from dpoptim.runs.signature import CERTIFICATE

PLAN = "plan.json"


@contextmanager
def plan_on_disk(folder: Path, plan: Plan, ledger: Ledger) -> Iterator[None]:
    """Write the plan before its run is charged; what fails before that leaves none behind.

    Results of an earlier run, which this one is about to replace, stay with their own plan.
    """
    path = folder / PLAN
    if (folder / CERTIFICATE).exists():
        yield
        return
    write_atomically(path, plan.to_json() + "\n")
    try:
        yield
    except BaseException:
        if not ledger.made and not (folder / SECRET).exists():
            path.unlink(missing_ok=True)
        raise


def is_unfinished(folder: Path) -> bool:
    """Whether this is the directory of a run that has not ended."""
    begun = (folder / PLAN).is_file() or (folder / SECRET).is_file()
    return begun and not (folder / CERTIFICATE).exists()


def state_of_unfinished(folder: Path, plan: Plan | None, ledgers: Sequence[Ledger]) -> str:
    """State of an unfinished run for an officer, with the fix; public.

    Args:
        plan: None: of an earlier version, which wrote it last.
        ledgers: those that were named, verified.
    """
    promised = "" if plan is None else f" Its plan promises {plan.guarantee}."
    charges = [line for ledger in ledgers for line in charges_in(ledger, plan)]
    if not ledgers:
        charges = ["Whether it was charged: --ledger FILE."]
    on = (
        "the same dpoptim train with --resume goes on, on its charge"
        if (folder / SECRET).is_file()
        else "it cannot be taken up, so start anew"
    )
    return (
        f"{printable(str(folder))}: interrupted, or still running: there is no certificate yet, so "
        f"nothing here may be released.{promised} {' '.join(charges)} Fix: {on}; a charge that "
        "nobody takes up stays, as what was drawn may have been seen."
    )


def charges_in(ledger: Ledger, plan: Plan | None) -> list[str]:
    """The charges that may be its own: of the plan's event, and open; else that there is none."""
    name = printable(ledger.dataset)
    found = [
        entry
        for entry in ledger.entries()
        if entry.state == "open"
        and (plan is None or event_text(entry.event) == event_text(plan.event))
    ]
    if not found:
        return [f"The ledger of {name!r} holds no open charge of it."]
    return [
        f"The ledger of {name!r} holds an open charge of it: {each.id}, {printable(each.label)}."
        for each in found
    ]
