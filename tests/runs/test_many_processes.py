"""``dpoptim train`` in many processes: one run directory, one charge, the model of one process;
and on in any number.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dpoptim
from command_work import command, ledgers_read
from ranks import run_ranks

TRAIN = ["train", "--data", "digits", "--no-compare", "--noise-seed", "3"]


def finished(
    folder: Path, ranks: int, *options: str, stop_at: Path | None = None
) -> tuple[int, str, str]:
    """The highest exit code, and what all ranks said."""
    given = (str(folder), [*TRAIN, *options], stop_at and str(stop_at))
    codes, said, errors = zip(*run_ranks(ranks, command, *given), strict=True)
    return max(codes), "".join(said), "".join(errors)


def by_torchrun(folder: Path, ranks: int, *options: str) -> tuple[int, str, str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    source = str(Path(dpoptim.__file__).parents[1])
    ran = subprocess.run(
        [sys.executable, *launcher, "-m", "dpoptim", *TRAIN, *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    return ran.returncode, ran.stdout, ran.stderr


def weights(folder: Path) -> torch.Tensor:
    saved: Any = torch.load(folder / "model.pt", weights_only=True)
    return torch.cat([t.double().flatten() for t in saved["state_dict"].values()])


@pytest.mark.set_aside("momentum-gd")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["dp-sgd", "momentum-gd"])
def test_two_processes_make_the_run_of_one(method: str, tmp_path: Path) -> None:
    """The same certificate but for the time, the model to rounding (DP-SGD without noise, since
    ranks draw their own), one charge.
    """
    steps = ["--epochs", "1", "--noise-multiplier", "0"] if method == "dp-sgd" else []
    certificates = []
    for ranks in (1, 2):
        out = ["--out", f"run{ranks}", "--ledger", f"{ranks}.sqlite", "--method", method, *steps]
        code, said, errors = finished(tmp_path, ranks, *out)
        assert code == 0, errors
        assert said.count("certificate.json") == 1  # rank 0 alone reports
        folder = tmp_path / f"run{ranks}"
        assert {path.name for path in folder.iterdir()} == {
            "model.pt",
            "plan.json",
            "certificate.json",
            "report.html",
        }
        certificates.append(json.loads((folder / "certificate.json").read_text()))
        with dpoptim.Ledger(tmp_path / f"{ranks}.sqlite") as ledger:
            states = [entry.state for entry in ledger.entries()]
            assert states == ([] if method == "dp-sgd" else ["committed"])
    one, two = certificates
    assert two["guarantee"] == one["guarantee"]
    torch.testing.assert_close(
        weights(tmp_path / "run2"), weights(tmp_path / "run1"), rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow
def test_rank_0_alone_reads_the_ledger_whose_relation_all_take(tmp_path: Path) -> None:
    with dpoptim.Ledger(tmp_path / "l.sqlite", dataset="digits", neighboring="zero-out"):
        pass
    steps = ["--epochs", "1", "--noise-multiplier", "0"]
    given = [*TRAIN, "--out", "run", "--ledger", "l.sqlite", *steps]
    assert run_ranks(2, ledgers_read, str(tmp_path), given) == [(0, 1), (0, 0)]
    assert '"zero-out"' in (tmp_path / "run" / "plan.json").read_text()  # not the default here


@pytest.mark.variants
@pytest.mark.slow
def test_a_run_stopped_in_two_processes_goes_on_in_three(tmp_path: Path) -> None:
    options = ["--out", "run", "--ledger", "l.sqlite", "--budget", "2.5,1e-4", "--epochs", "20"]
    checkpoint = tmp_path / "run" / "private.checkpoint"
    finished(tmp_path, 2, *options, "--save-every", "0", stop_at=checkpoint)
    assert checkpoint.exists()
    code, said, errors = finished(tmp_path, 3, *options, "--resume")
    assert code == 0, errors
    assert "guarantee" in said
    assert not checkpoint.exists()
    with dpoptim.Ledger(tmp_path / "l.sqlite") as ledger:
        (entry,) = ledger.entries()
        assert entry.state == "committed"
        assert entry.resumed == 1


@pytest.mark.slow
@pytest.mark.parametrize("by", [finished, pytest.param(by_torchrun, marks=pytest.mark.variants)])
def test_what_rank_0_refuses_ends_all(
    by: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").touch()
    code, said, errors = by(tmp_path, 2, "--out", "run")
    assert code != 0
    assert "--out run is not empty" in errors
    assert "rank 0 failed in dpoptim train" in errors
    assert "guarantee" not in said
