"""The ledger of a run in several processes: rank 0 reads and writes it, the others are told."""

from collections.abc import Callable
from typing import Any

import dp_accounting as dp

from dpoptim.accounting.balance import Remaining
from dpoptim.accounting.ledger import Ledger, Reservation

FromFirst = Callable[[Callable[[], Any]], Any]


class LedgerOfRanks(Ledger):
    """Passes changes of the ledger on to rank 0's, whose answer or error all ranks get.

    Args:
        ledger: rank 0's, where the run is charged; that of the others is not looked at.
        from_first: asks on rank 0 alone; see `Ranks.from_first`.

    What a person may print (`entries`, `remaining`, `spent`, `why_nothing_is_returned`, `describe`)
    tells what was known at the run's last entry, and asks nobody: one rank may print it alone.

    **Guarantee.** One reservation a run, however many processes it has; it is on disk before any
    of them goes on.
    """

    def __init__(self, ledger: Ledger, from_first: FromFirst) -> None:
        self._real, self._from_first = ledger, from_first
        settings = from_first(
            lambda: (
                ledger.dataset,
                ledger.neighboring,
                ledger.budget,
                ledger.durable,
                ledger._where,
            )
        )
        # its own store stays empty
        super().__init__(None, dataset=settings[0], neighboring=settings[1])
        self.budget, self._durable, self._place = settings[2:]
        self._known: tuple[list[Reservation], Remaining, dict[str, str]]
        self._look()

    def reserve(
        self, event: dp.DpEvent, *, neighboring: str | dp.NeighboringRelation, label: str
    ) -> Reservation:
        made: Reservation = self._ask(
            lambda: self._real.reserve(event, neighboring=neighboring, label=label)
        )
        self.made.append(made.id)
        return made

    def check(self, event: dp.DpEvent, neighboring: str | dp.NeighboringRelation) -> None:
        self._ask(lambda: self._real.check(event, neighboring))

    def commit(self, reservation: Reservation) -> None:
        self._ask(lambda: self._real.commit(reservation))

    def reenter(self, reservation_id: str, *, resumed: int) -> None:
        self._ask(lambda: self._real.reenter(reservation_id, resumed=resumed))

    def resume(
        self,
        reservation_id: str,
        event: dp.DpEvent,
        *,
        released: int = 0,
        checkpoint: str | None = None,
    ) -> Reservation:
        taken: Reservation = self._ask(
            lambda: self._real.resume(
                reservation_id, event, released=released, checkpoint=checkpoint
            )
        )
        return taken

    def begin_releases(self, reservation_id: str, count: int, *, resumed: int) -> None:
        self._ask(lambda: self._real.begin_releases(reservation_id, count, resumed=resumed))

    def end(self, reservation_id: str, part: dp.DpEvent, *, released: int, resumed: int) -> None:
        self._ask(lambda: self._real.end(reservation_id, part, released=released, resumed=resumed))

    def why_nothing_is_returned(self, reservation_id: str) -> str:
        return self._known[2][reservation_id]

    def note_checkpoint(
        self, reservation_id: str, released: int, digest: str, *, resumed: int, begun: int | None
    ) -> None:
        self._ask(
            lambda: self._real.note_checkpoint(
                reservation_id, released, digest, resumed=resumed, begun=begun
            )
        )

    def knows_checkpoint(self, reservation_id: str, released: int, digest: str) -> bool:
        return bool(
            self._ask(lambda: self._real.knows_checkpoint(reservation_id, released, digest))
        )

    def holds(self, reservation: Reservation) -> bool:
        return bool(self._from_first(lambda: self._real.holds(reservation)))

    def entries(self) -> list[Reservation]:
        return list(self._known[0])

    def remaining(self) -> Remaining:
        return self._known[1]

    def close(self) -> None:
        super().close()
        self._real.close()

    @property
    def durable(self) -> bool:
        return self._durable

    @property
    def _where(self) -> str:
        return self._place if hasattr(self, "_place") else "on rank 0"

    def _ask(self, ask: Callable[[], Any]) -> Any:
        answer = self._from_first(ask)
        self._look()
        return answer

    def _look(self) -> None:
        """All ranks together: what one of them may be asked for alone."""

        def known() -> tuple[list[Reservation], Remaining, dict[str, str]]:
            entries, ask = self._real.entries(), self._real.why_nothing_is_returned
            return entries, self._real.remaining(), {each.id: ask(each.id) for each in entries}

        self._known = self._from_first(known)
