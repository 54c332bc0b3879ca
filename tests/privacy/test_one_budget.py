"""From table to scores under one budget: whatever is fitted, searched, trained and scored, in
whatever order, with kills in between, all noise that was drawn is within it.

What was released is measured where noise is drawn, against the bound on a record that the caller
claims (which the audits of each release attack); how that adds up is a formula of its own.
"""

import math
import os
import random
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim import Ledger
from dpoptim.estimators import DPLinearRegression
from dpoptim.evaluation import evaluate_regressor
from dpoptim.gate import FilteredGate, Gate, adaptive, planned
from dpoptim.noise.gaussian import add_normal
from dpoptim.preprocessing import (
    DPClassCounts,
    DPImputer,
    DPMinMaxScaler,
    DPOneHot,
    DPStandardScaler,
    PrivatePipeline,
)
from dpoptim.tuning import DPSearchCV
from dpoptim.tuning.search_event import search_event
from forked import needs_fork

N = 60
X = np.random.default_rng(0).uniform(-1, 1, (N, 3))
Y = np.clip(X[:, 0] / 2, -1, 1)
DELTA = 1e-5


class Killed(BaseException):
    """Somebody stops the program."""


class Meter:
    """Adds up what leaves: squared shifts over variances of Gaussians, and epsilons of choices.

    Args:
        kill: ends the program.
        log: a file that outlives it, where what leaves is written at once.

    Attributes:
        squares: mu^2 of all Gaussian draws outside searches.
        choices: epsilon of every choice.
        trials: mu of the draws in searches.
        kill_at: the draw at which the program is killed; before or after it is made.
    """

    def __init__(self, kill: Callable[[], None], log: int | None = None) -> None:
        self.squares, self.choices = 0.0, list[float]()
        self.trials: list[float] = []
        self.kill_at, self.before = -1, False
        self.searching = False
        self._bound = math.nan
        self._kill, self._log = kill, log

    def note(self, kind: str, value: float) -> None:
        if self._log is not None:
            os.write(self._log, f"{kind} {value!r}\n".encode())
        if kind == "choice":
            self.choices.append(value)
        elif kind == "trial":
            self.trials.append(value)
        else:
            self.squares += value**2

    @contextmanager
    def watching(self) -> Iterator[None]:
        def draw(stream: Any, total: torch.Tensor, deviation: float) -> None:
            self.kill_at -= 1
            if self.kill_at == 0 and self.before:
                self._kill()
            add_normal(stream, total, deviation)
            self.note("trial" if self.searching else "sum", self._bound / deviation)
            if self.kill_at == 0:
                self._kill()

        def bounded(honest: Any, bound: Any) -> Any:
            def call(one: Any, *given: Any, **named: Any) -> Any:
                self._bound = bound(one, named)
                return honest(one, *given, **named)

            return call

        def select(one: Any, scores: Any, *, norm_bound: float, epsilon: float) -> int:
            self.note("choice", epsilon)
            return honest_select(one, scores, norm_bound=norm_bound, epsilon=epsilon)

        honest_select = FilteredGate.select
        of_run = bounded(Gate.release_sum, lambda one, named: one.query.norm_bound)
        of_sum = bounded(FilteredGate.release_sum, lambda one, named: named["norm_bound"])
        with (
            patch.object(planned, "add_normal", draw),
            patch.object(adaptive, "add_normal", draw),
            patch.object(Gate, "release_sum", of_run),
            patch.object(FilteredGate, "release_sum", of_sum),
            patch.object(FilteredGate, "select", select),
        ):
            yield


def train(ledger: Ledger, epsilon: float, *, refund: bool) -> None:
    """Steps that all records take part in; the run may give back what it has not made."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.from_numpy(X).float(), torch.from_numpy(Y).float())
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N,
        batch_size=N,
        steps=8,
        epsilon=epsilon,
        delta=DELTA,
        neighboring="zero-out",
    )
    with dpoptim.attach(plan, model, optimizer, data, ledger=ledger) as private:
        for x, y in private.batches():
            private.backward((model(x)[:, 0] - y).square())
            optimizer.step()
            if refund and private.steps_done == 2 and not private.why_no_refund:
                private.finish(refund=True)
        if refund:
            private.evaluate(data, epsilon=epsilon / 2, target_bound=1.0)


def train_on(ledger: Ledger, checkpoint: Path) -> None:
    """A run that is taken up where a kill has left it, and gives back what it has not made then.

    It has more steps than all kills of a test can make it repeat: those may have been released.
    """
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.from_numpy(X).float(), torch.from_numpy(Y).float())
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=N, steps=24, epsilon=0.3, delta=DELTA, neighboring="zero-out"
    )
    last = checkpoint if checkpoint.exists() else None
    with dpoptim.attach(plan, model, optimizer, data, ledger=ledger, resume=last) as private:
        for x, y in private.batches():
            private.backward((model(x)[:, 0] - y).square())
            optimizer.step()
            if private.steps_done < 6:
                private.save(checkpoint)
            else:
                private.finish(refund=not private.why_no_refund)
    checkpoint.unlink()


def act(what: str, ledger: Ledger, epsilon: float, checkpoint: Path) -> None:
    paid: Any = {"epsilon": epsilon, "delta": DELTA, "ledger": ledger}
    if what == "scale":
        DPStandardScaler(-1, 1, **paid).fit(X)
    elif what == "impute":
        DPImputer(-1, 1, **paid).fit(X)
    elif what == "ends":
        DPMinMaxScaler(-1, 1, quantile=0.1, **paid).fit(X)
    elif what == "categories":
        DPOneHot(buckets=8, **paid).fit(np.sign(X))
    elif what == "classes":
        DPClassCounts([0, 1], **paid).fit(Y > 0)
    elif what == "search":
        line = DPLinearRegression(target_bound=1.0, solver="sufficient-statistics")
        DPSearchCV(line, {"l2": [0.0, 1.0]}, mean_trials=2.0, **paid).fit(X, Y)
    elif what == "fit":
        DPLinearRegression(target_bound=1.0, solver="sufficient-statistics", **paid).fit(X, Y)
    elif what == "pipeline":
        line = DPLinearRegression(target_bound=1.0, solver="sufficient-statistics")
        free = DPMinMaxScaler(-1, 1)  # by public ranges, as a schema's: it is charged nothing
        steps = [("bounds", free), ("scale", DPStandardScaler(-1, 1)), ("fit", line)]
        PrivatePipeline(steps, **paid).fit(X, Y)
    elif what == "score":
        evaluate_regressor(Y, Y, target_bound=1.0, records="hold-out", **paid)
    elif what == "train on":
        train_on(ledger, checkpoint)
    else:
        train(ledger, epsilon, refund=what == "train, and end")


ACTS = [
    *("scale", "impute", "ends", "categories", "classes", "search", "fit", "score"),
    *("train", "train, and end", "train on", "pipeline"),
]
step = st.tuples(
    st.sampled_from(ACTS),
    st.sampled_from([0.2, 0.5, 1.0, 1.9]),
    st.integers(-6, 6),  # the draw at which it is killed; none below 1
    st.booleans(),
)


# killed before and after a draw, then ended with a refund
TAKEN_UP = [("train on", 0.3, at, before) for at, before in ((3, False), (2, True), (0, False))]


def stop() -> None:
    raise Killed


@settings(max_examples=12)
@given(script=st.lists(step, min_size=4, max_size=14))
@example(script=[("scale", 0.2, 0, False), *TAKEN_UP, ("fit", 1.9, 0, False)])
@pytest.mark.filterwarnings("ignore")
def test_no_sequence_of_steps_exceeds_the_budget(
    script: list[tuple[str, float, int, bool]],
) -> None:
    meter, searches = Meter(stop), list[float]()
    ledger = Ledger(**TOTAL)
    with meter.watching(), TemporaryDirectory() as folder:
        for what, price, meter.kill_at, meter.before in script:
            meter.searching, before = what == "search", len(meter.trials)
            with suppress(dpoptim.BudgetExceeded, Killed):
                act(what, ledger, price, Path(folder) / "checkpoint")
            searches += searched(meter, before, price)
    assert released(ledger, meter, searches) <= charged(ledger) * (1 + 1e-6)


@needs_fork
@pytest.mark.filterwarnings("ignore")
def test_no_sequence_of_killed_processes_exceeds_the_budget(tmp_path: Path) -> None:
    """Each step in a process of its own, on one ledger file; most of them die by SIGKILL around a
    draw.
    """
    path, chance, log = tmp_path / "ledger.sqlite", random.Random(3), tmp_path / "log"
    everything, all_searches, killed, spent = Meter(stop), list[float](), 0, 0.0
    Ledger(path, dataset="table", **TOTAL).close()
    acts = [*chance.sample(ACTS, len(ACTS)), *chance.sample(ACTS, 4)]
    script = [
        (what, chance.choice([0.2, 0.3]), chance.choice([0, 1, 1, 2]), chance.random() < 0.3)
        for what in acts
    ]
    for what, price, at, before in (*script[:2], *TAKEN_UP, *script[2:]):
        child = os.fork()
        if child == 0:
            in_a_process(path, log, what, price, at, before=before)
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL), what
        killed += status == signal.SIGKILL
        meter = Meter(stop)
        for kind, value in map(str.split, log.read_text().splitlines()):
            for each in (meter, everything):
                each.note(kind, float(value))
        searches = searched(meter, 0, price)
        all_searches += searches
        with Ledger(path) as ledger:  # each step alone, too: a whole one leaves no slack
            earlier, spent, entries = spent, charged(ledger), ledger.entries()
            if what != "train on":  # which may give back what an earlier step was charged
                assert released(ledger, meter, searches) <= (spent - earlier) * (1 + 1e-6)
            assert released(ledger, everything, all_searches) <= spent * (1 + 1e-6)
    assert len(entries) >= 8
    assert any(each.resumed == 2 and each.part is not None for each in entries)
    assert killed >= 5
    assert everything.squares > 0
    assert all_searches
    assert everything.choices


def in_a_process(path: Path, log: Path, what: str, price: float, at: int, *, before: bool) -> None:
    """A step as a program of its own, which nothing outlives but files; never returns."""
    try:
        torch.set_num_threads(1)  # a fork does not inherit a thread pool
        signal.alarm(60)
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        meter = Meter(lambda: os.kill(os.getpid(), signal.SIGKILL), file)
        meter.kill_at, meter.before, meter.searching = at, before, what == "search"
        with meter.watching(), suppress(dpoptim.BudgetExceeded):
            act(what, Ledger(path), price, path.with_suffix(".checkpoint"))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


TOTAL: Any = {"epsilon": 2.0, "delta": DELTA, "neighboring": "zero-out"}


def searched(meter: Meter, before: int, price: float) -> list[float]:
    """The price of a search if there was one, whose trials were no sharper than its base."""
    if len(meter.trials) == before:
        return []
    base = 1 / search_event(price, DELTA, "zero-out", 2.0).event.noise_multiplier
    assert max(meter.trials[before:]) <= base * (1 + 1e-6)
    return [price]


def released(ledger: Ledger, meter: Meter, searches: list[float]) -> float:
    """What left, at the budget's Renyi order."""
    budget = ledger.budget
    assert budget is not None
    assert budget.order is not None
    # Gaussians: order mu^2 / 2. Choices: their log-ratios span an interval of length epsilon, so
    # epsilon^2 / 8 of zCDP. Searches: what the event says of trials that are no sharper than its
    # base (above).
    renyi = budget.order * (meter.squares / 2 + math.fsum(e**2 / 8 for e in meter.choices))
    return renyi + math.fsum(
        budget.charge(search_event(price, DELTA, "zero-out", 2.0), 1)[0] for price in searches
    )


def charged(ledger: Ledger) -> float:
    """What the ledger says was spent, within its limit."""
    ledger.verify()
    budget = ledger.budget
    assert budget is not None
    spent = math.fsum(ledger._runs.charges(budget))
    assert len(ledger.entries()) < 2 or spent <= budget.limit * (1 + 1e-6)
    return spent
