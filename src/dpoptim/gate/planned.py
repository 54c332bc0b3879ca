"""Noisy sums of a run whose steps, noise and price were fixed by a plan."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import dp_accounting
import numpy as np
import torch
from torch import Tensor

from dpoptim.accounting.ledger import Ledger, Reservation
from dpoptim.accounting.ledger_charge import Charge, PartOf
from dpoptim.errors import PrivacyError
from dpoptim.gate.one_process import refuse_fork
from dpoptim.gate.queries import CorrelatedSum, Query, SelectedRows
from dpoptim.gate.row_selection import select_rows
from dpoptim.noise.correlated.strategy import SAME, NoiseState
from dpoptim.noise.correlated.workload import Floats
from dpoptim.noise.few_rows import Vector, memory_of, write_out
from dpoptim.noise.gaussian import add_normal, draw_normal_ahead
from dpoptim.noise.stream import KeyStream


class Gate:
    """Releases the planned queries of one run, and no others.

    Args:
        event: the whole run's event: what is reserved.
        neighboring: the relation of the guarantee, by name.
        query: the kind of sum that each step releases.
        releases: how many of them the event pays for.
        ledger: where the run is charged; None only for a run without noise, which promises nothing.
        noise: the stream that the noise comes from.
        label: public text for the ledger's entry.
        resume: what `secret_state` returned for the part of the run that is over; independent
            noise comes from ``noise``.
        checkpoint: SHA-256 of the checkpoint that held it; the ledger must have been told of it.
        part_of: what the first releases of the run cost, and those that were made twice; see
            `Plan.event_of_part`. None: only the whole run has a price.
        joined: whether what is released lies in several tensors that are one vector on each device,
            and get the noise that it would get in one.

    Raises:
        LedgerError: the budget does not cover the run; or the run to go on was completed, or did
            not save this checkpoint.
        ValueError: ``resume`` counts releases that the run does not have, or its correlated noise
            is of other numbers.

    **Guarantee** (with ``resume``). The releases before and from now on are together one run of
    the event, on the reservation that it has; in another ledger it is reserved anew. What was
    released in between, and is now done again, must not have been looked at; the ledger shows how
    many releases that may be. With its last planned release a run is completed: no checkpoint of
    it goes on.
    """

    def __init__(
        self,
        *,
        event: dp_accounting.DpEvent,
        neighboring: str,
        query: Query,
        releases: int,
        ledger: Ledger | None,
        noise: KeyStream,
        label: str,
        resume: dict[str, Any] | None = None,
        checkpoint: str = "",
        part_of: PartOf | None = None,
        joined: bool = False,
    ) -> None:
        if ledger is None and query.noise_multiplier > 0:
            raise ValueError(
                "ledger is missing; only a run without noise, which promises nothing, has none."
            )
        if isinstance(query, CorrelatedSum) and releases > query.steps:
            raise ValueError(
                f"releases={releases} is more than the {query.steps} steps that the "
                "query's noise is made for."
            )
        self.event, self.neighboring, self.query = event, neighboring, query
        self.releases, self.label, self.joined = releases, label, joined
        self.released = 0
        self.ended = False
        self._begun = 0  # draws of noise along the run, interrupted ones included
        self._returning = False  # closed, and the ledger does not know it yet
        self._part_of = part_of or (lambda released, repeated: event)
        self._process = os.getpid()
        self._charge = Charge(ledger, event, neighboring, label)
        self._noise = noise
        self._correlated: NoiseState | None = None
        if resume is not None:
            self._restore(resume, checkpoint)
        if self.released < releases:
            self._charge.check()

    @property
    def reservation(self) -> Reservation | None:
        """The run's entry in the ledger; None before the first release, or without noise."""
        return self._charge.reservation

    @property
    def nothing_released(self) -> bool:
        """Whether nobody has begun a release of this run, processes that were killed included."""
        return self.released == 0 and self._charge.nothing_begun

    def open(self) -> None:
        """Reserve the run, or take its reservation up again; a refusal releases nothing."""
        refuse_fork(self._process)
        self._charge.open()

    def release_sum(self, sums: Sequence[Vector]) -> list[Tensor]:
        """Add fresh Gaussian noise to all entries of ``sums`` (any shapes), in place.

        Of tables, the rows that a query of `SelectedRows` selects (`gate.row_selection`) are
        returned alone.

        The tensors together are one query: their joint Euclidean norm must be bounded record by
        record. They are float64; or float32 if the noise is independent, which is then added in
        float64 and the result rounded. `FewRows` get noise on every entry in that way, too.

        Raises:
            PrivacyError: every planned release has been made.
            LedgerError: the budget does not cover the run, or the ledger cannot be written.

        **Guarantee.** If two neighbouring data sets give sums at most ``norm_bound`` apart (twice
        that under replace-one), what is returned is that step of the reserved event. The
        reservation was on disk before.
        """
        if self.released >= self.releases:
            raise PrivacyError(
                f"all {self.releases} planned noisy sums have been released. Fix: make a plan "
                "with more steps."
            )
        self.open()
        self._charge.announce(self._begun, self.releases)
        self._begun += 1  # first: what was drawn can never be given back
        if isinstance(self.query, SelectedRows):
            sums = select_rows(self.query, self.released, self._noise.branch(), sums)
        if self.query.noise_multiplier > 0:
            self._add_noise(
                [
                    each.values() if isinstance(each, Tensor) and each.is_sparse else each
                    for each in sums
                ]
            )
        else:
            write_out(sums)
        self.released += 1  # a draw that is interrupted has released nothing
        if self.released == self.releases:
            # before anybody sees the last one: no checkpoint may be taken up after it
            self.finish()
        return memory_of(sums)

    def _add_noise(self, sums: Sequence[Vector]) -> None:
        query = self.query
        if isinstance(query, CorrelatedSum):
            if self._correlated is None:
                self._correlated = query.strategy.start(
                    query.steps, [total.numel() for total in sums], self._noise
                )
            dense = [each for each in sums if isinstance(each, Tensor)]
            if len(dense) < len(sums):
                raise TypeError("tables in memory for few rows get independent noise only.")
            self._correlated.add(dense, query.standard_deviation)
            return
        vectors = by_device(sums) if self.joined else [[each] for each in sums]
        for vector in vectors:
            add_normal(self._noise, vector, query.deviation(self.released))
        ahead = not isinstance(query, SelectedRows)  # which need another number in each step
        if ahead and self.released + 1 < self.releases:
            draw_normal_ahead(self._noise, vectors)

    def secret_state(self) -> dict[str, Any]:
        """For a checkpoint: releases so far, their reservation, correlated noise. Secret."""
        noise = None if self._correlated is None else self._correlated.secret_state()
        if isinstance(self.query, CorrelatedSum) and noise is not None:
            noise["numbers"] = torch.from_numpy(self.query.numbers)
        return {
            "released": self.released,
            "reservation": self._charge.id_to_save(),
            "correlated": noise,
        }

    def note_checkpoint(self, digest: str) -> None:
        """Tell the ledger of a checkpoint with this SHA-256, before it is written.

        LedgerError if that fails; PrivacyError in a forked process, which does not know how far the
        run has come.
        """
        refuse_fork(self._process)
        if self.released < self.releases:
            self._charge.note_checkpoint(self.released, self._begun, digest)

    def _restore(self, secret: dict[str, Any], checkpoint: str) -> None:
        released, correlated = secret["released"], secret["correlated"]
        if type(released) is not int or not 0 <= released <= self.releases:
            raise ValueError(
                f"resume: the checkpoint counts {released!r} releases of {self.releases} planned "
                "ones; it was changed. "
                "Fix: give it as private.save(path) wrote it."
            )
        if isinstance(self.query, CorrelatedSum) and correlated is not None:
            refuse_other_noise(self.query, correlated["numbers"].numpy())
            self._correlated = self.query.strategy.start(
                self.query.steps, correlated["sizes"], self._noise
            )
            self._correlated.restore(correlated)
        self.released = self._begun = released
        if released < self.releases:
            self._charge.take_up(secret["reservation"], released, checkpoint)
        else:
            self._charge.recall(secret["reservation"])

    def reenter(self) -> None:
        """Go on after `finish` with the event's remaining releases; the caller has kept the rest.

        Raises:
            PrivacyError: none remains, or this is a forked process.
            LedgerError: the ledger cannot be written.
        """
        refuse_fork(self._process)
        if self.released >= self.releases:
            raise PrivacyError(
                f"all {self.releases} planned steps are done, so the run cannot be entered again. "
                "Fix: a new plan, which is a charge of its own."
            )
        self._charge.reenter()

    def finish(self) -> None:
        """Mark the run as completed; a failure here is no reason to lose its results."""
        self._charge.finish()

    @property
    def why_nothing_is_returned(self) -> str:
        """Why the budget gets nothing back when the run ends early; "" if it does. Public."""
        if self._part_of(0, 0) == self.event:
            return "its steps share their noise or their charge, so only the whole run has a price"
        return self._charge.why_nothing_is_returned()

    def close(self) -> None:
        """Release nothing more, whatever the plan says."""
        refuse_fork(self._process)
        self.releases, self.ended = self.released, True

    def give_back(self, most: Callable[[int], int] = lambda begun: begun) -> None:
        """Release nothing more, and leave to the ledger's budget what the run has not released.

        Args:
            most: of the sums that were begun here and in the processes that train with this one.

        Raises:
            LedgerError: nothing can be given back; the run is over, and charged in full. Where the
                ledger could not be written, this may be called again.

        **Guarantee.** Every draw of noise that was begun on this reservation, here or by whoever
        held it before, stays charged to the budget: this gate is closed first, and the ledger lets
        nobody else go on. When to call it may depend on all that was released ("Giving back" in
        `dpoptim.accounting.budget`). A kill at any moment leaves the run charged in full, or ended.
        """
        self._returning = self._returning or self.released < self.releases
        self.close()
        begun = most(self._begun)
        if self._returning:
            self._charge.end(self._part_of, begun)
            self._returning = False


def refuse_other_noise(query: CorrelatedSum, earlier: Floats) -> None:
    """Refuse to take back, by one strategy, what another one took: nobody has bounded that.

    Strategies are fitted anew when a run is taken up, by code and libraries that may have changed.
    """
    if not np.allclose(query.numbers, earlier, rtol=SAME, atol=0.0, equal_nan=True):
        raise ValueError(
            "resume: here the noise of this plan is fitted to other numbers than where the run "
            "began (another version of dpoptim, numpy or scipy), so it would not take back what "
            "that took. Fix: resume with the versions that the run began with, or make a new run."
        )


def by_device(sums: Sequence[Vector]) -> list[list[Vector]]:
    """The tensors on each device, which share one vector of noise."""
    found: dict[torch.device, list[Vector]] = {}
    for each in sums:
        found.setdefault(each.device, []).append(each)
    return list(found.values())
