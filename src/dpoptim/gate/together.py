"""Several releases that are charged as one run, before the first of them.

What was fixed beforehand composes by its own accounting, as a run's steps do. Charged one after
the other to a budget, each would count as if planned after the one before, which costs more.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import dp_accounting

from dpoptim.accounting.ledger import Ledger, Reservation
from dpoptim.accounting.ledger_charge import Charge
from dpoptim.errors import LedgerError


class PartsOfOneRun(Ledger):
    """A ledger in memory, for releases that another ledger is charged for as one run.

    Args:
        charge: of all of them; opened before the first.
        parts: their events, fixed by public numbers.
    """

    def __init__(self, charge: Charge, parts: Sequence[dp_accounting.DpEvent]) -> None:
        super().__init__(neighboring=charge.neighboring)
        self._charge_of_all, self._parts = charge, [*parts]

    def reserve(self, event: dp_accounting.DpEvent, **more: Any) -> Reservation:
        """Reserve one of the parts, each once, once all of them are charged.

        Raises:
            LedgerError: it is none of those left, or the other ledger refuses the whole run.
        """
        if event not in self._parts:
            raise LedgerError(
                "a part of this fit would release something else than what was charged for it "
                "beforehand. Fix: leave its settings alone while it is fitted."
            )
        self._charge_of_all.open()
        reserved = super().reserve(event, **more)
        self._parts.remove(event)
        return reserved


@contextmanager
def charged_together(
    ledger: Ledger | None,
    parts: Sequence[dp_accounting.DpEvent],
    *,
    neighboring: str,
    label: str,
    unit: str = "record",
) -> Iterator[Ledger]:
    """Charge several releases as one run, and hand out the ledger on which they are made.

    Args:
        ledger: charged before the first of them; None: one in memory.
        parts: the events of all releases, fixed by public numbers before any of them.
        label: public text for the ledger's entry.
        unit: whom it protects, each ``"record"`` or each ``"person"``.

    Raises:
        LedgerError: the ledger does not admit the run; nothing is released.

    **Guarantee.** Nothing is released on the ledger handed out but these parts, each once, and
    none before the whole, their composition, is charged. Who leaves early has paid for all.
    """
    paying = (Ledger(neighboring=neighboring) if ledger is None else ledger).of_units(unit)
    charge = Charge(paying, dp_accounting.ComposedDpEvent([*parts]), neighboring, label)
    charge.check()
    with PartsOfOneRun(charge, parts) as inner:
        yield inner.of_units(unit)
    charge.finish()
