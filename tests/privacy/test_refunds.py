"""Tries to get more out of a budget than (epsilon, delta) by ending, killing and taking up runs.

What was really released is counted where noise is drawn; the references are formulas of their own.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate
from scipy.stats import norm
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim import Ledger
from dpoptim.accounting.ledger import BudgetExceeded
from dpoptim.audit.refunds import audit_refunds
from dpoptim.errors import LedgerError, PrivacyError
from dpoptim.gate import FilteredGate, Gate, planned
from dpoptim.noise.stream import KeyStream
from dpoptim.plan import Plan
from dpoptim.solvers import Budget as SolverBudget
from dpoptim.solvers import LinearModel, LinearProblem, Objective, adaptive_gd
from forked import needs_fork

ANNOUNCED = 20  # parts of a run for which the ledger is told ahead


def gaussian_delta(mu: float, epsilon: float | np.ndarray) -> float | np.ndarray:
    """delta of N(0, 1) against N(mu, 1) at epsilon (Balle and Wang 2018)."""
    tail = norm.logcdf(-mu / 2 - epsilon / mu)
    return norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon + tail)


def steps_of(noise: float, steps: int) -> Plan:
    """A run in which every record takes part in every step."""
    return dpoptim.DPSGD(clip_norm=1.0).plan(
        n=10, batch_size=10, steps=steps, noise_multiplier=noise, delta=1e-5
    )


def gate_of(plan: Plan, ledger: Ledger, **resume: Any) -> Gate:
    return Gate(
        event=plan.event,
        neighboring=plan.neighboring,
        query=plan.query,
        releases=plan.steps,
        ledger=ledger,
        noise=KeyStream.from_seed(0, "test"),
        label="x",
        part_of=plan.event_of_part,
        **resume,
    )


class Adversary:
    """Holds gates of one ledger, and does with them what it is told; `draws` counts noise that was
    drawn, by reservation.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.draws: Counter[str] = Counter()
        self.held: list[tuple[Plan, Gate]] = []
        self.interrupts = False
        self._at: Gate | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        def draw(stream: KeyStream, total: torch.Tensor, deviation: float) -> None:
            assert self._at is not None
            assert self._at.reservation is not None
            self.draws[self._at.reservation.id] += 1
            if self.interrupts:
                raise KeyboardInterrupt

        with patch.object(planned, "add_normal", draw):
            yield

    def act(self, what: str, which: int, plan: Plan) -> None:
        if what == "begin":
            self.held.append((plan, gate_of(plan, self.ledger)))
        elif self.held:
            plan, held = self.held[which % len(self.held)]
            getattr(self, what)(plan, held)

    def look(self, plan: Plan, held: Gate) -> None:
        self._at = held
        held.release_sum([torch.zeros(1, dtype=torch.float64)])

    def interrupt(self, plan: Plan, held: Gate) -> None:
        self.interrupts = True
        try:
            self.look(plan, held)
        finally:
            self.interrupts = False

    def kill(self, plan: Plan, held: Gate) -> None:
        """Take the run up from a checkpoint, after something more was released; keep the old one
        too.
        """
        state, digest = held.secret_state(), f"{len(self.held):064d}"
        held.note_checkpoint(digest)
        try:
            self.look(plan, held)
        finally:
            again = gate_of(plan, self.ledger, resume=state, checkpoint=digest)
            self.held.append((plan, again))

    def end(self, plan: Plan, held: Gate) -> None:
        held.give_back()


acts = st.tuples(
    st.sampled_from(["begin", "look", "look", "look", "interrupt", "kill", "end"]),
    st.integers(0, 7),
    st.sampled_from([(6.0, 4), (9.0, 12), (20.0, 60), (4.0, 2)]),
)


@settings(max_examples=25)
@given(
    budget=st.sampled_from([(1.0, 1e-5), (3.0, 1e-5)]),
    script=st.lists(acts, min_size=10, max_size=40),
)
def test_hostile_stopping_stays_within_the_budget(
    budget: tuple[float, float], script: list[tuple[str, int, tuple[float, int]]]
) -> None:
    """Whatever is begun, interrupted, killed, taken up and ended, by whoever still holds a run, in
    whatever order: all noise drawn is within (epsilon, delta).
    """
    ledger = Ledger(epsilon=budget[0], delta=budget[1])
    adversary = Adversary(ledger)
    with adversary.watching():
        for what, which, shape in [*script, *[("end", i, (1.0, 1)) for i in range(20)]]:
            try:
                adversary.act(what, which, steps_of(*shape))
            except (LedgerError, PrivacyError, KeyboardInterrupt):
                continue
    entries, total = ledger.entries(), 0.0
    for entry in entries:
        ended = entry.state == "ended"
        assert not ended or adversary.draws[entry.id] <= entry.begun
        # A completed run counts as planned: what parts of it repeat is on the user's word.
        steps = adversary.draws[entry.id] if ended else entry.event.count
        total += steps / entry.event.event.noise_multiplier**2
    if total > 0:
        assert gaussian_delta(math.sqrt(total), budget[0]) <= budget[1]
    if len(entries) > 1:
        assert ledger.budget is not None
        assert ledger.budget.order is not None
        assert ledger.budget.order * total / 2 <= ledger.budget.limit
    ledger.verify()


def test_going_on_or_spending_the_rest_as_outputs_say() -> None:
    """The strategy "after the first step, end the run and spend the rest, or go on, whichever is
    worse for privacy", evaluated exactly.
    """
    epsilon, delta, noise = 2.0, 1e-4, 4.0

    def largest(steps: int) -> float:
        """mu of the largest Gaussian release after so many of two steps, if the run ends there."""
        ledger = Ledger(epsilon=epsilon, delta=delta)
        held = gate_of(steps_of(noise, 2), ledger)
        for _ in range(steps):
            held.release_sum([torch.zeros(1, dtype=torch.float64)])
        held.give_back()
        remaining = ledger.remaining()
        assert ledger.budget is not None
        assert ledger.budget.order is not None
        return math.sqrt(2 * remaining.left / ledger.budget.order)

    after_one, after_two = largest(1), largest(2)
    assert after_one > after_two * 1.05  # something is given back
    first = 1 / noise
    x = np.linspace(-12, 12, 40_001)
    loss = first * x - first**2 / 2
    density = norm.pdf(x - first)
    ended = gaussian_delta(after_one, epsilon - loss)
    gone_on = gaussian_delta(math.hypot(1 / noise, after_two), epsilon - loss)
    assert integrate.simpson(density * np.maximum(ended, gone_on), x=x) <= delta


@pytest.mark.slow
def test_the_attack_certifies_what_the_filter_allows() -> None:
    found = audit_refunds(canaries=400_000)
    assert 0.9 * found.claimed <= found.epsilon <= found.claimed
    assert 0.8 * found.budget <= found.epsilon


# ---- as users see it ----------------------------------------------------------------------------


def train(
    ledger: Ledger | None,
    stop: int,
    plan: Plan | None = None,
    save: Path | None = None,
    **more: Any,
) -> Any:
    """The private training of a small model that is ended after `stop` steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)
    plan = plan or short_plan()
    with dpoptim.attach(plan, model, optimizer, data, ledger=ledger, **more) as private:
        for x, y in private.batches():
            private.backward(torch.nn.functional.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
            if save is not None and private.steps_done == stop - 1:
                private.save(save)
            if private.steps_done == stop:
                private.finish(refund=True)
        with pytest.raises(PrivacyError, match=r"finish\(\) has ended"):
            next(iter(private.batches()))
        with pytest.raises(PrivacyError, match="an ended run cannot go on"):
            private.save("never")
    return private


def short_plan() -> Plan:
    return dpoptim.DPSGD(clip_norm=1.0).plan(
        n=40, batch_size=10, steps=20, noise_multiplier=4.0, delta=1e-5
    )


def test_a_run_that_ends_early_leaves_the_rest_to_the_budget(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path, epsilon=2.0, delta=1e-5)
    private = train(ledger, stop=5)
    assert private.steps_done == 5
    assert private.spent().epsilon == short_plan().guarantee.epsilon  # the run's own: the whole
    assert ledger.spent().epsilon == pytest.approx(short_plan().guarantee.epsilon)
    shorter = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=40, batch_size=10, steps=5, noise_multiplier=4.0, delta=1e-5
    )
    with Ledger(epsilon=2.0, delta=1e-5) as as_planned:
        as_planned.reserve(shorter.event, neighboring=shorter.neighboring, label="x")
        assert ledger.remaining().reserved == pytest.approx(as_planned.remaining().reserved)
    again = Ledger(path)
    assert again.remaining() == ledger.remaining()
    assert again.verify() > 0
    assert "ended after 5 releases" in again.describe()


def test_a_checkpoint_goes_nowhere_once_its_run_was_ended(tmp_path: Path) -> None:
    ledger, saved = Ledger(tmp_path / "l.sqlite", epsilon=2.0, delta=1e-5), tmp_path / "c"
    train(ledger, stop=5, save=saved)
    left = ledger.remaining()
    with pytest.raises(LedgerError, match="was ended for good"):
        train(ledger, stop=9, resume=saved)
    assert ledger.remaining() == left


def test_a_crashed_run_is_ended_from_its_checkpoint(tmp_path: Path) -> None:
    """What it may have released after the checkpoint stays charged."""
    ledger, saved = Ledger(tmp_path / "l.sqlite", epsilon=2.0, delta=1e-5), tmp_path / "c"
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=40, batch_size=10, steps=60, noise_multiplier=8.0, delta=1e-5
    )

    class CrashError(Exception):
        pass

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)
    with (
        pytest.raises(CrashError),
        dpoptim.attach(plan, model, optimizer, data, ledger=ledger) as private,
    ):
        for x, y in private.batches():
            private.backward(torch.nn.functional.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
            if private.steps_done == 10:
                private.save(saved)
            if private.steps_done == 12:
                raise CrashError
    full = ledger.remaining().reserved
    with dpoptim.attach(plan, model, optimizer, data, ledger=ledger, resume=saved) as private:
        assert private.steps_done == 10
        private.finish(refund=True)
    (entry,) = ledger.entries()
    assert entry.state == "ended"
    assert 12 <= entry.begun <= 12 + 60 / ANNOUNCED  # announced ahead counts as released
    assert ledger.remaining().reserved == pytest.approx(full * entry.begun / 60)


def test_a_failure_to_write_leaves_the_whole_run_charged() -> None:
    ledger = Ledger(epsilon=2.0, delta=1e-5)
    held = gate_of(short_plan(), ledger)
    held.release_sum([torch.zeros(1, dtype=torch.float64)])
    whole = ledger.remaining()
    with (
        patch.object(ledger._store, "append", side_effect=LedgerError("disk is full")),
        pytest.raises(LedgerError, match="disk is full"),
    ):
        held.give_back()
    assert ledger.remaining() == whole
    with pytest.raises(PrivacyError):
        held.release_sum([torch.zeros(1, dtype=torch.float64)])
    held.give_back()
    assert ledger.remaining().reserved < whole.reserved, "a second try ends the run"


def released(held: Gate, times: int) -> None:
    for _ in range(times):
        held.release_sum([torch.zeros(1, dtype=torch.float64)])


def ended_from(state: dict[str, Any], ledger: Ledger) -> int:
    """Ends a run that died from its checkpoint: so many releases stay charged."""
    gate_of(steps_of(20.0, 60), ledger, resume=state, checkpoint="0" * 64).give_back()
    (entry,) = ledger.entries()
    return entry.begun + entry.repeated


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_not_tell_the_ledger_how_far_the_run_has_come(tmp_path: Path) -> None:
    """Such as one that saves in the background, while the run goes on."""
    ledger = Ledger(tmp_path / "l.sqlite", epsilon=2.0, delta=1e-5)
    held = gate_of(steps_of(20.0, 60), ledger)
    released(held, 1)
    held.note_checkpoint("0" * 64)
    state = held.secret_state()
    released(held, 1)
    if not (child := os.fork()):
        try:
            held.note_checkpoint("1" * 64)
        except PrivacyError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    released(held, 2)  # and then it dies
    assert ended_from(state, ledger) >= 4


def test_an_interrupted_note_of_a_checkpoint_hides_no_release() -> None:
    """A Ctrl-C when it is on disk already: what had been announced ahead is gone."""
    ledger = Ledger(epsilon=2.0, delta=1e-5)
    held = gate_of(steps_of(20.0, 60), ledger)
    released(held, 1)
    held.note_checkpoint("0" * 64)
    state = held.secret_state()
    released(held, 1)
    note = ledger.note_checkpoint

    def interrupted(*args: Any, **more: Any) -> None:
        note(*args, **more)
        raise KeyboardInterrupt

    with (
        patch.object(ledger, "note_checkpoint", interrupted),
        pytest.raises(KeyboardInterrupt),
    ):
        held.note_checkpoint("1" * 64)
    released(held, 2)  # in the next cell; and then it dies
    assert ended_from(state, ledger) >= 4


@pytest.mark.parametrize("taken_up", [False, True])
def test_no_checkpoint_goes_on_once_its_run_was_finished(tmp_path: Path, taken_up: bool) -> None:
    """That of its last step neither."""
    ledger, saved = Ledger(tmp_path / "l.sqlite", epsilon=2.0, delta=1e-5), tmp_path / "c"
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)
    with dpoptim.attach(short_plan(), model, optimizer, data, ledger=ledger) as private:
        x, y = next(iter(private.batches()))
        private.backward(torch.nn.functional.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
        private.save(saved)
        if not taken_up:
            private.finish()
    again = {"ledger": ledger, "resume": saved}
    if taken_up:
        with dpoptim.attach(short_plan(), model, optimizer, data, **again) as private:
            private.finish()
    with pytest.raises(LedgerError, match="was completed"):
        dpoptim.attach(short_plan(), model, optimizer, data, **again)


def test_a_run_that_released_nothing_costs_nothing() -> None:
    ledger = Ledger(epsilon=2.0, delta=1e-5)
    held = gate_of(short_plan(), ledger)
    held.open()
    held.give_back()
    assert ledger.remaining().left == pytest.approx(ledger.remaining().limit)


def refused() -> dict[str, tuple[Ledger | None, Plan, str]]:
    budget: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-5}
    shape: dict[str, Any] = {"n": 40, "batch_size": 10, "delta": 1e-5}
    ftrl = dpoptim.DPFTRL(clip_norm=1.0).plan(epochs=5, noise_multiplier=4.0, **shape)
    greedy = dpoptim.DPSGD(clip_norm=1.0).plan(steps=20, epsilon=2.0, **shape)
    return {
        "no ledger": (None, short_plan(), "not charged to a ledger with a budget"),
        "no budget": (Ledger(), short_plan(), "not charged to a ledger with a budget"),
        "basic": (Ledger(filter="basic", **budget), short_plan(), "charges whole runs"),
        "one price": (Ledger(neighboring="zero-out", **budget), ftrl, "only the whole run"),
        "by PLD alone": (Ledger(**budget), greedy, "by its own accounting"),
    }


@pytest.mark.parametrize("case", refused())
def test_where_nothing_can_be_given_back_the_run_goes_on(case: str) -> None:
    ledger, plan, why = refused()[case]
    with pytest.raises(PrivacyError, match=why):
        train(ledger, stop=3, plan=plan)


def test_steps_of_dealt_out_batches_that_were_made_twice_keep_the_whole_charge() -> None:
    """A record may be in both, which a part's event of dealt out batches would not see."""
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=40, batch_size=40, steps=8, noise_multiplier=4.0, delta=1e-5
    )
    assert plan.event_of_part(3, 2) == plan.event_of_part(5)
    scheduled = short_plan()
    assert scheduled.event_of_part(20) == scheduled.event
    assert scheduled.event_of_part(15, 5) == scheduled.event


PRICES = st.lists(st.floats(0.05, 0.9), min_size=1, max_size=6)


@settings(max_examples=40)
@given(runs=st.lists(st.tuples(PRICES, st.sampled_from(["finish", "crash"])), max_size=8))
def test_filters_that_stop_early_give_back_no_more_than_is_left(
    runs: list[tuple[list[float], str]],
) -> None:
    """Runs of adaptive prices, some given up half-way: what was drawn stays within the budget by a
    reference of its own, and what was not spent is there for others.
    """
    ledger, drawn, crashed = Ledger(epsilon=2.0, delta=1e-5, neighboring="zero-out"), 0.0, 0.0
    for prices, end in runs:
        before = drawn
        try:
            held = filtered(1.0, ledger)
            for mu in prices:
                held.release_sum(torch.zeros(1, dtype=torch.float64), norm_bound=1.0, mu=mu)
                drawn += mu**2
        except BudgetExceeded:
            break
        except PrivacyError:  # the filter of this run is full
            pass
        if end == "finish":
            held.finish()
            with pytest.raises(PrivacyError):  # ended, or full
                held.release_sum(torch.zeros(1, dtype=torch.float64), norm_bound=1.0, mu=0.99)
        else:
            crashed += 1 - (drawn - before)
    assert gaussian_delta(math.sqrt(drawn), 2.0) <= 1e-5 if drawn else True
    spent = ledger.remaining().reserved / ledger.budget.order * 2  # type: ignore[union-attr,operator]
    assert drawn * (1 - 1e-9) <= spent <= drawn + crashed + 2e-3 * len(runs)


def filtered(mu: float, ledger: Ledger) -> FilteredGate:
    return FilteredGate(
        mu=mu,
        neighboring="zero-out",
        ledger=ledger,
        noise=KeyStream.from_seed(0, "test"),
        label="x",
    )


def test_a_solver_that_stops_early_leaves_the_rest_and_keeps_its_own_guarantee() -> None:
    x = torch.rand(200, 3, dtype=torch.float64) / 2
    objective = Objective(LinearProblem(LinearModel("squared", 3), capacity=200), (x, x[:, 0]))
    ledger = Ledger(epsilon=4.0, delta=1e-5, neighboring="zero-out")
    budget = SolverBudget(delta=1e-5, epsilon=1.0)
    result = adaptive_gd(
        *(objective, None, budget),
        lipschitz=1.0,
        smoothness=1.0,
        last_steps=0,
        ledger=ledger,
        noise_seed=0,
    )
    spent = sum(2 * step.rho for step in result.trace)
    assert spent < 0.9 * budget.gdp**2
    charged = ledger.remaining().reserved / ledger.budget.order * 2  # type: ignore[union-attr,operator]
    assert charged == pytest.approx(spent, rel=1e-6)
    assert ledger.entries()[0].state == "ended"
    assert result.guarantee.epsilon == pytest.approx(1.0, rel=1e-3)


def test_what_adaptive_runs_give_back_leaks_no_more_than_the_filter_allows() -> None:
    found = audit_refunds(canaries=50_000, adaptive=True)
    assert 0.85 * found.claimed <= found.epsilon <= found.claimed


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_adaptive_run_is_ended_by_the_process_that_releases_it(tmp_path: Path) -> None:
    """A forked process may not give back what its parent still spends; once the parent has, every
    process can spend it, once.
    """
    path = tmp_path / "l.sqlite"
    ledger = Ledger(path, epsilon=2.0, delta=1e-5, neighboring="zero-out")
    assert ledger.budget is not None
    assert ledger.budget.order is not None
    most = 2 * ledger.budget.limit / ledger.budget.order  # of all squared prices
    held, price = filtered(math.sqrt(0.9 * most), ledger), math.sqrt(0.1 * most)
    one = torch.zeros(1, dtype=torch.float64)
    held.release_sum(one, norm_bound=1.0, mu=price)
    whole = ledger.remaining()

    def in_a_fork(act: Callable[[], None]) -> bool:
        """Whether it was refused."""
        if not (child := os.fork()):
            try:
                act()
            except (PrivacyError, LedgerError):
                os._exit(7)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    def spend(share: float) -> Callable[[], None]:
        def act() -> None:
            other = filtered(math.sqrt(share * most), Ledger(path))
            other.release_sum(one, norm_bound=1.0, mu=other.filter.mu)
            other.finish()

        return act

    assert in_a_fork(held.finish)
    assert in_a_fork(lambda: held.release_sum(one, norm_bound=1.0, mu=price) and None)
    assert in_a_fork(spend(0.2))  # all but a tenth is held
    assert ledger.remaining() == whole
    held.release_sum(one, norm_bound=1.0, mu=price)  # the parent goes on as if nothing had been
    held.finish()
    assert in_a_fork(spend(0.81))  # two tenths were released
    assert not in_a_fork(spend(0.79))
    assert in_a_fork(spend(0.05))
    assert 0.98 * ledger.remaining().limit <= ledger.remaining().reserved
    assert ledger.remaining().left >= 0
    ledger.verify()
