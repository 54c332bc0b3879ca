"""One run's charge on a ledger, from its reservation to its end. The gate alone holds one."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import dp_accounting as dp

from dpoptim.accounting.ledger import Ledger, Reservation
from dpoptim.accounting.ledger_runs import DONE
from dpoptim.accounting.ledger_settings import ID
from dpoptim.errors import LedgerError, TakenUpElsewhereError
from dpoptim.printable import printable

PartOf = Callable[[int, int], dp.DpEvent]
ANNOUNCEMENTS = 20  # a run tells the ledger so often how far it may have come
_lists: ContextVar[tuple[list[str], ...]] = ContextVar("lists", default=())


@contextmanager
def charges_made() -> Iterator[list[str]]:
    """List the ids of charges that are reserved in this ``with``, by this thread, in turn."""
    made: list[str] = []
    token = _lists.set((*_lists.get(), made))
    try:
        yield made
    finally:
        _lists.reset(token)


class Charge:
    """A run's charge, and its progress as the ledger knows it.

    Args:
        ledger: None only for a run without noise, which promises nothing; then nothing is written.
        event: everything that the run may release.
        neighboring: the relation of the guarantee, by name.
        label: public text for the ledger's entry.

    Attributes:
        reservation: None until `open`.
    """

    def __init__(
        self, ledger: Ledger | None, event: dp.DpEvent, neighboring: str, label: str
    ) -> None:
        self.event, self.neighboring, self.label = event, neighboring, label
        self.reservation: Reservation | None = None
        self._ledger = ledger
        self._paused: str | None = None  # the reservation of the part that is over
        self._digest = ""  # of the checkpoint that it goes on from
        # the id that the charge will have, and checkpoints that name it: a run may be saved before
        # it is charged, and must then not be charged again by whoever takes it up
        self._planned: str | None = None
        self._saved: list[str] = []
        self._announced = 0  # so many releases have been announced to the ledger
        self._times = 0  # how often the run has been taken up, this time included
        self._taken_up = False  # from a checkpoint, whatever the ledger knows of it

    def check(self) -> None:
        """Refuse before any work is done what `open` would refuse now."""
        if self._ledger is not None and self._paused is None:
            self._ledger.check(self.event, self.neighboring)

    def open(self) -> None:
        """Reserve the run, or take its reservation up again; on disk when this returns."""
        if self._ledger is None or self.reservation is not None:
            return
        if self._paused is None:
            self.reservation = self._ledger.reserve(
                self.event,
                neighboring=self.neighboring,
                label=self.label,
                run=self._planned,
                checkpoints=self._saved,
            )
            for made in _lists.get():
                made.append(self.reservation.id)
        else:
            self.reservation = self._ledger.resume(
                self._paused, self.event, released=self._announced, checkpoint=self._digest
            )
            self._times = self.reservation.resumed

    def announce(self, begun: int, releases: int) -> None:
        """Write down, ahead and for several at a time, that a release begins.

        The last one asks the ledger in any case: a run that was taken up elsewhere meanwhile must
        not complete here, too.

        Args:
            begun: so many have been, interrupted ones included.
            releases: so many are planned.
        """
        if self._ledger is None or self.reservation is None:
            return
        if begun < self._announced and begun + 1 < releases:
            return
        ahead = begun + math.ceil(releases / ANNOUNCEMENTS)
        self._announced = max(begun + 1, min(releases, ahead))
        self._ledger.begin_releases(self.reservation.id, self._announced, resumed=self._times)

    @property
    def secret_id(self) -> str | None:
        """The reservation's id, also of a run that was taken up and has released nothing since."""
        return self._paused if self.reservation is None else self.reservation.id

    def id_to_save(self) -> str | None:
        """The id for a checkpoint: of the charge, or the one that the charge will have. Secret."""
        if self._ledger is None or self.secret_id is not None:
            return self.secret_id
        self._planned = self._planned or self._ledger.new_id()
        return self._planned

    def note_checkpoint(self, released: int, begun: int, digest: str) -> None:
        """Write down the SHA-256 of a checkpoint before it is saved; no other is taken up.

        Args:
            begun: as for `announce`.

        Raises:
            LedgerError: the ledger cannot be written.
        """
        if self._ledger is None:
            return
        if self.reservation is not None:
            try:
                self._ledger.note_checkpoint(
                    self.reservation.id, released, digest, resumed=self._times, begun=begun
                )
            finally:  # whether or not it was written: what was announced ahead may be gone
                self._announced = begun
        elif self._paused is not None:
            self._ledger.note_checkpoint(
                self._paused, released, digest, resumed=self._times, begun=None
            )
        elif self._planned is not None:
            self._saved.append(digest)  # for `open` to write down

    def take_up(self, reservation_id: str | None, released: int, digest: str) -> None:
        """Go on with the reservation of an earlier part; without one in the ledger `open` reserves.

        It does so under the same id where nothing was released: whoever takes up the same
        checkpoint once more then goes on, too, and is not charged again.

        Args:
            released: releases so far, as the checkpoint counts them.
            digest: SHA-256 of the checkpoint.

        Raises:
            LedgerError: the run was completed, or did not save this checkpoint.
        """
        self._announced, self._taken_up = released, True
        found = self._known(reservation_id)
        if found is None or self._ledger is None:
            if released == 0 and reservation_id is not None and ID.fullmatch(reservation_id):
                self._planned, self._saved = reservation_id, [digest]
            return
        if found.state != "open":
            since = found.state == "committed" and found.begun > released
            after = (
                f" (left in order after {found.begun} releases; what came after this checkpoint, "
                f"of {released}, may be in use)"
            )
            why = DONE[found.state] + (after if since else "")
            raise LedgerError(
                f"the run {printable(found.label)!r} was {why}, so its checkpoints cannot go on; "
                "make a new plan (another time private.save(path) after the last step, before or "
                "after the loop is left, from which it goes on). The model in one may be used: "
                "dpoptim.released_weights(path)."
            )
        if not self._ledger.knows_checkpoint(found.id, released, digest):
            raise LedgerError(
                "resume: the ledger knows of no such checkpoint of the run "
                f"{printable(found.label)!r}, after {released} releases; it was changed. Fix: give "
                "it as private.save(path) wrote it, or start a new run."
            )
        self._paused, self._times, self._digest = found.id, found.resumed, digest

    @property
    def nothing_begun(self) -> bool:
        """Whether nobody has begun a release: here, or in a process that had the run before.

        Of a run that was taken up and that the ledger does not know, or that has none, nobody can
        say so; nor if the ledger cannot be read.
        """
        try:
            found = self._known(self.secret_id or self._planned)
        except LedgerError:
            return False
        if found is None:
            return not self._taken_up
        return found.begun == found.repeated == 0

    def recall(self, reservation_id: str | None) -> None:
        """Name the reservation of a run all of whose releases have been made."""
        self.reservation = self._known(reservation_id)

    def _known(self, reservation_id: str | None) -> Reservation | None:
        entries = [] if self._ledger is None else self._ledger.entries()
        return next((entry for entry in entries if entry.id == reservation_id), None)

    def why_nothing_is_returned(self) -> str:
        """Why the budget gets nothing back when the run ends early; "" if it does. Public."""
        run = self.secret_id
        if self._ledger is None or self._ledger.budget is None:
            return "the run is not charged to a ledger with a budget"
        return "" if run is None else self._ledger.why_nothing_is_returned(run)

    def end(self, part_of: PartOf, begun: int) -> None:
        """End the run for good, and charge the budget only for what may have been released.

        Who calls it has stopped releasing. First the run is taken up, if it was not yet: whoever
        held it before is then refused, and what they may have released is known.

        Args:
            part_of: from releases made along the run, and releases made again, to their event.
            begun: noisy sums that were begun along the run, this part's included.

        Raises:
            LedgerError: nothing can be given back, or it could not be written; the whole is
                charged then.
        """
        if self._ledger is None or (self.reservation is None and self._paused is None):
            return
        self.open()
        assert self.reservation is not None
        repeated = self.reservation.repeated
        self._ledger.end(
            self.reservation.id,
            part_of(begun, repeated),
            released=begun + repeated,
            resumed=self._times,
        )

    def reenter(self) -> None:
        """Go on after `finish`, in the same process."""
        if self._ledger is not None and self.reservation is not None:
            self._ledger.reenter(self.reservation.id, resumed=self._times)

    def finish(self) -> None:
        """Mark the run as completed; also one that was taken up and released nothing since.

        Raises:
            LedgerError: it was taken up elsewhere, and others go on with it: of two holders, one
                completes a run, and the other one's last release does not leave the gate.
        """
        if self._ledger is None or (self.reservation is None and self._paused is None):
            return
        self.open()
        assert self.reservation is not None
        try:
            self._ledger.commit(self.reservation)
        except TakenUpElsewhereError:
            raise
        except LedgerError as error:
            if self._ledger.holds(self.reservation):
                said = f"the run is charged, but could not be marked as completed: {error}"
            else:
                said = (
                    f"the ledger does not show this run's charge any more: {error}. What the run "
                    "released counts nevertheless. Fix: put the ledger back, or reserve this in "
                    f"the new one: {self.event}"
                )
            warnings.warn(said, RuntimeWarning, stacklevel=3)
