"""What the certificate of a whole-run solver says is true of it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_work import run
from dpoptim import Ledger
from dpoptim.methods import DPSGD, WholeRun
from dpoptim.runs.choose_method import with_method
from dpoptim.runs.inputs import load_data
from dpoptim.runs.options import TrainRequest


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


@pytest.mark.set_aside("momentum-gd")
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


def customers(path: Path) -> list[str]:
    """A table whose target takes up a hundredth of its public range."""
    draws = np.random.default_rng(0)
    age, visits = draws.uniform(18, 90, 5_000), draws.poisson(4, 5_000)
    spend = np.exp(3.9 + 0.01 * age + 0.12 * visits + 0.3 * draws.normal(size=5_000))
    lines = [f"{a:.0f},{v},{s:.2f}" for a, v, s in zip(age, visits, spend, strict=True)]
    (path / "t.csv").write_text("\n".join(["age,visits,spend", *lines]) + "\n")
    (path / "t.toml").write_text(
        '[columns.age]\nkind = "number"\nbounds = [18, 100]\n'
        '[columns.visits]\nkind = "number"\nbounds = [0, 20]\n'
        '[columns.spend]\nkind = "target"\nbounds = [0, 20000]\n'
    )
    return ["--data", str(path / "t.csv"), "--schema", str(path / "t.toml"), "--noise-seed", "0"]


def test_a_number_that_takes_up_little_of_its_range_is_predicted(tmp_path: Path) -> None:
    """R2 was -0.3, and that of the mean is 0: noise was as large as the public range."""
    given = [*customers(tmp_path), "--data-is-public", "--no-compare", "--epsilon", "1"]
    ledger, out = tmp_path / "l.sqlite", tmp_path / "run"
    run("train", *given, "--ledger", ledger, "--out", out)
    promised = json.loads((out / "certificate.json").read_text())
    assert promised["scores"]["private"][-1] > 0.3
    plan = json.loads((out / "plan.json").read_text())
    assert plan["method"]["options"] == {"find_range": True}
    (entry,) = Ledger(ledger).entries()  # one charge, of the plan
    assert entry.label.startswith("training of ")
    assert "range of targets" in entry.label
    with Ledger(ledger) as charged:
        assert charged.spent(1e-5).epsilon == pytest.approx(plan["guarantee"]["epsilon"], rel=1e-6)
    run("verify", out, "--ledger", ledger)


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ({}, "sufficient-statistics"),
        ({"epsilon": 0.1}, "momentum-gd"),
        ({"n": 5000}, "dp-sgd"),  # the relation hides the number of records
        ({"batch_size": 500}, "dp-sgd"),
        ({"model": "mlp"}, "dp-sgd"),
        ({"single_pass": True}, "accelerated-srgd"),
        ({"method": "noisy-gd"}, "noisy-gd"),
    ],
)
def test_the_method_by_default_is_told_by_public_numbers(
    given: dict[str, Any], method: str, tmp_path: Path
) -> None:
    _, data, _, schema, *_ = customers(tmp_path)
    options = TrainRequest(data=data, schema=Path(schema), **given)
    chosen = with_method(
        options, load_data(options), None, epsilon=options.epsilon or 2.0, delta=1e-5
    )
    assert chosen.method == method
