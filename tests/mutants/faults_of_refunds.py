"""Privacy bugs of ledgers and checkpoints, and of giving back what a run has not released, put into
this library for as long as a ``with`` lasts. For testing detectors only.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from hashlib import sha256
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dpoptim.accounting import ledger, ledger_refusals
from dpoptim.accounting.filters import GaussianFilter
from dpoptim.accounting.ledger import Ledger, Reservation
from dpoptim.accounting.ledger_charge import Charge, PartOf
from dpoptim.accounting.ledger_store import LedgerStore
from dpoptim.gate import FilteredGate, Gate, planned
from dpoptim.training import hold_out_scores
from dpoptim.training.batches import privacy_units
from dpoptim.training.batches.privacy_units import Units
from dpoptim.training.checkpoints.rank_files import Place, RankFile


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


def charged_once_for_two() -> AbstractContextManager[Any]:
    """Whoever takes up a checkpoint that was saved before its run was charged shares one charge."""
    honest = Ledger.reserve

    def reserve(self: Ledger, *args: Any, run: str | None = None, **options: Any) -> Reservation:
        if run in self._runs.by_id:
            return self._runs.by_id[run]
        return honest(self, *args, run=run, **options)

    return patch.object(Ledger, "reserve", reserve)


def forks_unseen() -> AbstractContextManager[Any]:
    """A forked process goes on with its copy of a ledger in memory."""
    return patch.object(LedgerStore, "_forked", lambda store: False)


# ---- checkpoints --------------------------------------------------------------------------------


def digests_asked(ask: Callable[[RankFile], bool]) -> AbstractContextManager[Any]:
    """Parts of a checkpoint are compared with their digests where ``ask`` says so."""
    honest = RankFile.box

    def box(self: RankFile, place: Place, dtype: torch.dtype, sizes: Sequence[int]) -> Tensor:
        start, length, digest = place
        if not ask(self):
            digest = sha256(self._bytes[start : start + length]).hexdigest()
        return honest(self, (start, length, digest), dtype, sizes)

    return patch.object(RankFile, "box", box)


def changed_parts_taken_up() -> AbstractContextManager[Any]:
    return digests_asked(lambda file: file._key is not None)


def parts_of_other_saves_taken_up() -> AbstractContextManager[Any]:
    """The seal is thought to be enough, which every save of a run has alike."""
    return digests_asked(lambda file: file._key is None)


def other_noise_taken_up() -> AbstractContextManager[Any]:
    """Whatever a strategy is fitted to, it goes on with what another one remembers."""
    return patch.object(planned, "refuse_other_noise", lambda query, earlier: None)


def records_elsewhere_taken_up() -> AbstractContextManager[Any]:
    """Nobody looks where records lie when a run goes on."""
    return patch.object(Units, "places_in", lambda units, train_set, plan: "")


def repeated_records_served() -> AbstractContextManager[Any]:
    """Every place of a data set is thought to be a record of its own."""
    return patch.object(privacy_units, "refuse_repeated_records", lambda train_set: None)


def repeated_records_scored() -> AbstractContextManager[Any]:
    """Nobody looks whether a hold-out has a record at several places."""
    return patch.object(hold_out_scores, "refuse_repeated_records", lambda data, name: None)
