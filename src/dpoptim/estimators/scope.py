"""A fit's guarantee in words: which fits it counts, and what only the user can know."""

from dataclasses import replace

from dpoptim.accounting.guarantee import Guarantee
from dpoptim.estimators.table import READ_OFF

ON_TRUST = "on trust: preprocessing and settings were not read off these records"
ALONE = "this fit alone: others on the same records add to it, and no ledger counts them"
RESTATED = "the same fit as its ledger states it"
FROM_EARLIER = "started from an earlier fit: the guarantee of that fit adds to this one's"


def label_of(name: str, epsilon: float, delta: float) -> str:
    """A ledger's label for a fit: the ledger states all runs at one delta, this at its own."""
    return f"{name} (epsilon={epsilon:g} at delta={delta:g})"


def with_scope(guarantee: Guarantee, scope: tuple[str, ...]) -> Guarantee:
    """The guarantee of one fit with further notes: of which fits it speaks, and what is trusted."""
    notes = dict.fromkeys((*guarantee.notes, *scope, ON_TRUST))
    # first what nothing can be protected by: a rare label names a record
    return replace(guarantee, notes=tuple(sorted(notes, key=lambda note: note != READ_OFF)))
