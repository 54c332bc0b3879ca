"""Charging audit: is every noisy sum paid for, in full, before it exists?

One run through the public API against a ledger that watches. The checks are logic, not statistics:
no false alarms.
"""

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dp_accounting
import dp_accounting as dp
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from dpoptim.accounting import calibration, compute_epsilon
from dpoptim.accounting.ledger import Ledger, Reservation
from dpoptim.audit.min_separation import MixturesOfPatterns
from dpoptim.audit.sampled_gaussians import SampledGaussians
from dpoptim.audit.two_worlds import Canaries
from dpoptim.errors import LedgerError, PrivacyError
from dpoptim.gate import Gate, GaussianSum
from dpoptim.methods import DPSGD
from dpoptim.noise.stream import KeyStream
from dpoptim.training.attach import attach

RECORDS, BATCH, STEPS, NOISE = 64, 16, 5, 1.5
EPSILON, DELTA, RELATION = 2.0, 1e-5, "zero-out"
Family = Callable[[float], dp.DpEvent]


@dataclass(frozen=True)
class ChargingResult:
    """Releases that were not charged as they should be; empty is good."""

    failed: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """``"refuted"`` if anything was released that was not paid for, else ``"consistent"``."""
        return "refuted" if self.failed else "consistent"

    def __str__(self) -> str:
        return (
            f"{self.verdict}: "
            f"{', '.join(self.failed) or 'every noisy sum was charged before it existed'}"
        )


class WatchingLedger(Ledger):
    """A ledger in memory that looks at something at the moment of each charge."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self.look = look

    def reserve(
        self,
        event: dp_accounting.DpEvent,
        *,
        neighboring: str | dp_accounting.NeighboringRelation,
        label: str,
        run: str | None = None,
        checkpoints: Sequence[str] = (),
    ) -> Reservation:
        self.look()
        return super().reserve(
            event, neighboring=neighboring, label=label, run=run, checkpoints=checkpoints
        )


def audit_charging() -> ChargingResult:
    """Watch a first release, a whole run and more after it, and a fork on the same ledger.

    Returns:
        what was charged before the first release, and whether a step too many, the forked process
        and the second of two that take up one uncharged run were refused.

    Examples:
        >>> from dpoptim.audit import audit_charging
        >>> audit_charging().verdict
        'consistent'
    """
    return ChargingResult((*_order(), *_whole_run(), *_fork(), *_taken_up_by_two()))


def _order() -> Sequence[str]:
    """The gate alone: at the time of the charge the sum must be untouched, afterwards noisy."""
    failed, charges = [], 0
    total = torch.zeros(1000, dtype=torch.float64)

    def look() -> None:
        nonlocal charges
        charges += 1
        if bool((total != 0).any()):
            failed.append("noise was drawn before the charge was on the ledger")

    with WatchingLedger(look) as ledger:
        released = _gate(ledger).release_sum([total])
    if charges != 1:
        failed.append(f"the first release was charged {charges} times")
    if not bool((released[0] != 0).all()):
        failed.append("a released sum has entries without noise")
    return failed


def _gate(ledger: Ledger) -> Gate:
    return Gate(
        event=SampledGaussians(1.0, STEPS).event(NOISE),
        neighboring="add-or-remove-one",
        query=GaussianSum(1.0, NOISE),
        releases=STEPS,
        ledger=ledger,
        noise=KeyStream.from_seed(0, "audit of charging"),
        label="audit",
    )


def _taken_up_by_two() -> Sequence[str]:
    """A run that was saved before its first release, and so before it was charged."""

    def run(resume: Path | None = None) -> tuple[Any, Canaries, torch.optim.Optimizer]:
        model = Canaries(RECORDS, torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        data = TensorDataset(torch.arange(RECORDS))
        return attach(plan, model, optimizer, data, ledger=ledger, resume=resume), model, optimizer

    plan = DPSGD(1.0).plan(
        n=RECORDS, batch_size=BATCH, steps=STEPS, noise_multiplier=NOISE, delta=1e-6
    )
    released = 0
    with tempfile.TemporaryDirectory() as folder, Ledger() as ledger:
        path = Path(folder) / "run"
        private, *_ = run()
        with private:
            private.save(path)
        both = [run(path), run(path)]
        for private, model, optimizer in both:
            with suppress(LedgerError):
                (index,) = next(private.batches())
                private.backward(model(index))
                optimizer.step()
                released += 1
        charged = len(ledger.entries())
        for private, *_ in both:
            private.detach()
    return () if charged == released else (f"of {released} runs {charged} were charged",)


def _fork() -> Sequence[str]:
    """A forked process has a copy of a ledger in memory; the first never sees what it spends."""
    if not hasattr(os, "fork"):
        return ()
    with Ledger() as ledger:
        with warnings.catch_warnings():
            # of Python 3.12, of threads that a child does not inherit: this one needs none
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            refused = False
            try:
                _gate(ledger).open()
            except LedgerError:
                refused = True
            finally:
                os._exit(0 if refused else 1)
        _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        return ("a forked process spent from a ledger in memory",)
    return ()


def _whole_run() -> Sequence[str]:
    """Train by a loop that wants more than planned; it may not get it, and must pay."""
    failed: list[str] = []
    model = Canaries(RECORDS, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = DPSGD(clip_norm=1.0).plan(
        n=RECORDS, batch_size=BATCH, steps=STEPS, noise_multiplier=NOISE, delta=1e-6
    )
    moves = 0

    def train(private: Any) -> None:
        nonlocal moves
        for (index,) in private.batches():
            before: Tensor = model.table.weight.detach().clone()
            private.backward(model(index))
            optimizer.step()
            moves += int(not torch.equal(before, model.table.weight.detach()))

    with (
        Ledger() as ledger,
        attach(
            plan, model, optimizer, TensorDataset(torch.arange(RECORDS)), ledger=ledger
        ) as private,
    ):
        try:
            train(private)
            train(private)  # a further loop finds no steps left
        except PrivacyError:
            pass  # a refusal to go on is right, too
        paid = [entry.event for entry in ledger.entries()]
    owed = SampledGaussians(BATCH / RECORDS, moves).event(NOISE)
    if len(paid) != 1:
        failed.append(f"the run made {len(paid)} reservations")
    elif paid[0] != owed:
        failed.append(f"{moves} noisy sums were released under {owed}, but {paid[0]} was charged")
    return failed


def calibrations() -> str:
    """Compare calibrated noise with its budget: text where it costs more. Exact, but for rounding.

    One search is by sampled prices (b-min-sep), one by an exact price. Then a noise multiplier is
    remembered of an event that costs less than the one it is asked for.
    """
    apart = MixturesOfPatterns(
        0.2, 9, column=(0.8, 0.5, 0.33), rows=(1.0,) * 9, gap=3, chance=0.2 / (1 - 2 * 0.2)
    )

    def dearer(noise_multiplier: float) -> dp.DpEvent:
        """By its name, which is what it is at 1, a Gaussian; else one of half the noise."""
        return dp.GaussianDpEvent(noise_multiplier / (1 if noise_multiplier == 1 else 2))

    with own_cache():
        return (
            over_budget("b-min-sep batches", apart.event)
            or over_budget("a Gaussian", dp.GaussianDpEvent)
            or over_budget("what was remembered of another event", dearer)
        )


def over_budget(what: str, family: Family) -> str:
    """Calibrate; text if the noise costs more than `EPSILON`."""
    noise = calibration.calibrate_remembered(
        family, epsilon=EPSILON, delta=DELTA, neighboring=RELATION
    )
    cost = compute_epsilon(family(noise), DELTA, RELATION).epsilon
    if cost <= EPSILON:
        return ""
    return f"refuted: calibration of {what}: epsilon {cost:.4g} where {EPSILON:g} was asked for"


@contextmanager
def own_cache() -> Iterator[None]:
    """An empty folder of calibrations, which is removed again."""
    name = "DPOPTIM_CACHE_DIR"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
