"""The gate: charge first, then noise, as often as planned and no more."""

import math
from pathlib import Path

import dp_accounting
import pytest
import torch

import dpoptim
from dpoptim.accounting.ledger import Ledger
from dpoptim.errors import LedgerError, PrivacyError
from dpoptim.gate import FilteredGate, Gate, GaussianSum, SelectionGate, charged_together
from dpoptim.gate import planned as gate_module
from dpoptim.noise.stream import KeyStream


def make(
    ledger: Ledger | None,
    *,
    noise_multiplier: float = 2.0,
    releases: int = 3,
    norm_bound: float = 1.5,
) -> Gate:
    return Gate(
        event=dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(2.0), releases),
        neighboring="add-or-remove-one",
        query=GaussianSum(norm_bound, noise_multiplier),
        releases=releases,
        ledger=ledger,
        noise=KeyStream.from_seed(0, "test of the gate"),
        label="test",
    )


def test_noise_has_the_planned_standard_deviation_in_every_tensor() -> None:
    with Ledger() as ledger:
        first, second = make(ledger).release_sum(
            [torch.zeros(300, 500).double(), torch.zeros(150_000).double()]
        )
    for released in (first, second):
        deviation = (released / 3.0).square().sum() - released.numel()
        assert abs(float(deviation)) < 5 * math.sqrt(2 * released.numel())
    correlation = float((first.flatten() * second).mean()) / 9
    assert abs(correlation) < 5 / math.sqrt(150_000)


def test_noise_is_fresh_in_every_release() -> None:
    with Ledger() as ledger:
        gate = make(ledger)
        a, b = (gate.release_sum([torch.zeros(100_000).double()])[0] for _ in range(2))
    assert abs(float((a * b).mean()) / 9) < 5 / math.sqrt(100_000)


def test_the_sum_itself_is_in_what_is_released() -> None:
    with Ledger() as ledger:
        total = torch.full((10_000,), 50.0).double()
        (released,) = make(ledger).release_sum([total.clone()])
    assert abs(float(released.mean()) - 50) < 5 * 3 / 100


def test_the_charge_comes_before_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    with Ledger() as ledger:
        reserve, add_normal = ledger.reserve, gate_module.add_normal
        monkeypatch.setattr(
            ledger, "reserve", lambda *a, **k: (order.append("charge"), reserve(*a, **k))[1]
        )
        monkeypatch.setattr(
            gate_module, "add_normal", lambda *a: (order.append("noise"), add_normal(*a))[1]
        )
        gate = make(ledger)
        assert order == []
        gate.release_sum([torch.zeros(3).double()])
        gate.release_sum([torch.zeros(3).double()])
    assert order == ["charge", "noise", "noise"]


def test_a_charge_that_fails_releases_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger() as ledger:
        gate = make(ledger)

        def fail(*args: object, **options: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(ledger, "reserve", fail)
        total = torch.ones(3).double()
        with pytest.raises(OSError, match="disk full"):
            gate.release_sum([total])
        assert gate.released == 0
        assert torch.equal(total, torch.ones(3).double())
        monkeypatch.undo()
        gate.release_sum([total])
        assert len(ledger.entries()) == 1


def test_no_more_releases_than_were_paid_for() -> None:
    with Ledger() as ledger:
        gate = make(ledger, releases=2)
        for _ in range(2):
            gate.release_sum([torch.zeros(3).double()])
        total = torch.ones(3).double()
        with pytest.raises(dpoptim.PrivacyError, match="all 2 planned"):
            gate.release_sum([total])
        assert torch.equal(total, torch.ones(3).double())


def test_a_run_over_budget_is_refused_before_it_starts() -> None:
    with Ledger(epsilon=0.01, delta=1e-5) as ledger:
        with pytest.raises(dpoptim.BudgetExceeded, match=r"0\.01"):
            make(ledger)
        assert ledger.entries() == []


def test_two_runs_that_both_looked_affordable() -> None:
    """The check at the start is a courtesy; the reservation decides."""
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(2.0), 3)
    epsilon = dpoptim.accounting.compute_epsilon(event, 1e-5, "add-or-remove-one").epsilon
    with Ledger(epsilon=epsilon * 1.05, delta=1e-5) as ledger:
        first, second = make(ledger), make(ledger)
        first.release_sum([torch.zeros(3).double()])
        total = torch.ones(3).double()
        with pytest.raises(dpoptim.BudgetExceeded):
            second.release_sum([total])
        assert torch.equal(total, torch.ones(3).double())
        assert second.released == 0


def test_finishing_commits_and_nothing_less() -> None:
    with Ledger() as ledger:
        gate = make(ledger)
        gate.finish()
        assert ledger.entries() == []
        gate.release_sum([torch.zeros(3).double()])
        assert ledger.entries()[0].state == "open"
        gate.finish()
        assert ledger.entries()[0].state == "committed"


def test_only_a_run_without_noise_goes_without_a_ledger() -> None:
    with pytest.raises(ValueError, match="ledger is missing"):
        make(None)
    total = torch.ones(3).double()
    assert torch.equal(make(None, noise_multiplier=0.0).release_sum([total])[0], total)


def test_a_commit_that_fails_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger() as ledger:
        gate = make(ledger)
        gate.release_sum([torch.zeros(3).double()])

        def fail(*args: object) -> None:
            raise dpoptim.LedgerError("gone")

        monkeypatch.setattr(ledger, "commit", fail)
        with pytest.warns(RuntimeWarning, match="the run is charged"):
            gate.finish()


def test_a_ledger_that_vanished_is_not_said_to_hold_the_charge(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    gate = make(Ledger(path), releases=40)
    gate.release_sum([torch.zeros(3).double()])
    path.unlink()
    with pytest.warns(
        RuntimeWarning, match="does not show this run's charge any more.*put the ledger back"
    ):
        gate.finish()
    gate.release_sum([torch.zeros(3).double()])  # announced already
    with pytest.raises(dpoptim.LedgerError):
        gate.release_sum([torch.zeros(3).double()])


def test_the_last_planned_release_completes_the_run() -> None:
    with Ledger() as ledger:
        gate = make(ledger, releases=3)
        for state in ("open", "open", "committed"):
            gate.release_sum([torch.zeros(3).double()])
            assert ledger.entries()[0].state == state


def test_the_ledger_never_knows_of_fewer_releases_than_were_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Ledger() as ledger:
        gate, began = make(ledger, releases=101), 0

        def look(*_: object) -> None:
            assert ledger.entries()[0].begun > began

        monkeypatch.setattr(gate_module, "add_normal", look)
        for _ in range(101):
            gate.release_sum([torch.zeros(3).double()])
            began += 1
        assert ledger.digest


@pytest.mark.parametrize("kind", ["planned", "filtered", "selection"])
def test_a_forked_process_releases_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger() as ledger:
        common = {
            "neighboring": "add-or-remove-one",
            "ledger": ledger,
            "noise": KeyStream(),
            "label": "test",
        }
        gate = make(ledger)
        filtered, selection = FilteredGate(mu=1.0, **common), SelectionGate(epsilon=1.0, **common)
        monkeypatch.setattr(gate_module.os, "getpid", lambda: -1)
        with pytest.raises(PrivacyError, match="forked"):
            if kind == "planned":
                gate.release_sum([torch.zeros(3).double()])
            elif kind == "filtered":
                filtered.release_sum(torch.zeros(3).double(), norm_bound=1.0, mu=0.5)
            else:
                selection.select([0.0, 1.0])
        monkeypatch.undo()
        assert not ledger.entries()


PARTS = [dp_accounting.GaussianDpEvent(4.0), dp_accounting.GaussianDpEvent(3.0)]


def release(ledger: Ledger, mu: float) -> None:
    gate = FilteredGate(
        mu=mu,
        neighboring="zero-out",
        ledger=ledger,
        noise=KeyStream.from_seed(0, "test"),
        label="part",
    )
    gate.release_sum(torch.zeros(1).double(), norm_bound=1.0, mu=mu)


def test_parts_of_a_run_are_charged_as_one_before_the_first() -> None:
    with Ledger(neighboring="zero-out", epsilon=2.0, delta=1e-5) as ledger:
        paying = charged_together(ledger, PARTS, neighboring="zero-out", label="whole")
        with paying as inner:
            assert not ledger.entries()
            for part in PARTS[::-1]:
                release(inner, 1 / part.noise_multiplier)
                assert len(ledger.entries()) == 1
        (charged,) = ledger.entries()
        assert charged.event == dp_accounting.ComposedDpEvent(PARTS)
        assert charged.state == "committed"


@pytest.mark.parametrize("mu", [1 / 4, 1 / 2])
def test_nothing_but_the_parts_is_released_and_each_of_them_once(mu: float) -> None:
    with Ledger(neighboring="zero-out") as ledger:
        paying = charged_together(ledger, PARTS, neighboring="zero-out", label="whole")
        with paying as inner, pytest.raises(LedgerError, match="something else than what was"):
            for _ in range(2):
                release(inner, mu)
        assert len(ledger.entries()) == (mu == 1 / 4)


def test_parts_of_which_a_ledger_refuses_the_whole_are_not_begun() -> None:
    with Ledger(neighboring="zero-out", epsilon=1.0, delta=1e-5) as ledger:
        paying = charged_together(ledger, PARTS, neighboring="zero-out", label="whole")
        with pytest.raises(dpoptim.BudgetExceeded), paying:
            raise AssertionError("begun")
        assert not ledger.entries()


def test_who_leaves_early_has_paid_for_all_parts() -> None:
    with Ledger(neighboring="zero-out") as ledger:
        paying = charged_together(ledger, PARTS, neighboring="zero-out", label="whole")
        with pytest.raises(KeyboardInterrupt), paying as inner:
            release(inner, 1 / 4)
            raise KeyboardInterrupt
        assert ledger.entries()[0].event == dp_accounting.ComposedDpEvent(PARTS)
