"""Ctrl-C, SIGTERM and --resume: nothing saved before is lost, one charge, and the end is that of
the whole run.
"""

import errno
import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import dpoptim
from command_work import killed_command
from dpoptim.cli import app
from dpoptim.runs import interrupted
from ranks import run_ranks

OPTIONS = [
    "train",
    "--data",
    "digits",
    "--epochs",
    "6",
    "--no-compare",
    "--batch-size",
    "400",
    "--noise-seed",
    "3",
]


def run(*options: str) -> Any:
    return CliRunner().invoke(app, [*OPTIONS, *options])


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Send this process a signal inside the given step (0: the last), as somebody else would."""
    original = interrupted.SavedRun.after_step

    def at(step: int, number: int = signal.SIGINT, *, times: int = 1) -> None:
        def after_step(self: Any, private: Any, *rest: Any) -> None:
            for _ in range(times if private.steps_done == (step or private.plan.steps) else 0):
                os.kill(os.getpid(), number)
            original(self, private, *rest)

        monkeypatch.setattr(interrupted.SavedRun, "after_step", after_step)

    return at


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_goes_on_upon_its_charge(
    number: int, stop_after: Any, tmp_path: Path
) -> None:
    folder, ledger = tmp_path / "run", tmp_path / "digits.sqlite"
    charged = ["--ledger", str(ledger), "--budget", "2.5,1e-4", "--out", str(folder)]
    stop_after(5, number)
    stopped = run(*charged)
    assert stopped.exit_code == 130
    assert "step 5 of" in stopped.output
    assert "--resume" in stopped.output
    secret = folder / interrupted.SECRET
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert not (folder / "model.pt").exists()

    stop_after(9, number)
    assert run(*charged, "--resume").exit_code == 130
    stop_after(-1)
    done = run(*charged, "--resume")
    assert done.exit_code == 0, done.output
    assert (folder / "model.pt").exists()
    assert not list(folder.glob("*.checkpoint")) + list(folder.glob("progress-*"))
    (entry,) = dpoptim.Ledger(ledger).entries()
    assert entry.state == "committed"


def test_what_the_loop_remembers_comes_back(stop_after: Any, tmp_path: Path) -> None:
    """The averaged model of a run without noise, stopped and resumed, is that of the whole run,
    but for who took part.
    """
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    # all records in every step
    every = ["--noise-multiplier", "0", "--delta", "1e-5", "--batch-size", "1438"]
    assert run(*every, "--out", str(whole)).exit_code == 0
    stop_after(3)
    assert run(*every, "--out", str(parts)).exit_code == 130
    stop_after(-1)
    assert run(*every, "--out", str(parts), "--resume").exit_code == 0
    first, second = (
        torch.load(path / "model.pt", weights_only=True)["state_dict"] for path in (whole, parts)
    )
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-5, atol=1e-6)


def test_an_unfinished_run_saves_by_the_clock(
    monkeypatch: pytest.MonkeyPatch, stop_after: Any, tmp_path: Path
) -> None:
    """A finished one writes its results, though a Ctrl-C arrives meanwhile."""
    saved: list[int] = []
    original = interrupted.SavedRun._save

    def note(self: Any, private: Any, *rest: Any) -> None:
        saved.append(private.steps_done)
        original(self, private, *rest)

    monkeypatch.setattr(interrupted.SavedRun, "_save", note)
    stop_after(0)
    assert run("--out", str(tmp_path / "run"), "--save-every", "0").exit_code == 0
    assert (tmp_path / "run" / "certificate.json").exists()
    assert saved == list(range(len(saved)))


def test_after_two_ctrl_cs_the_last_save_goes_on(stop_after: Any, tmp_path: Path) -> None:
    """At once: the step in hand is not saved, and done again."""
    ledger = tmp_path / "digits.sqlite"
    charged = ["--ledger", str(ledger), "--budget", "2.5,1e-4", "--out", str(tmp_path / "run")]
    stop_after(4, times=2)
    assert run(*charged, "--save-every", "0").exit_code not in (0, 2)
    stop_after(-1)
    done = run(*charged, "--resume")
    assert done.exit_code == 0, done.output
    (entry,) = dpoptim.Ledger(ledger).entries()
    assert (entry.state, entry.resumed) == ("committed", 1)


def test_a_full_disk_stops_a_run_that_goes_on_from_its_last_save(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ledger = tmp_path / "digits.sqlite"
    charged = ["--ledger", str(ledger), "--budget", "2.5,1e-4", "--out", str(tmp_path / "run")]
    original, saves = interrupted.PrivateTraining.save, []

    def full(self: Any, path: Path) -> None:
        saves.append(self.steps_done)
        if len(saves) == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(self, path)

    monkeypatch.setattr(interrupted.PrivateTraining, "save", full)
    stopped = run(*charged, "--save-every", "0")
    assert stopped.exit_code == 2
    assert "--resume" in stopped.output
    done = run(*charged, "--resume")
    assert done.exit_code == 0, done.output
    (entry,) = dpoptim.Ledger(ledger).entries()
    assert (entry.state, entry.resumed) == ("committed", 1)


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    nothing = run("--out", str(tmp_path / "none"), "--resume")
    assert nothing.exit_code == 2
    assert "--resume" in nothing.output


def test_a_second_ctrl_c_stops_at_once() -> None:
    with interrupted.stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_time_that_is_over_ends_the_run_and_returns_its_steps(
    stop_after: Any, tmp_path: Path
) -> None:
    """Of a run, and of one that was stopped: the model is there, the certificate keeps the whole
    plan, the budget counts the steps.
    """
    ledger = tmp_path / "digits.sqlite"
    charged = ["--ledger", str(ledger), "--budget", "8,1e-4"]
    first = run(*charged, "--out", str(tmp_path / "a"), "--max-time", "0")
    assert first.exit_code == 0, first.output
    assert "after 1 of" in first.output
    stop_after(5)
    assert run(*charged, "--out", str(tmp_path / "b")).exit_code == 130
    again = run(*charged, "--out", str(tmp_path / "b"), "--resume", "--max-time", "0")
    assert again.exit_code == 0, again.output
    assert "after 5 of" in again.output
    entries = dpoptim.Ledger(ledger).entries()
    assert [entry.state for entry in entries] == ["ended", "ended"]
    assert [entry.begun for entry in entries] == [1, 5]
    for name in ("a", "b"):
        checked = CliRunner().invoke(app, ["verify", str(tmp_path / name)])
        assert checked.exit_code == 0, checked.output
        assert not list((tmp_path / name).glob("*.checkpoint"))
    assert run(*charged, "--out", str(tmp_path / "b"), "--resume").exit_code != 0


def test_an_iterate_by_chance_and_a_ball_come_back(stop_after: Any, tmp_path: Path) -> None:
    """To the last bit, in a run with a seed."""
    options = ["--iterate", "random", "--projection", "0.2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(*options, "--out", str(whole)).exit_code == 0
    stop_after(3)
    assert run(*options, "--out", str(parts)).exit_code == 130
    stop_after(-1)
    assert run(*options, "--out", str(parts), "--resume").exit_code == 0
    first, second = (
        torch.load(path / "model.pt", weights_only=True)["state_dict"] for path in (whole, parts)
    )
    assert all(torch.equal(second[name], value) for name, value in first.items())
    assert "one that a step left, by chance" in (whole / "certificate.json").read_text()


@pytest.mark.set_aside("the first file-0-1")
@pytest.mark.parametrize(
    ("moment", "charged", "kills"),
    [("the first file", 0, 1), ("the charge", 1, 2), ("the first noisy sum", 1, 1)],
)
def test_killed_at_once_a_run_goes_on_upon_its_charge(
    moment: str, charged: int, kills: int, tmp_path: Path
) -> None:
    """By kill -9, before any save by the clock; killed there once more, it still has one charge."""
    ledger = tmp_path / "digits.sqlite"
    words = ["--ledger", str(ledger), "--budget", "2.5,1e-4", "--out", str(tmp_path / "run")]
    for number in range(kills):
        options = [*words, "--resume"] if number else words
        assert run_ranks(1, killed_command, moment, [*OPTIONS, *options], group=False) == ["died"]
        before = dpoptim.Ledger(ledger).entries()
        assert [entry.state for entry in before] == ["open"] * charged
        assert_an_officer_is_told(tmp_path / "run", ledger, before)
    done = run(*words, "--resume")
    assert done.exit_code == 0, done.output
    (entry,) = dpoptim.Ledger(ledger).entries()
    assert {each.id for each in before} <= {entry.id}
    assert (entry.state, entry.resumed) == ("committed", kills * charged)
    assert (tmp_path / "run" / "model.pt").exists()


def assert_an_officer_is_told(folder: Path, ledger: Path, charges: list[Any]) -> None:
    """Verify said "plan.json is missing", of the very folder that `dpoptim train` wrote."""
    told = CliRunner(env={"COLUMNS": "400"}).invoke(
        app, ["verify", str(folder), "--ledger", str(ledger)]
    )
    assert told.exit_code == 2
    assert "interrupted, or still running" in told.output
    assert "--resume goes on" in told.output
    for charge in charges:
        assert f"an open charge of it: {charge.id}" in told.output
    assert charges or "no open charge of it" in told.output


def test_a_run_that_died_before_its_results_were_written_has_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All its steps are made and charged: nothing is left to do but to say so."""
    folder, ledger = tmp_path / "run", tmp_path / "digits.sqlite"
    words = ["--ledger", str(ledger), "--budget", "2.5,1e-4", "--out", str(folder)]

    def dies(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr("dpoptim.runs.command.write_run", dies)
        assert run(*words).exit_code != 0
    model = torch.load(folder / "model.pt", weights_only=True)["state_dict"]
    done = run(*words, "--resume")
    assert done.exit_code == 0, done.output
    again = torch.load(folder / "model.pt", weights_only=True)["state_dict"]
    assert all(torch.equal(again[name], value) for name, value in model.items())
    (entry,) = dpoptim.Ledger(ledger).entries()
    assert (entry.state, entry.resumed) == ("committed", 0)
    assert entry.id in (folder / "certificate.json").read_text()
    assert not list(folder.glob("*.checkpoint"))


def test_a_run_that_fails_before_its_charge_leaves_no_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room for the batch")

    ledger, folder = tmp_path / "digits.sqlite", tmp_path / "run"
    with monkeypatch.context() as broken:
        broken.setattr(dpoptim.PrivateTraining, "backward", fail)
        assert run("--ledger", str(ledger), "--out", str(folder)).exit_code != 0
    assert not dpoptim.Ledger(ledger).entries()
    assert not list(folder.iterdir())
    assert run("--ledger", str(ledger), "--out", str(folder)).exit_code == 0


def test_a_checkpoint_from_before_the_charge_is_no_second_run(tmp_path: Path) -> None:
    """Of two that take it up, one is charged; the file is void when the run is complete."""
    torch.manual_seed(0)
    ledger = dpoptim.Ledger(tmp_path / "ledger.sqlite")
    data = torch.utils.data.TensorDataset(torch.randn(40, 3))
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=40, batch_size=10, steps=2, noise_multiplier=2.0, delta=1e-3
    )

    def attached(resume: Path | None = None) -> Any:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = dpoptim.attach(plan, model, optimizer, data, ledger=ledger, resume=resume)
        return private, model, optimizer

    def trained(private: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with private:
            for (x,) in private.batches():
                private.backward(model(x)[:, 0])
                optimizer.step()

    path = tmp_path / "run.checkpoint"
    private, *_ = attached()
    with private:
        private.save(path)
    assert not ledger.entries()
    first, second = attached(path), attached(path)
    trained(*first)
    with pytest.raises(dpoptim.LedgerError, match="charged already"):
        trained(*second)
    with pytest.raises(dpoptim.LedgerError, match="completed"):
        attached(path)
    (entry,) = ledger.entries()
    assert entry.state == "committed"


def test_a_run_that_is_to_be_charged_on_disk_does_not_go_on_in_memory(tmp_path: Path) -> None:
    words = ["--ledger", str(tmp_path / "digits.sqlite"), "--out", str(tmp_path / "run")]
    killed = run_ranks(1, killed_command, "the first file", [*OPTIONS, *words], group=False)
    assert killed == ["died"]
    refused = run("--out", str(tmp_path / "run"), "--resume")
    assert refused.exit_code == 2
    assert "a ledger on disk" in refused.output
    assert (tmp_path / "run" / interrupted.SECRET).exists()
