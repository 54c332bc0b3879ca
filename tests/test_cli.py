"""The command line as a user meets it: results, refusals, and nothing lost."""

import errno
import html.parser
import json
import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent

import dpoptim
from command_work import run
from dpoptim.accounting.guarantee import rounded_up
from dpoptim.accounting.ledger import Ledger
from dpoptim.methods import DPSGD
from dpoptim.registry import BUILT_IN, entry
from dpoptim.reproduce import dice_bias
from dpoptim.reproduce.dice_bias import bias_of_clipping
from dpoptim.runs.command import no_room

FAST = ["--epochs", "2", "--batch-size", "256"]


def table(path: Path, rows: int = 60) -> Path:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3))
    lines = [f"{a},{b},{c},{'yes' if a > 0 else 'no'}" for a, b, c in x]
    path.write_text("\n".join(["a,b,c,outcome", *lines]) + "\n")
    return path


def test_account() -> None:
    text = run(
        "account",
        "--n",
        "60000",
        "--batch-size",
        "500",
        "--noise-multiplier",
        "1.1",
        "--steps",
        "6000",
    )
    assert "3.17" in text
    figures = json.loads(
        run(
            *(
                "account",
                "--n",
                "60000",
                "--batch-size",
                "500",
                "--noise-multiplier",
                "1.1",
                "--steps",
                "6000",
            ),
            *("--delta", "1e-5", "--delta", "1e-6", "--epsilon", "3", "--json"),
        )
    )
    assert len(figures) == 3
    assert figures[0]["epsilon"] == pytest.approx(3.171, rel=0.005)
    assert figures[1]["epsilon"] > figures[0]["epsilon"]
    assert figures[2]["epsilon"] == 3
    assert 1e-6 < figures[2]["delta"] < 1e-4


def test_calibrate() -> None:
    arguments = [
        "--n",
        "60000",
        "--batch-size",
        "500",
        "--steps",
        "6000",
        "--epsilon",
        "2",
        "--delta",
        "1e-5",
    ]
    figures = json.loads(run("calibrate", *arguments, "--json"))
    assert figures["noise_multiplier"] == pytest.approx(1.477, rel=0.01)
    assert 1.98 <= figures["epsilon"] <= 2
    assert "noise multiplier" in run("calibrate", *arguments)


@pytest.mark.parametrize("command", [[], ["account"], ["calibrate"], ["train"], ["reproduce"]])
def test_help_is_worth_reading(command: list[str]) -> None:
    text = run(*command, "--help")
    assert "Example" in text or "differential privacy" in text


def test_train_writes_a_run_directory(tmp_path: Path) -> None:
    out = tmp_path / "run"
    text = run("train", "--data", "digits", "--epsilon", "2", "--out", str(out), "--compare", *FAST)
    assert "epsilon=2.00 at delta=1e-05" in text
    assert "accuracy, private" in text
    assert "accuracy, not private" in text
    saved = torch.load(out / "model.pt", weights_only=True)
    assert saved["model"] == "softmax"
    assert len(saved["class_names"]) == 10
    plan = dpoptim.Plan.from_json((out / "plan.json").read_text())
    certificate = json.loads((out / "certificate.json").read_text())
    assert certificate["guarantee"]["epsilon"] == plan.guarantee.epsilon <= 2
    html.parser.HTMLParser().feed((out / "report.html").read_text())


def test_private_tables_show_no_scores(tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = [
        "--data",
        str(table(tmp_path / "t.csv")),
        "--target",
        "outcome",
        "--delta",
        "1e-4",
        "--out",
        str(out),
    ]
    assert "--classes is missing" in run("train", *arguments, code=2)
    arguments += ["--classes", "no,yes"]
    text = run("train", *arguments, "--epochs", "2")
    assert "accuracy" not in text
    assert "zero-out" in text
    assert "ccuracy" not in (out / "report.html").read_text()
    certificate = json.loads((out / "certificate.json").read_text())
    assert certificate["scores"] is None
    assert certificate["training"]["seconds"] is None
    refused = run("train", *arguments, "--compare", code=2)
    assert "--data-is-public" in refused


def test_public_tables_show_scores(tmp_path: Path) -> None:
    text = run(
        *(
            "train",
            "--data",
            str(table(tmp_path / "t.csv")),
            "--target",
            "outcome",
            "--classes",
            "no,yes",
        ),
        *(
            "--n",
            "48",
            "--data-is-public",
            "--delta",
            "1e-4",
            "--epochs",
            "2",
            "--out",
            str(tmp_path / "run"),
        ),
    )
    assert "accuracy, private" in text
    assert "add-or-remove-one" in text


def test_a_doubt_is_told_once(tmp_path: Path) -> None:
    given = ["--data", "digits", "--delta", "1e-3", "--epochs", "1", "--no-compare"]
    assert run("train", *given, "--out", str(tmp_path / "run")).count("is above 1/(10 n)") == 1


def test_a_seeded_run_is_marked(tmp_path: Path) -> None:
    models = []
    for name in ("a", "b"):
        text = run(
            "train", "--noise-seed", "1", "--out", str(tmp_path / name), "--no-compare", *FAST
        )
        assert "not for release" in text
        models.append(torch.load(tmp_path / name / "model.pt", weights_only=True)["state_dict"])
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])
    assert "not for release" in (tmp_path / "a" / "certificate.json").read_text()


def test_a_ledger_keeps_the_budget(tmp_path: Path) -> None:
    ledger = str(tmp_path / "digits.sqlite")
    common = ["train", "--no-compare", "--epsilon", "2", "--ledger", ledger, *FAST]
    run(*common, "--budget", "2.5,1e-5", "--out", str(tmp_path / "a"))
    refused = run(*common, "--out", str(tmp_path / "b"), code=2)
    assert "budget" in refused
    assert not (tmp_path / "b" / "model.pt").exists()
    with dpoptim.Ledger(ledger) as opened:
        (entry,) = opened.entries()
    assert entry.state == "committed"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--epsilon", "0"], "epsilon"),
        (["--epsilon", "-1"], "epsilon"),
        (["--delta", "2"], "delta"),
        (["--batch-size", "5000"], "batch_size=5000 is larger than n"),
        (["--epsilon", "1", "--noise-multiplier", "1"], "either epsilon"),
        (["--clip-norm", "0"], "clip_norm"),
        (["--learning-rate", "nan"], "learning_rate"),
        (["--momentum", "1.5"], "momentum"),
        (["--data", "odd[name].csv"], "odd[name].csv"),
        (["--noise-multiplier", "1e-300"], "noise_multiplier"),
        (["--data", "nowhere.csv"], "does not exist"),
        (["--target", "y"], "--target is for a table"),
        (["--budget", "3,1e-5"], "--ledger"),
        (["--data", "fashion-mnist", "--data-dir", "nowhere"], "--data-dir"),
    ],
)
def test_bad_input_names_the_fix(tmp_path: Path, arguments: list[str], said: str) -> None:
    text = run("train", "--out", str(tmp_path / "run"), *arguments, code=2)
    assert "Error:" in text
    assert said in text
    assert "Traceback" not in text
    assert not (tmp_path / "run").exists()


def test_certificates_of_estimators_are_made_in_python() -> None:
    for arguments in ([], ["model.pkl", "--data", "patients"]):
        assert "dpoptim.certify(model," in run("certify", *arguments, code=2)


def test_unknown_options_are_refused() -> None:
    assert "No such option" in run("train", "--epsilom", "1", code=2)


def test_tables_without_a_public_size(tmp_path: Path) -> None:
    path = str(table(tmp_path / "t.csv"))
    common = [
        "train",
        "--data",
        path,
        "--target",
        "outcome",
        "--classes",
        "no,yes",
        "--out",
        str(tmp_path / "run"),
    ]
    said = run(*common, "--neighboring", "add-or-remove-one", code=2)
    assert "needs --n, a public number" in said
    assert "delta=" not in said


def test_an_unreadable_ledger(tmp_path: Path) -> None:
    broken = tmp_path / "ledger.sqlite"
    broken.write_text("this is no database, but it is somebody's file")
    text = run("train", "--ledger", str(broken), "--out", str(tmp_path / "run"), *FAST, code=2)
    assert str(broken) in text
    assert broken.read_text().startswith("this is no database")


def test_results_are_not_overwritten_unasked(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "model.pt").write_text("somebody's model")
    assert "--overwrite" in run("train", "--out", str(out), *FAST, code=2)
    assert (out / "model.pt").read_text() == "somebody's model"
    run("train", "--out", str(out), "--overwrite", "--no-compare", *FAST)
    assert (out / "report.html").exists()


def full_disk(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make writing any file of this name in the run directory fail as on a full disk."""
    replace = os.replace

    def fail(source: str, target: str) -> None:
        if Path(target).name == name and "dpoptim-" not in str(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)


def test_a_full_disk_before_training_spends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, ".trial")
    ledger = str(tmp_path / "l.sqlite")
    text = run("train", "--ledger", ledger, "--out", str(tmp_path / "run"), *FAST, code=2)
    assert ".trial" in text
    with dpoptim.Ledger(ledger) as opened:
        assert opened.entries() == []


def test_a_full_disk_after_training_keeps_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, "model.pt")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    out = tmp_path / "run"
    out.mkdir()
    (out / "report.html").write_text("an older report")
    text = run("train", "--out", str(out), "--overwrite", "--no-compare", *FAST, code=2)
    assert "saved to" in text
    (rescued,) = tmp_path.glob("dpoptim-*/model.pt")
    assert torch.load(rescued, weights_only=True)["model"] == "softmax"
    assert (out / "report.html").read_text() == "an older report"


def test_a_failed_run_leaves_older_results_as_they_are(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run("train", "--out", str(out), "--no-compare", *FAST)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    run(
        "train",
        "--out",
        str(out),
        "--overwrite",
        "--epsilon",
        "8",
        "--clip-norm",
        "-1",
        *FAST,
        code=2,
    )
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_ledger_belongs_to_one_data_set(tmp_path: Path) -> None:
    ledger = str(tmp_path / "l.sqlite")
    run("train", "--ledger", ledger, "--no-compare", "--out", str(tmp_path / "a"), *FAST)
    path = str(table(tmp_path / "t.csv"))
    common = [
        "--target",
        "outcome",
        "--classes",
        "no,yes",
        "--n",
        "60",
        "--delta",
        "1e-4",
        "--ledger",
        ledger,
    ]
    assert "digits" in run("train", "--data", path, *common, "--out", str(tmp_path / "b"), code=2)


@pytest.mark.set_aside("momentum-gd", "noisy-gd")
@pytest.mark.parametrize(
    "method", ["dice-sgd", "dp-ftrl", "momentum-gd", "noisy-gd", "accelerated-srgd"]
)
def test_every_method_trains(tmp_path: Path, method: str) -> None:
    chosen = ["--epochs", "2", "--batch-size", "256"] if method in ("dice-sgd", "dp-ftrl") else []
    text = run(
        "train",
        "--data",
        "digits",
        "--no-compare",
        "--method",
        method,
        "--epsilon",
        "8",
        "--out",
        str(tmp_path / "run"),
        *chosen,
    )
    accuracy = float(re.findall(r"accuracy, private (\d+\.\d+) ?%", text)[0])
    assert accuracy > 30, text  # a guess is right in 10 % of the cases
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert certificate["guarantee"]["epsilon"] <= 8
    assert certificate["guarantee"]["neighboring"] == "zero-out"


def test_single_pass(tmp_path: Path) -> None:
    text = run(
        "train", "--data", "digits", "--single-pass", "--epsilon", "8", "--out", str(tmp_path / "a")
    )
    assert "accuracy, private" in text
    plan = dpoptim.Plan.from_json((tmp_path / "a" / "plan.json").read_text())
    assert plan.method.solver == "accelerated-srgd"
    said = run(
        "train",
        "--data",
        "digits",
        "--single-pass",
        "--method",
        "kl-spider",
        "--out",
        str(tmp_path / "b"),
        code=2,
    )
    assert "needs many looks at the data" in said
    said = run(
        "train",
        "--data",
        "digits",
        "--single-pass",
        "--epochs",
        "3",
        "--out",
        str(tmp_path / "b"),
        code=2,
    )
    assert "leave out --epochs" in said


def test_solvers_refuse_what_they_cannot_train(tmp_path: Path) -> None:
    said = run(
        "train",
        "--data",
        "digits",
        "--method",
        "noisy-gd",
        "--model",
        "mlp",
        "--out",
        str(tmp_path),
        code=2,
    )
    assert "--model softmax" in said


def test_experiments_are_reproduced_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as few passes as show that it ran; reproduce/test_dice.py runs as many as it takes."""
    folder = tmp_path / "new" / "folder"
    mark = folder / "dice-bias.unfinished"  # a table that grows is not taken for a whole one

    def ends_early(out: Path) -> None:
        assert mark.is_file()
        raise ValueError("killed")

    monkeypatch.setattr(dice_bias, "bias_of_clipping", ends_early)
    said = run("reproduce", "dice-bias", "--data-dir", "here", "--out", str(folder), code=2)
    assert f"is running; until it ends, {mark} stands beside" in said
    assert mark.is_file()
    monkeypatch.setattr(dice_bias, "bias_of_clipping", partial(bias_of_clipping, passes=5))
    text = run("reproduce", "dice-bias", "--out", str(folder))
    assert not mark.exists()
    assert "expected" in text  # a table of what was found beside what the paper's analysis says
    assert "dice_bias.csv, dice_bias.png" in text
    assert (tmp_path / "new" / "folder" / "dice_bias.csv").exists()
    said = run("reproduce", "dice-bia", "--out", str(tmp_path), code=2)
    assert "experiment must be one of das-baselines" in said


@pytest.mark.parametrize("method", BUILT_IN)
def test_every_method_is_calibrated_and_accounted(method: str) -> None:
    """What is calibrated for epsilon 2 costs at most 2, and most of it."""
    batches = [] if entry(method).solver else ["--batch-size", "500", "--epochs", "2"]
    common = ["--method", method, "--n", "5000", *batches, "--delta", "1e-5", "--json"]
    found = json.loads(run("calibrate", *common, "--epsilon", "2"))
    noise = str(found["noise_multiplier"])
    (again,) = json.loads(run("account", *common, "--noise-multiplier", noise))
    assert 1.9 < again["epsilon"] <= 2.0 + 1e-9
    if entry(method).solver:
        refused = ["--method", method, "--n", "5000", "--batch-size", "5", "--delta", "1e-5"]
        assert "leave out batch_size" in run("calibrate", *refused, "--epsilon", "2", code=2)


def test_settings_of_a_method_are_accounted_and_calibrated() -> None:
    """By turns, noise is amplified: far less of it than on fixed batches, for another relation."""
    common = ["--n", "5000", "--batch-size", "100", "--epochs", "2", "--delta", "1e-5", "--json"]
    turns = ["--method", "dp-ftrl", "--set", "sampling=cyclic-poisson", "--set", "bands=4"]
    fixed, by_turns = (
        json.loads(run("calibrate", *common, "--epsilon", "2", *method))
        for method in (["--method", "dp-ftrl"], turns)
    )
    plan = dpoptim.DPFTRL(1.0, sampling="cyclic-poisson", bands=4).plan(
        n=5000, batch_size=100, epochs=2, epsilon=2.0, delta=1e-5
    )
    assert by_turns["noise_multiplier"] == pytest.approx(plan.noise_multiplier)
    assert by_turns["noise_multiplier"] < 0.8 * fixed["noise_multiplier"]
    noise = ["--noise-multiplier", str(by_turns["noise_multiplier"])]
    (again,) = json.loads(run("account", *common, *noise, *turns))
    assert 1.9 < again["epsilon"] <= 2.0 + 1e-9
    whole = ["--n", "500", "--delta", "1e-5", "--epsilon", "2", "--json"]
    kl = json.loads(run("calibrate", *whole, "--method", "kl-spider", "--set", "rounds=3"))
    assert kl["noise_multiplier"] > 0
    for method, given in (("dp-ftrl", [*common, "--epsilon", "2"]), ("kl-spider", whole)):
        said = run("calibrate", *given, "--method", method, "--set", "band=3", code=2)
        assert f"--set: the method {method} has no setting 'band'" in " ".join(said.split())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("method", ["dp-sgd", "dice-sgd", "dp-ftrl", "value-sgd"])
def test_the_clip_norm_is_found_privately_with_every_method(method: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    given = ["--epochs", "2", "--no-compare", "--clip-quantile", "0.4", "--clip-norm", "0.5"]
    said = run("train", "--method", method, *given, "--out", str(out))
    assert "the clip norm was found from noisy counts" in " ".join(said.split())
    plan = dpoptim.Plan.from_json((out / "plan.json").read_text())
    assert plan.method.clip_norm == dpoptim.PrivateQuantile(0.4, start=0.5)


def test_clip_norms_that_a_method_cannot_have_are_refused(tmp_path: Path) -> None:
    common = ["train", "--out", str(tmp_path / "run"), "--clip-quantile", "0.4"]
    assert "must be a number for sparse-sgd" in run(*common, "--method", "sparse-sgd", code=2)
    assert "leave out --clip-quantile" in run(*common, "--method", "noisy-gd", code=2)
    for option in (("--iterate", "last"), ("--projection", "1")):
        said = run("train", *option, "--method", "noisy-gd", code=2)
        assert "leave out --iterate" in said
    assert "Fix: --clip-norm NUMBER" in run(*common, "--set", "clip_norm=2", code=2)
    assert not (tmp_path / "run").exists()


def test_a_batch_that_leaves_later_runs_something_is_named() -> None:
    """A run of 19 records a batch took all of a budget, and nothing was said before or after."""
    ledger = Ledger(epsilon=1.2, delta=1e-5)
    plan = DPSGD(1.0).plan(n=5_000, batch_size=19, epochs=5, epsilon=1.0, delta=1e-5)
    (said,) = no_room(ledger, plan)
    assert "this run takes the whole budget" in said
    larger = int(said.rpartition("--batch-size ")[2])
    roomy = DPSGD(1.0).plan(n=5_000, batch_size=larger, epochs=5, epsilon=1.0, delta=1e-5)
    assert not list(no_room(ledger, roomy))
    ledger.reserve(roomy.event, neighboring=roomy.neighboring, label="the first")
    assert ledger.remaining().left > 0


def test_several_ledgers_are_added_up_for_one_who_is_in_all(tmp_path: Path) -> None:
    relations = {"2025": "zero-out", "2026": "zero-out", "others": "replace-one"}
    for name, relation in relations.items():
        made = dpoptim.Ledger(
            tmp_path / f"{name}.sqlite", epsilon=3, delta=1e-6, neighboring=relation
        )
        made.reserve(GaussianDpEvent(4.0), neighboring=relation, label="a run")
    one, two, other = (str(tmp_path / f"{name}.sqlite") for name in relations)
    with dpoptim.Ledger(neighboring="zero-out") as both:
        for _ in range(2):
            both.reserve(GaussianDpEvent(4.0), neighboring="zero-out", label="a run")
        epsilon = rounded_up(both.spent(1e-6).epsilon)
    text = " ".join(run("ledger", one, two).split())
    assert f"one record who is in all of them: epsilon={epsilon} at delta=1e-06" in text
    assert "at most epsilon=6 at delta=2e-06, the sum of the budgets" in text
    assert "no sum" in run("ledger", one, other)
    assert "named twice" in run("ledger", one, one, code=2)
    assert "are for one ledger" in run("ledger", one, two, "--verify", "--digest", "0", code=2)
    assert "together  for one" not in run("ledger", one)
