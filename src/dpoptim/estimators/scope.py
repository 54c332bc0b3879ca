"""A fit's guarantee in words: which fits it counts, and what only the user can know."""

from dataclasses import replace

from dpoptim.accounting.guarantee import Guarantee
from dpoptim.accounting.ledger import Ledger

ON_TRUST = "on trust: preprocessing and settings were not read off these records"
ALONE = "this fit alone: others on the same records add to it, and no ledger counts them"
ON_LEDGER = "runs on its ledger together"


def scope_on_ledger(ledger: Ledger, delta: float) -> tuple[str, ...]:
    """Notes on the cost of all runs on a ledger together, if there are several."""
    runs = len(ledger.entries())
    return (f"all {runs} {ON_LEDGER}: {ledger.spent(delta)}",) if runs > 1 else ()


def with_scope(guarantee: Guarantee, scope: tuple[str, ...]) -> Guarantee:
    """The guarantee of one fit with further notes: of which fits it speaks, and what is trusted."""
    notes = dict.fromkeys((*guarantee.notes, *scope, ON_TRUST))
    return replace(guarantee, notes=tuple(notes))
