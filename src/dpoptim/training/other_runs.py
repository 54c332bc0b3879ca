"""Runs of this process that released sums of the same records, on ledgers of their own.

A guarantee is of one run, and those of several on the same records add up: a ledger that they share
says to what. A rate test and the training after it, folds, and a loop over settings are several
runs; without a ledger each has one in memory, of its own.
"""

import warnings
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, TensorDataset

from dpoptim.accounting.budget_words import spent
from dpoptim.distributed.agreement import is_arrow_table
from dpoptim.gate import Gate
from dpoptim.plan import Plan
from dpoptim.training.batches.repeated_records import (
    Places,
    arrow_buffers,
    have_places_in_common,
    name_of,
    stores_of,
)

ONE_LEDGER = (
    "Each run's epsilon is of itself alone. Fix: give all runs on these records one ledger, "
    "attach(..., ledger=ledger); or find settings on public records."
)
DO_NOT_ADD_UP = "they protect other units or neighbours, and do not add up"
_runs: list["Run"] = []  # of this process, oldest first


class OtherRunsWarning(UserWarning):
    """Runs on the same records are charged to different ledgers, so that none adds them up."""


@dataclass
class Store:
    """Records in memory, by a name that nothing else has while they are there."""

    holders: list[weakref.ref[Any]]
    parts: list[tuple[Any, Places | None]]

    @property
    def is_there(self) -> bool:
        return all(holder() is not None for holder in self.holders)


@dataclass(eq=False)
class Run:
    """A run, for those after it.

    Attributes:
        ledger: id of where it is charged. unit: whom it protects.
        gate: of the run, while that is there.
        reservation: that it has, or had; None: it has released nothing.
    """

    plan: Plan
    ledger: str
    unit: str
    stores: list[Store]
    gate: weakref.ref[Gate]
    reservation: str | None = None

    def released(self) -> str | None:
        """The reservation, which is made before the first release."""
        if (gate := self.gate()) is not None:
            self.end(gate)
        return self.reservation

    def end(self, gate: Gate) -> None:
        if gate.reservation is not None:
            self.reservation = gate.reservation.id

    def shares_records(self, other: "Run") -> bool:
        mine, its = ([s for s in run.stores if s.is_there] for run in (self, other))
        return any(
            name == its_name and have_places_in_common(places, its_places)
            for store in mine
            for name, places in store.parts
            for again in its
            for its_name, its_places in again.parts
        )


class OtherRuns:
    """Finds earlier runs of this process on the records of a new one.

    Args:
        owner: while it is there, ``gate`` is kept.
        train_set: None where another process tells, or the run can be repeated, which promises
            nothing.
        ledger: id of where the run is charged. unit: whom it protects.
        goes_on: the reservation of the part of the run before, whose place this one takes.

    **Guarantee.** Who warns, and what is said, is read off plans, ledgers, and which objects the
    program handed over as its data: not off records. Known again are records in one object of
    memory (tensors, `Subset`, `ConcatDataset`, `views`, Hugging Face's `datasets`, and any data
    set that is handed over twice); lists, copies and other processes are not.
    """

    def __init__(
        self,
        owner: object,
        plan: Plan,
        train_set: Dataset[Any] | None,
        gate: Gate,
        ledger: str,
        unit: str,
        goes_on: str | None,
    ) -> None:
        stores = [] if train_set is None else stores_that_last(train_set)
        self._run = Run(plan, ledger, unit, stores, weakref.ref(gate))
        weakref.finalize(owner, self._run.end, gate)
        same = [run for run in _runs if goes_on is not None and run.released() == goes_on]
        self._run.reservation = goes_on if same else None
        gone = [run for run in _runs if not any(store.is_there for store in run.stores)]
        _runs[:] = [*(run for run in _runs if run not in same + gone), self._run]

    def found(self) -> list[Run]:
        """Other runs on other ledgers that have released sums of these records."""
        return [
            run
            for run in _runs
            if run.ledger != self._run.ledger and run.released() and run.shares_records(self._run)
        ]

    def words(self) -> str:
        """The cost of all of them together, for a person; "" if there are no others."""
        others, mine, plan = self.found(), self._run, self._run.plan
        if not others or plan.noise_multiplier == 0:
            return ""
        count = "one more run" if len(others) == 1 else f"{len(others)} more runs"
        what = f"{count} of this process released sums of the same records, on another ledger"
        kinds = {(run.plan.neighboring, run.unit) for run in (mine, *others)}
        if len(kinds) > 1:
            return f"{what}; {DO_NOT_ADD_UP}"
        events = [run.plan.event for run in (*others, mine)]
        whole = spent(None, events, plan.delta, plan.neighboring)
        return f"{what}; all together: {whole}"

    def warn(self) -> None:
        """Warn whoever calls `attach`, if there are others."""
        if words := self.words():
            warnings.warn(f"{words}. {ONE_LEDGER}", OtherRunsWarning, stacklevel=5)


def stores_that_last(train_set: Dataset[Any]) -> list[Store]:
    """Stores of a data set that can be known again; lists cannot."""
    found = []
    for store, places in stores_of(train_set):
        holders: tuple[Any, ...] = (store,)
        parts: list[tuple[Any, Places | None]] = [(name_of(store), places)]
        if type(store) is TensorDataset:
            holders = store.tensors
        elif is_arrow_table(store):
            holders, parts = (store.data,), [*arrow_buffers(store, places)]
        with suppress(TypeError):  # nobody is told when a list goes
            found.append(Store([weakref.ref(each) for each in holders], parts))
    return found
