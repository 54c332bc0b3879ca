"""What the certificate of a whole-run solver says is true of it."""

import json
from pathlib import Path

import pytest

from command_work import run
from dpoptim import Ledger
from dpoptim.methods import DPSGD, WholeRun


def test_n_is_the_number_of_records_that_are_divided_by(tmp_path: Path) -> None:
    """--n 100000 on 800 rows promised the noise of 100,000 and added that of 800."""
    table = tmp_path / "table.csv"
    table.write_text("a,b,y\n" + "".join(f"{i % 7 / 7},{i % 5 / 5},{i % 2}\n" for i in range(80)))
    settings = [
        "--data",
        str(table),
        "--target",
        "y",
        "--classes",
        "0,1",
        "--epsilon",
        "1",
        "--delta",
        "1e-5",
    ]
    said = run(
        "train",
        *settings,
        "--method",
        "noisy-gd",
        "--n",
        "1000",
        "--out",
        str(tmp_path / "run"),
        code=2,
    )
    assert "--n 1000 is not the number of records" in said
    assert not (tmp_path / "run" / "certificate.json").exists()
    relation = ["--neighboring", "zero-out", "--batch-size", "20", "--epochs", "1"]
    said = run("train", *settings, *relation, "--n", "1000", "--out", str(tmp_path / "run"), code=2)
    assert "--n 1000 is not the number of records" in said
    assert "guarantee" not in said  # nothing was planned for them


def test_a_solver_that_releases_many_sums_does_not_promise_one(tmp_path: Path) -> None:
    settings = ["--data", "digits", "--method", "noisy-gd", "--epsilon", "4", "--no-compare"]
    run("train", *settings, "--out", str(tmp_path))
    enforced = json.loads((tmp_path / "certificate.json").read_text())["basis"]["enforced"]
    assert not any("at most 1 noisy" in text for text in enforced)
    assert any("for as long as the one budget pays" in text for text in enforced)
    plan = WholeRun("noisy-gd", 1.0).plan(n=80, epsilon=1.0, delta=1e-5)
    assert "at most" not in plan.describe().replace("adds at most", "")
    assert (
        "at most 3 noisy sums"
        in DPSGD(1.0).plan(n=9, batch_size=3, steps=3, epsilon=1.0, delta=1e-5).describe()
    )


@pytest.mark.parametrize(
    "method",
    [
        "momentum-gd",
        "accelerated-srgd",
        "dp-sgd",
        pytest.param("noisy-gd", marks=pytest.mark.variants),
    ],
)
def test_the_ledger_names_data_set_and_model(method: str, tmp_path: Path) -> None:
    """Of a solver, too, which had been "estimator" there; and the certificate knows of the file."""
    path = tmp_path / "digits.sqlite"
    run(
        "train",
        *("--data", "digits", "--method", method, "--ledger", str(path), "--no-compare"),
        *("--out", str(tmp_path / "run")),
    )
    (entry,) = Ledger(path).entries()
    assert (
        entry.label == f"training of softmax on digits{'' if method == 'dp-sgd' else ', ' + method}"
    )
    basis = json.loads((tmp_path / "run" / "certificate.json").read_text())["basis"]
    assert any("charged to a ledger on disk" in text for text in basis["enforced"])
    assert not any("the ledger was in memory" in text for text in basis["trusted"])
