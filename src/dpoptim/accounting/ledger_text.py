"""A ledger for people: its runs one a line, each with its epsilon, and their sum."""

import math
from collections.abc import Sequence

from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.accounting.budget import Budget
from dpoptim.accounting.budget_words import spent
from dpoptim.accounting.event_json import event_text
from dpoptim.accounting.guarantee import Guarantee, rounded_up
from dpoptim.accounting.ledger_runs import Reservation
from dpoptim.printable import printable

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
        part = "" if math.isnan(share) else f"{share:.1%} of the filter's bound, "
        lines.append(
            f"  {entry.time}  {printable(entry.label)}: {part}"
            f"epsilon={rounded_up(known[text].epsilon)} at delta={delta:g} "
            f"[{state_of(entry)}] {entry.id}"
        )
        if events:
            lines.append(f"      {entry.event}")
    return lines


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
    delta = delta_of(budget)
    epsilon = composed_epsilon(entries, delta, neighboring)
    composed = f"epsilon={rounded_up(epsilon)} at delta={delta:g}"
    if len(entries) < 2:
        return f"  together  {composed}"
    composed += ", if no run's settings depended on what an earlier one released"
    if budget is None:
        return f"  together  {composed}; without a budget nothing else is known"
    kept = f"at most epsilon={budget.epsilon:g} at delta={delta:g}, the budget"
    if epsilon >= budget.epsilon:  # of runs that were ended early it counts a part
        return f"  together  {kept}"
    return f"  together  {composed}; if they did, {kept}"
