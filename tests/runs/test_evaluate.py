"""``dpoptim evaluate``: near the truth on private records, charged first, and one record or person
moves it little.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpoptim
from command_work import run
from dpoptim.data import Schema
from dpoptim.documents import with_digest
from dpoptim.evaluation import (
    ClassifierScores,
    RegressorScores,
    evaluate_classifier,
    evaluate_regressor,
)
from dpoptim.evaluation.intervals import receiver_curve
from dpoptim.runs.evaluate import evaluate_run, outputs_and_targets
from dpoptim.runs.evaluation_section import BEGIN, END, NO_EVALUATION, evaluation_section
from dpoptim.runs.evaluations import NAME
from dpoptim.runs.predict import predict_file
from dpoptim.runs.saved_model import load_model
from patients import SCHEMA, records, write_table

SMALL = ("--epsilon", 1, "--delta", 1e-5)
BUDGET: Any = {"epsilon": 1.0, "delta": 1e-5, "noise_seed": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run directories of a model per record and of one per person."""
    folder = tmp_path_factory.mktemp("trained")
    data = write_table(folder / "t.csv", records(600, 1))
    runs = {}
    for unit, schema in {"record": SCHEMA.replace('"person"', '"drop"'), "person": SCHEMA}.items():
        (folder / f"{unit}.toml").write_text(schema)
        runs[unit] = folder / unit
        options = ("--epsilon", 8, "--delta", 1e-4, "--epochs", 2, "--out", runs[unit])
        run("train", "--data", data, "--schema", folder / f"{unit}.toml", *options)
    return runs


def scored(*arguments: Any, **options: Any) -> ClassifierScores | RegressorScores:
    return evaluate_run(*arguments, **options).scores


@pytest.mark.figures
def test_the_score_is_near_the_public_one(trained: dict[str, Path], tmp_path: Path) -> None:
    table = write_table(tmp_path / "h.csv", records(4000, 5))
    public = predict_file(trained["record"], table, tmp_path / "p.csv", public=True).score
    found = scored(trained["record"], table, **BUDGET)
    assert isinstance(found, ClassifierScores)
    assert found.accuracy.value == pytest.approx(public, abs=0.02)
    assert found.guarantee.epsilon <= 1
    assert found.guarantee.unit == "record"
    assert any("no ledger" in note for note in found.guarantee.notes)


def test_the_command_prints_text_and_json(trained: dict[str, Path], tmp_path: Path) -> None:
    table = write_table(tmp_path / "h.csv", records(300, 5))
    options = ("evaluate", trained["record"], table, "--epsilon", 1, "--delta", 1e-5)
    text = run(*options)
    assert "accuracy" in text
    assert "epsilon=1" in text
    found = json.loads(run(*options, "--json"))
    assert np.shape(found["scores"]["confusion"]) == (2, 2)
    assert found["guarantee"]["neighboring"] == "zero-out"
    accuracy = found["scores"]["accuracy"]
    assert accuracy["low"] <= accuracy["value"] <= accuracy["high"]


def test_it_is_charged_before_it_is_drawn(trained: dict[str, Path], tmp_path: Path) -> None:
    table = write_table(tmp_path / "h.csv", records(300, 5))
    ledger = tmp_path / "holdout.sqlite"
    with dpoptim.Ledger(ledger, epsilon=1.5, delta=1e-5, neighboring="zero-out"):
        pass
    options = (
        "evaluate",
        trained["record"],
        table,
        "--epsilon",
        1,
        "--delta",
        1e-5,
        "--ledger",
        ledger,
    )
    assert "this evaluation alone" not in run(*options)
    refused = run(*options, code=2)
    assert "accuracy" not in refused
    unread = tmp_path / "unread.csv"
    unread.write_text("whatever\n1\n")  # asked first, the ledger refuses before this can
    assert "budget" in run(*options[:2], unread, *options[3:], code=2)
    with dpoptim.Ledger(ledger) as after:
        (entry,) = after.entries()
        model = hashlib.sha256((trained["record"] / "model.pt").read_bytes()).hexdigest()
        assert entry.label == f"evaluation of record, model {model[:16]}"


def test_a_new_ledger_and_one_of_another_unit(trained: dict[str, Path], tmp_path: Path) -> None:
    table = write_table(tmp_path / "h.csv", records(300, 5))
    ledger = tmp_path / "new.sqlite"
    options: Any = {**BUDGET, "ledger": ledger}
    evaluate_run(trained["person"], table, **options)
    with dpoptim.Ledger(ledger) as made:
        assert made.dataset == "new, per person"
        assert made.neighboring == "zero-out"
    with pytest.raises(ValueError, match="per record"):
        evaluate_run(trained["record"], table, **options)
    with dpoptim.Ledger(ledger) as after:
        assert len(after.entries()) == 1


def test_one_person_moves_one_count_however_many_their_records(
    trained: dict[str, Path], tmp_path: Path
) -> None:
    """Neighbouring tables under the same noise; the person's 80 records are of one outcome, first
    or last or between.
    """
    others = records(200, 5)
    hostile = [["V", "somebody", "90", "0", "60", "220", "south", "yes", "ill"]] * 80
    options: Any = {**BUDGET, "neighboring": "add-or-remove-one", "n": 50}
    without = scored(trained["person"], write_table(tmp_path / "a.csv", others), **options)
    assert isinstance(without, ClassifierScores)
    for rows in (hostile + others, others + hostile, others[:70] + hostile + others[70:]):
        table = write_table(tmp_path / "b.csv", rows)
        with_them = scored(trained["person"], table, **options)
        assert isinstance(with_them, ClassifierScores)
        assert np.abs(with_them.confusion - without.confusion).sum() == pytest.approx(1, abs=1e-5)
        assert with_them.guarantee.unit == "person"
    # The same table per record counts them all: the test would see a missing bound.
    counted = scored(trained["record"], table, **options)
    base = scored(trained["record"], tmp_path / "a.csv", **options)
    assert isinstance(counted, ClassifierScores)
    assert isinstance(base, ClassifierScores)
    assert np.abs(counted.confusion - base.confusion).sum() == pytest.approx(80, abs=1e-3)


def test_a_record_goes_through_the_model_by_itself(
    trained: dict[str, Path], tmp_path: Path
) -> None:
    """To the last bit: whoever else is there."""
    saved = load_model(trained["record"])
    assert isinstance(saved.encoding, Schema)
    rows = records(40, 6)
    together, _ = outputs_and_targets(saved, saved.encoding, write_table(tmp_path / "a.csv", rows))
    for i in (0, 17, 39):
        alone, _ = outputs_and_targets(
            saved, saved.encoding, write_table(tmp_path / "b.csv", rows[i : i + 1])
        )
        assert (together[i] == alone[0]).all()


def test_numbers_are_scored_in_their_units(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 10, 2000)
    path = tmp_path / "t.csv"
    path.write_text("x,price\n" + "".join(f"{a:.3f},{1000 * a + 500:.1f}\n" for a in x))
    run(
        *(
            "train",
            "--data",
            path,
            "--target",
            "price",
            "--task",
            "regression",
            "--target-bounds",
            "0,11000",
        ),
        *("--epsilon", 8, "--delta", 1e-5, "--out", tmp_path / "run"),
    )
    public = predict_file(tmp_path / "run", path, tmp_path / "p.csv", public=True).score
    found = scored(tmp_path / "run", path, records="hold-out", **{**BUDGET, "epsilon": 8.0})
    assert isinstance(found, RegressorScores)
    assert found.r2.value == pytest.approx(public, abs=0.05)
    predicted = np.array([float(line) for line in (tmp_path / "p.csv").read_text().split()[1:]])
    error = np.square(predicted - (1000 * x + 500)).mean()
    assert found.squared_error.low <= error <= found.squared_error.high


def test_what_cannot_be_scored_is_refused_before_it_is_charged(
    trained: dict[str, Path], tmp_path: Path
) -> None:
    ledger = tmp_path / "l.sqlite"
    table = write_table(tmp_path / "h.csv", records(30, 5))
    without_target = write_table(tmp_path / "x.csv", records(30, 5), ("age", "income"))
    options = ("--epsilon", 1, "--delta", 1e-5, "--ledger", ledger)
    assert "has no column" in run("evaluate", trained["record"], without_target, *options, code=2)
    assert "does not exist" in run(
        "evaluate", trained["record"], tmp_path / "no.csv", *options, code=2
    )
    assert "--n is missing" in run(
        "evaluate",
        trained["record"],
        table,
        "--neighboring",
        "add-or-remove-one",
        *options[:4],
        code=2,
    )
    assert "epsilon" in run(
        "evaluate", trained["record"], table, "--epsilon", -1, *options[2:], code=2
    )
    with dpoptim.Ledger(ledger) as after:
        assert not after.entries()


def test_scores_are_drawn_into_the_report(trained: dict[str, Path], tmp_path: Path) -> None:
    """The last one in full, all of them in a table; nothing else of the page changes."""
    table, report = (
        write_table(tmp_path / "h.csv", records(300, 5)),
        trained["record"] / "report.html",
    )
    before = re.sub(f"{BEGIN}.*{END}", NO_EVALUATION, report.read_text(), flags=re.DOTALL)
    assert before.count(NO_EVALUATION) == 1
    report.write_text(before)
    (trained["record"] / NAME).unlink(missing_ok=True)
    first, _ = [drawn(trained["record"], table, report) for _ in range(2)]
    assert before == re.sub(f"{BEGIN}.*{END}", NO_EVALUATION, first, flags=re.DOTALL)
    section = first.partition(BEGIN)[2].partition(END)[0]
    assert section.count("<svg") == 2
    assert section.count('<th scope="row">') == 2
    assert "best of several" not in section
    assert "best of several" in report.read_text()
    assert "2 evaluations together: epsilon=" in report.read_text()
    assert "per record of the hold-out" in section
    assert "AUC" in section
    assert report.read_text().count("<h2>How good it is on private") == 1
    ids = re.findall(r'\bid="([^"]+)"', report.read_text())
    assert len(ids) == len(set(ids))


def fresh(source: Path, folder: Path) -> Path:
    """A copy of a run without its evaluations."""
    shutil.copytree(source, folder)
    (folder / NAME).unlink(missing_ok=True)
    report = folder / "report.html"
    report.write_text(re.sub(f"{BEGIN}.*{END}", NO_EVALUATION, report.read_text(), flags=re.DOTALL))
    return folder


def test_a_ledger_of_the_training_asks_what_the_records_are(tmp_path: Path) -> None:
    """Scores of training records are never called those of a hold-out by default."""
    table = write_table(tmp_path / "t.csv", records(300, 1))
    other = write_table(tmp_path / "h.csv", records(300, 5))
    (tmp_path / "s.toml").write_text(SCHEMA.replace('"person"', '"drop"'))
    ledger, folder = tmp_path / "l.sqlite", tmp_path / "run"
    options = ("--epsilon", 1, "--delta", 1e-4, "--ledger", ledger)
    run(
        *("train", "--data", table, "--schema", tmp_path / "s.toml", "--epochs", 1),
        *(*options, "--out", folder),
    )
    for file, why in ((other, "own training"), (table, "own training")):
        assert why in run("evaluate", folder, file, *options, code=2)
    assert "same name" in run("evaluate", folder, table, *options[:4], code=2)
    elsewhere = ("--ledger", tmp_path / "other.sqlite", "--records", "training")
    assert "does not hold" in run("evaluate", folder, table, *options[:4], *elsewhere, code=2)
    assert len(dpoptim.Ledger(ledger).entries()) == 1
    said = run("evaluate", folder, table, *options, "--records", "training")
    assert "on trust: the model was not trained" not in said
    assert "no measure of how it does on new ones" in said
    assert "1 evaluation, with the training: epsilon=" in said
    page = (folder / "report.html").read_text()
    assert "the private records that it was trained on" in page
    assert "hold-out" not in page.partition(BEGIN)[2].partition(END)[0]
    said = run("evaluate", folder, other, *options, "--records", "hold-out")
    assert "on trust: the model was not trained" in said
    kept = json.loads((folder / NAME).read_text())["evaluations"]
    assert [each["records"] for each in kept] == ["training", "hold-out"]


def test_a_ledger_knows_its_records_by_a_name_that_may_be_said(
    trained: dict[str, Path], tmp_path: Path
) -> None:
    """A file that was renamed holds the same records; the certificate says what was compared."""
    schema, ledger = tmp_path / "s.toml", tmp_path / "l.sqlite"
    schema.write_text(SCHEMA.replace('"person"', '"drop"'))
    common = ("--schema", schema, "--epochs", 1, "--epsilon", 1, "--delta", 1e-4)

    def train(table: Path, out: str, *more: object, code: int = 0) -> str:
        options = (*common, "--out", tmp_path / out, *more)
        return run("train", "--data", table, *options, code=code)

    table, renamed = (write_table(tmp_path / name, records(60, 1)) for name in ("t.csv", "u.csv"))
    train(table, "a", "--ledger", ledger)
    refused = train(renamed, "b", "--ledger", ledger, code=2)
    assert "for the same records --dataset 't'" in refused
    assert "--ledger" in train(renamed, "b", "--dataset", "t", code=2)
    train(renamed, "b", "--ledger", ledger, "--dataset", "t")
    for folder, by in (("a", "'t', the file's name"), ("b", "'t', the name that --dataset gave")):
        basis = json.loads((tmp_path / folder / "certificate.json").read_text())["basis"]
        (line,) = (text for text in basis["trusted"] if "by name alone" in text)
        assert line.endswith(by)
        run("verify", tmp_path / folder, "--ledger", ledger)
    others = ("--ledger", tmp_path / "new.sqlite", "--dataset", "clinic")
    hold_out = write_table(tmp_path / "h.csv", records(30, 5))
    run("evaluate", trained["person"], hold_out, *SMALL, *others)
    assert dpoptim.Ledger(tmp_path / "new.sqlite").dataset == "clinic, per person"


def test_a_budget_of_a_hold_out_is_kept(trained: dict[str, Path], tmp_path: Path) -> None:
    table, ledger = write_table(tmp_path / "h.csv", records(300, 5)), tmp_path / "h.sqlite"
    folder = fresh(trained["record"], tmp_path / "run")
    options = ("evaluate", folder, table, "--epsilon", 1, "--delta", 1e-5, "--budget", "1.1,1e-5")
    assert "name one with --ledger" in run(*options, code=2)
    run(*options, "--ledger", ledger)
    assert "the budget" in run(*options, "--ledger", ledger, code=2)
    assert "epsilon=1.1" in run("ledger", ledger)
    assert len(dpoptim.Ledger(ledger).entries()) == 1


def test_every_evaluation_is_kept_and_verified(trained: dict[str, Path], tmp_path: Path) -> None:
    table, ledger = write_table(tmp_path / "h.csv", records(300, 5)), tmp_path / "h.sqlite"
    folder = fresh(trained["record"], tmp_path / "run")
    options = ("evaluate", folder, table, "--epsilon", 1, "--delta", 1e-5)
    run(*options)
    run(*options, "--ledger", ledger)
    run(*options, "--ledger", ledger)
    said = run("verify", folder, "--ledger", ledger)
    assert "3 evaluations together: epsilon=" in said
    assert "1 of them in no ledger" in said
    assert "checked evaluations.json: evaluation 3 of h (hold-out) cost epsilon=1" in said
    for number in (2, 3):
        assert f"checked the ledger holds the charge of evaluation {number}" in said
    assert "checked schema.toml" in said
    assert "checked report.html" in said
    document = json.loads((folder / NAME).read_text())
    together = document["together"][0]["guarantee"]["epsilon"]
    assert 1.7 < together < 1.9  # sqrt(3) times the noise's price
    best = dict(document, evaluations=document["evaluations"][1:2])
    (folder / NAME).write_text(json.dumps(with_digest(best)))
    assert "the sum is not that" in run("verify", folder, code=2)
    (folder / NAME).unlink()
    assert "its evaluations are not those" in run("verify", folder, code=2)
    fresh(folder, tmp_path / "cleaned")
    left_out = run("verify", tmp_path / "cleaned", "--ledger", ledger)
    assert "2 more evaluations of this model" in left_out


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "change",
    [
        lambda e: e["guarantee"].update(epsilon=0.1),
        lambda e: e["event"].update(noise_multiplier=99.0),
        lambda e: e["guarantee"].update(unit="household"),
        lambda e: e.pop("event"),
        lambda e: e.update(ledger=3),
        lambda e: e["scores"].clear(),
    ],
)
def test_an_edited_evaluation_is_named(
    trained: dict[str, Path], tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    folder = fresh(trained["record"], tmp_path / "run")
    run("evaluate", folder, write_table(tmp_path / "h.csv", records(99, 5)), *SMALL)
    document = json.loads((folder / NAME).read_text())
    change(document["evaluations"][0])
    (folder / NAME).write_text(json.dumps(document))
    assert "edited" in run("verify", folder, code=2)
    (folder / NAME).write_text(json.dumps(with_digest(document)))
    assert "evaluations.json" in run("verify", folder, code=2)
    (folder / NAME).write_text("{}")  # found before anything is spent
    ledger = ("--ledger", tmp_path / "h.sqlite")
    run("evaluate", folder, tmp_path / "h.csv", *SMALL, *ledger, code=2)
    assert not (tmp_path / "h.sqlite").exists()


def test_a_public_number_makes_a_new_ledger_hide_how_many_there_are(
    trained: dict[str, Path], tmp_path: Path
) -> None:
    """As for training, so that one command line serves both."""
    table = write_table(tmp_path / "h.csv", records(99, 5))
    run("evaluate", trained["record"], table, *SMALL, "--n", 100, "--ledger", tmp_path / "l")
    assert dpoptim.Ledger(tmp_path / "l").neighboring == "add-or-remove-one"
    said = run("evaluate", trained["record"], table, *SMALL, "--n", 100)
    assert "add-or-remove-one" in said


def drawn(folder: Path, table: Path, report: Path) -> str:
    assert "report" in run("evaluate", folder, table, "--epsilon", 1, "--delta", 1e-5)
    return report.read_text()


def test_the_section_of_a_number_names_r2_and_hostile_names_are_escaped() -> None:
    y = np.linspace(-1, 1, 500)
    number = evaluate_regressor(y, y, target_bound=1.0, epsilon=1.0, noise_seed=0)
    section = evaluation_section(number, ())
    assert "R2" in section
    assert "Accuracy" not in section
    assert "not for release" in section
    chances = np.full((500, 2), 0.5)
    scores = evaluate_classifier(chances, y > 0, classes=[False, True], epsilon=1.0)
    assert "<b>" not in evaluation_section(scores, ("<b>bold", "no"))


def test_a_receiver_curve_runs_from_corner_to_corner_whatever_the_noise() -> None:
    for counts in (np.array([[9.0, 1.0], [1.0, 9.0]]), np.array([[-3.0, 5.0], [-1.0, -9.0]])):
        false, true = receiver_curve(counts)
        assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
        assert (np.diff(false) >= 0).all()
        assert (np.diff(true) >= 0).all()
    false, true = receiver_curve(np.array([[9.0, 1.0], [1.0, 9.0]]))
    assert (false[1], true[1]) == (0.1, 0.9)
