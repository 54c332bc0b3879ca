"""Runs that have not ended: signals, and what the run directory holds until there is a certificate.

Killed at any moment, a run leaves its plan, which tells an officer which charge is whose, and what
it needs to go on.
"""

import io
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from dpoptim.accounting.event_json import event_text
from dpoptim.accounting.ledger import Ledger
from dpoptim.distributed.ranks import ALONE, Ranks
from dpoptim.files import write_atomically
from dpoptim.installed import SOURCES, digests
from dpoptim.plan import Plan
from dpoptim.printable import printable
from dpoptim.runs.result import CERTIFICATE
from dpoptim.training.private_training import PrivateTraining
from dpoptim.training.tail_average import TailAverage

SAVE, STOP = 1, 2  # what a rank wishes after a step
PLAN, SECRET = "plan.json", "private.checkpoint"
RELEASED = "progress-{}.pt"


class RunInterruptedError(Exception):
    """The run was stopped after a step, and saved."""


@dataclass
class StopRequest:
    """Whether somebody asked the run to stop."""

    asked: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked:  # a second time: at once
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn the first Ctrl-C or SIGTERM into a stop after the step; the second stops at once."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may watch for signals
        return
    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class SavedRun:
    """An unfinished run's files: a secret checkpoint, and what the loop around it remembers.

    Args:
        folder: the run directory.
        seconds: between two saves.
        stop: asked after every step.
        clock: seconds that pass.
        ranks: the processes that train together: one stops, or saves, when all do; rank 0 writes.
        packages: SHA-256 of each other dpoptim that trained a part of the run before.

    **Guarantee.** The checkpoint is secret, like the data; the other file holds averages of
    released iterates and scores on public data. Both are removed when the run is complete.
    """

    folder: Path
    seconds: float
    stop: StopRequest
    clock: Callable[[], float] = time.monotonic
    ranks: Ranks = ALONE
    packages: list[str] = field(default_factory=list)
    _saved_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._saved_at = self.clock()

    @property
    def checkpoint(self) -> Path:
        return self.folder / SECRET

    @contextmanager
    def before_steps(self, private: PrivateTraining, average: TailAverage) -> Iterator[None]:
        """Save a new run before it is charged: from then on, killed at any moment, it can go on.

        What fails inside before anything was released or charged leaves no files.
        """
        self._save(private, average, [])
        try:
            yield
        except BaseException:
            if private.reservation is None and not private.steps_done and self.ranks.rank == 0:
                self.remove()
            raise

    def after_step(
        self, private: PrivateTraining, average: TailAverage, scores: list[float]
    ) -> None:
        """Save if it is time, if the run is to stop, or when all steps are done.

        Killed while it compares and reports, a run so has its model and its charge.

        Raises:
            RunInterruptedError: it was saved, and stops.
        """
        if private.steps_done == private.plan.steps:
            with suppress(OSError):  # results are about to be written, or say why not
                self._save(private, average, scores)
            return
        due = self.clock() - self._saved_at >= self.seconds
        wish = self.ranks.all_max(STOP if self.stop.asked else SAVE if due else 0)
        if wish:
            try:
                self._save(private, average, scores)
            except OSError as error:
                raise OSError(
                    f"the run could not be saved after step {private.steps_done}: "
                    f"{error.strerror} The same command with --out {self.folder} --resume goes on "
                    "from the last save, on the same charge."
                ) from error
        if wish == STOP:
            raise RunInterruptedError(
                f"Stopped after step {private.steps_done} of {private.plan.steps}, and saved. The "
                f"same command with --out {self.folder} --resume goes on, on the same charge."
            )

    def _save(self, private: PrivateTraining, average: TailAverage, scores: list[float]) -> None:
        """Save what the checkpoint's step needs first: killed in between, the old pair is whole."""
        own = self.folder / RELEASED.format(private.steps_done)
        if self.ranks.rank == 0:
            stream = io.BytesIO()
            remembered = {"average": average.state(), "scores": scores}
            packages = [*self.packages, digests()[SOURCES]]
            torch.save({**remembered, "packages": packages}, stream)
            write_atomically(own, stream.getvalue())
        private.save(self.checkpoint)
        if self.ranks.rank == 0:
            for path in self.folder.glob(RELEASED.format("*")):
                if path != own:
                    path.unlink()
        self._saved_at = self.clock()

    def restore(self, steps_done: int, average: TailAverage) -> list[float]:
        """Put back what the loop remembered; returns the scores so far.

        Raises:
            ValueError: the file of this step is missing or damaged.
        """
        path = self.folder / RELEASED.format(steps_done)
        try:
            saved: dict[str, Any] = self.ranks.from_first(
                lambda: torch.load(path, weights_only=True)
            )
            average.restore(saved["average"])
            # earlier versions did not write them down
            earlier = dict.fromkeys(saved.get("packages", ["not known"]))
            self.packages = [each for each in earlier if each != digests()[SOURCES]]
            return [float(each) for each in saved["scores"]]
        except Exception as error:  # torch.load raises many kinds
            raise ValueError(
                f"{path} does not belong to the checkpoint beside it. Fix: start the run anew."
            ) from error

    def remove(self) -> None:
        """Leave no secrets behind: the run is complete, or never was charged."""
        parts = self.folder.glob(f"{SECRET}.*.part")  # of several processes
        for path in (self.checkpoint, *parts, *self.folder.glob(RELEASED.format("*"))):
            path.unlink(missing_ok=True)


@contextmanager
def plan_on_disk(folder: Path, plan: Plan, ledger: Ledger) -> Iterator[None]:
    """Write the plan before its run is charged; what fails before that leaves none behind.

    Results of an earlier run, which this one is about to replace, stay with their own plan.
    """
    path = folder / PLAN
    if (folder / CERTIFICATE).exists():
        yield
        return
    write_atomically(path, plan.to_json() + "\n")
    try:
        yield
    except BaseException:
        if not ledger.made and not (folder / SECRET).exists():
            path.unlink(missing_ok=True)
        raise


def is_unfinished(folder: Path) -> bool:
    """Whether this is the directory of a run that has not ended."""
    begun = (folder / PLAN).is_file() or (folder / SECRET).is_file()
    return begun and not (folder / CERTIFICATE).exists()


def state_of_unfinished(folder: Path, plan: Plan | None, ledgers: Sequence[Ledger]) -> str:
    """State of an unfinished run for an officer, with the fix; public.

    Args:
        plan: None: of an earlier version, which wrote it last.
        ledgers: those that were named, verified.
    """
    promised = "" if plan is None else f" Its plan promises {plan.guarantee}."
    charges = [line for ledger in ledgers for line in charges_in(ledger, plan)]
    if not ledgers:
        charges = ["Whether it was charged: --ledger FILE."]
    on = (
        "the same dpoptim train with --resume goes on, on its charge"
        if (folder / SECRET).is_file()
        else "it cannot be taken up, so start anew"
    )
    return (
        f"{printable(str(folder))}: interrupted, or still running: there is no certificate yet, so "
        f"nothing here may be released.{promised} {' '.join(charges)} Fix: {on}; a charge that "
        "nobody takes up stays, as what was drawn may have been seen."
    )


def charges_in(ledger: Ledger, plan: Plan | None) -> list[str]:
    """The charges that may be its own: of the plan's event, and open; else that there is none."""
    name = printable(ledger.dataset)
    found = [
        entry
        for entry in ledger.entries()
        if entry.state == "open"
        and (plan is None or event_text(entry.event) == event_text(plan.event))
    ]
    if not found:
        return [f"The ledger of {name!r} holds no open charge of it."]
    return [
        f"The ledger of {name!r} holds an open charge of it: {each.id}, {printable(each.label)}."
        for each in found
    ]
