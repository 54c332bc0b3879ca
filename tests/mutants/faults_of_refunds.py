"""Privacy bugs of ledgers, and of giving back what a run has not released, put into this library
for as long as a ``with`` lasts. For testing detectors only.
"""

from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

from dpoptim.accounting import ledger, ledger_refusals
from dpoptim.accounting.filters import GaussianFilter
from dpoptim.accounting.ledger_charge import Charge, PartOf
from dpoptim.accounting.ledger_store import LedgerStore
from dpoptim.gate import FilteredGate, Gate


def released_steps_returned() -> AbstractContextManager[Any]:
    """Every other step that was released is given back."""
    honest = Charge.end

    def end(charge: Charge, part_of: PartOf, begun: int) -> None:
        honest(charge, part_of, begun // 2)

    return patch.object(Charge, "end", end)


def killed_part_returned() -> AbstractContextManager[Any]:
    """What a killed process released after its last checkpoint is given back."""
    honest = Charge.end

    def end(charge: Charge, part_of: PartOf, begun: int) -> None:
        honest(charge, lambda released, repeated: part_of(released, 0), begun)

    return patch.object(Charge, "end", end)


def ended_runs_go_on() -> AbstractContextManager[Any]:
    """A run is ended in the ledger, and its gate stays open for what was announced."""
    return patch.object(Gate, "close", lambda gate: None)


def half_of_adaptive_releases_returned() -> AbstractContextManager[Any]:
    """A run whose prices are chosen on the way gives back half of what it has released."""
    honest = GaussianFilter.spent.fget
    assert honest is not None
    half = property(lambda spent: honest(spent) / 2**0.5)
    return patch.object(GaussianFilter, "spent", half)


def ended_adaptive_runs_go_on() -> AbstractContextManager[Any]:
    """Such a run is ended in the ledger, and its gate stays open for the rest of its budget."""
    honest = FilteredGate.finish

    def finish(gate: FilteredGate) -> None:
        honest(gate)
        gate._ended = False

    return patch.object(FilteredGate, "finish", finish)


def two_processes_on_one_run() -> AbstractContextManager[Any]:
    """Whoever held a run before it was taken up from a checkpoint goes on as well."""
    stack = ExitStack()
    for module in (ledger, ledger_refusals):
        stack.enter_context(patch.object(module, "refuse_former_holder", lambda *about: None))
    return stack


def forks_unseen() -> AbstractContextManager[Any]:
    """A forked process goes on with its copy of a ledger in memory."""
    return patch.object(LedgerStore, "_forked", lambda store: False)
