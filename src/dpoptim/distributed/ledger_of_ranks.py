"""The ledger of a run in several processes: rank 0 reads and writes it, the others are told."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import dp_accounting as dp

from dpoptim.accounting.budget_words import Remaining
from dpoptim.accounting.ledger import Ledger, Reservation
from dpoptim.gate.one_process import alone

FromFirst = Callable[[Callable[[], Any]], Any]
Given = ParamSpec("Given")
Answer = TypeVar("Answer")


def on_first(
    method: Callable[Concatenate[Any, Given], Answer],
) -> Callable[Concatenate["LedgerOfRanks", Given], Answer]:
    """Ask a method of rank 0's ledger, in its place; all ranks then know what it holds."""

    def asked(ranks: "LedgerOfRanks", /, *args: Given.args, **kwargs: Given.kwargs) -> Answer:
        real = getattr(ranks._real, method.__name__)  # maybe of a subclass
        answer: Answer = ranks._from_first(lambda: real(*args, **kwargs))
        ranks._look()
        return answer

    return asked


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

    of_all_ranks = True

    def __init__(self, ledger: Ledger, from_first: FromFirst) -> None:
        self._real, self._from_first = ledger, from_first
        settings = from_first(
            lambda: (
                ledger.dataset,
                ledger.neighboring,
                ledger.budget,
                ledger.path,
            )
        )
        # its own store stays empty
        super().__init__(None, dataset=settings[0], neighboring=settings[1])
        self.budget, self._path = settings[2:]
        self._known: tuple[list[Reservation], Remaining, dict[str, str]]
        self._look()

    def reserve(
        self,
        event: dp.DpEvent,
        *,
        neighboring: str | dp.NeighboringRelation,
        label: str,
        run: str | None = None,
        checkpoints: Sequence[str] = (),
    ) -> Reservation:
        made = on_first(Ledger.reserve)(
            self, event, neighboring=neighboring, label=label, run=run, checkpoints=checkpoints
        )
        self.made.append(made.id)
        return made

    new_id = on_first(Ledger.new_id)
    check = on_first(Ledger.check)
    commit = on_first(Ledger.commit)
    reenter = on_first(Ledger.reenter)
    resume = on_first(Ledger.resume)
    begin_releases = on_first(Ledger.begin_releases)
    end = on_first(Ledger.end)
    note_checkpoint = on_first(Ledger.note_checkpoint)
    knows_checkpoint = on_first(Ledger.knows_checkpoint)

    def why_nothing_is_returned(self, reservation_id: str) -> str:
        return self._known[2][reservation_id]

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
    def path(self) -> Path | None:
        return getattr(self, "_path", None)

    def _look(self) -> None:
        """All ranks together: what one of them may be asked for alone."""

        def known() -> tuple[list[Reservation], Remaining, dict[str, str]]:
            entries, ask = self._real.entries(), self._real.why_nothing_is_returned
            return entries, self._real.remaining(), {each.id: ask(each.id) for each in entries}

        self._known = self._from_first(known)


def in_its_process(ledger: Ledger, act: Callable[[Ledger], Answer]) -> Answer:
    """Do what reads private data and charges a ledger in the one process that keeps it.

    All ranks of the ledger's run call it, and get the answer, or the error; of several runs in
    groups of ranks, each has a process of its own.
    """

    def act_alone(own: Ledger) -> Answer:
        with alone():
            return act(own)

    if not isinstance(ledger, LedgerOfRanks):
        return act_alone(ledger)
    answer: Answer = ledger._from_first(lambda: act_alone(ledger._real))
    ledger._look()
    return answer
