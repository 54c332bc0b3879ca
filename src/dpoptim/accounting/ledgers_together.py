"""Several ledgers' runs as one person's who is in all of their data sets."""

from collections.abc import Sequence

from dpoptim.accounting.guarantee import rounded_up
from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.ledger_records import composed_epsilon, delta_of
from dpoptim.accounting.ledger_runs import Reservation
from dpoptim.privacy_unit import RECORD


def ledgers_together(ledgers: Sequence[Ledger]) -> str:
    """Say what all runs of several ledgers cost somebody whose records are in each.

    **Guarantee.** Of a person (or record) in all data sets. Runs whose settings depended on no
    release compose as on one ledger. In any case each ledger's filter keeps its budget, and
    guarantees of interactive mechanisms add up, epsilons and deltas alike, however the runs took
    turns (Vadhan and Zhang 2023).
    """
    relations = sorted({ledger.neighboring for ledger in ledgers})
    runs = [entry for ledger in ledgers for entry in ledger.entries()]
    units = sorted({entry.unit for entry in runs})
    if len(relations) > 1 or len(units) > 1:
        differ = ", ".join([*relations, *(f"per {unit}" for unit in units)])
        return (
            f"together  no sum: guarantees under different relations, or of records and persons, "
            f"do not add up ({differ})"
        )
    unit = units[0] if units else RECORD.name
    return f"together  for one {unit} who is in all of them: {sum_of(ledgers, runs, relations[0])}"


def sum_of(ledgers: Sequence[Ledger], runs: Sequence[Reservation], relation: str) -> str:
    """The sum of runs of one relation and unit, in words."""
    budgets = [ledger.budget for ledger in ledgers]
    delta = max(delta_of(budget) for budget in budgets)
    epsilon = composed_epsilon(runs, delta, relation)
    composed = (
        f"epsilon={rounded_up(epsilon)} at delta={delta:g}, if no run's settings depended on what "
        "an earlier one released"
    )
    kept = [budget for budget in budgets if budget is not None]
    if len(kept) < len(budgets):
        return f"{composed}; not every ledger has a budget, so nothing else is known"
    most, loss = sum(each.epsilon for each in kept), sum(each.delta for each in kept)
    at_most = f"at most epsilon={most:g} at delta={loss:g}, the sum of the budgets"
    return at_most if epsilon >= most else f"{composed}; if they did, {at_most}"
