"""A fit's guarantee in words: which fits it counts, and what only the user can know."""

from dataclasses import replace

from dpoptim.accounting.guarantee import Guarantee
from dpoptim.accounting.ledger import Ledger
from dpoptim.arguments import whole_number

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


def public_number_of_records(n: object, records: int, neighboring: str) -> int:
    """The number of records that batches, steps and noise are computed from.

    Args:
        n: as given to the estimator; None where it may be read off the table.
        records: in the table.

    Raises:
        ValueError: the relation hides the number of records, and none was given; or it is public
            and the given one is wrong.
    """
    if neighboring == "add-or-remove-one":
        if n is None:
            raise ValueError(
                "n is missing: neighboring='add-or-remove-one' hides how many records there are, "
                "so batches and noise may not be computed from it. Fix: n=, a public estimate; or "
                "neighboring='zero-out'."
            )
        return whole_number("n", n, least=1)
    if n is not None and whole_number("n", n, least=1) != records:
        raise ValueError(
            f"n={n} is not the number of records (of persons, where they are protected), which "
            f"neighboring={neighboring!r} takes as public. Fix: leave n out."
        )
    return records
