"""Runs that are interrupted and go on: signals, and files kept in the run directory meanwhile."""

import io
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from dpoptim.distributed.ranks import ALONE, Ranks
from dpoptim.files import write_atomically
from dpoptim.installed import SOURCES, digests
from dpoptim.training.private_training import PrivateTraining
from dpoptim.training.tail_average import TailAverage

SAVE, STOP = 1, 2  # what a rank wishes after a step
SECRET = "private.checkpoint"
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
