"""What `dpoptim verify` makes of a record of evaluations, when hands or a power cut changed it."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dpoptim import Ledger
from dpoptim.accounting.guarantee import Guarantee
from dpoptim.cli import app
from dpoptim.documents import sha256_of, with_digest
from dpoptim.evaluation import evaluate_classifier
from dpoptim.runs import evaluation_section
from dpoptim.runs.certificate import write_certificate
from dpoptim.runs.evaluate import training_of
from dpoptim.runs.evaluation_section import NO_EVALUATION, keep_evaluation
from dpoptim.runs.evaluations import NAME, Evaluation, Records, costs_together, label_ending
from dpoptim.runs.result import LedgerEntry
from dpoptim.runs.verify import verify_run
from finished_run import small_run

PAGE = f"<p>{NO_EVALUATION}</p>"
MODEL = sha256_of("weights")


def saved(folder: Path) -> Path:
    """A run directory with a model and a report."""
    folder.mkdir(exist_ok=True)
    files = {"report.html": sha256_of(PAGE)}
    result = replace(small_run(), model_sha256=MODEL, files=files)
    (folder / "plan.json").write_text(result.plan.to_json())
    write_certificate(folder / "certificate.json", result)
    (folder / "report.html").write_text(PAGE)
    (folder / "model.pt").write_text("weights")
    return folder


def evaluation(
    ledger: Ledger | None, model: str = MODEL, records: Records = "hold-out", training: Any = None
) -> Evaluation:
    charged = Ledger(neighboring="zero-out") if ledger is None else ledger
    scores = evaluate_classifier(
        np.full((99, 2), 0.5),
        [0, 1, 1] * 33,
        classes=[0, 1],
        epsilon=1.0,
        ledger=charged,
        label=f"evaluation of run, {label_ending(model)}",
    )
    charge = charged.entries()[-1]
    entry = None if ledger is None else LedgerEntry("h.sqlite", "h", charge.id, "")
    made = "2026-07-25T14:03:22+02:00"
    return Evaluation(scores, "h", records, charge.event, entry, model, made, training)


def changed(folder: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Edit the evaluations, and make sums and digest right again."""
    document = json.loads((folder / NAME).read_text())
    change(document["evaluations"])
    document["together"] = costs_together(document["evaluations"])
    (folder / NAME).write_text(json.dumps(with_digest(document)))


def stating(**changes: Any) -> Callable[[list[dict[str, Any]]], object]:
    """An edit of the first guarantee, its text included."""

    def change(entries: list[dict[str, Any]]) -> None:
        stated = {k: v for k, v in entries[0]["guarantee"].items() if k != "text"} | changes
        entries[0]["guarantee"] = {**stated, "text": str(Guarantee.from_json(stated))}

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: entries.append(entries[0]),  # a score that nothing was charged for
        stating(unit="person"),
        stating(neighboring="add-or-remove-one"),
        lambda entries: entries[0].update(model_sha256="2" * 64),
    ],
)
def test_a_charge_is_of_one_evaluation_and_of_what_it_says(
    tmp_path: Path, change: Callable[[list[dict[str, Any]]], object]
) -> None:
    folder, path = saved(tmp_path / "run"), tmp_path / "h.sqlite"
    keep_evaluation(folder, evaluation(Ledger(path, neighboring="zero-out")), ("no", "yes"))
    checked = verify_run(folder, ledgers=[path]).checked
    assert "the ledger holds the charge of evaluation 1" in checked
    changed(folder, change)
    with pytest.raises(ValueError, match="names the charge of another|charged otherwise"):
        verify_run(folder, ledgers=[path])


def test_a_sum_counts_the_training_of_the_model_that_was_scored(tmp_path: Path) -> None:
    """A folder that another model was trained into once counted that one's, or was refused."""
    folder, plan = saved(tmp_path / "run"), small_run().plan
    earlier = evaluation(None).event
    for _ in range(2):
        keep_evaluation(folder, evaluation(None, "2" * 64, "training", earlier), ("no", "yes"))
    (found,) = json.loads((folder / NAME).read_text())["together"]
    (three,) = costs_together([evaluation(None).to_json()] * 3)
    assert found["guarantee"]["epsilon"] == three["guarantee"]["epsilon"]
    assert "of these evaluations 2 are of another model" in verify_run(folder).open
    keep_evaluation(folder, evaluation(None, MODEL, "training", plan.event), ("no", "yes"))
    verify_run(folder)
    changed(folder, lambda entries: entries[2].update(training=entries[0]["training"]))
    with pytest.raises(ValueError, match="evaluation 3 counts another training"):
        verify_run(folder)


def test_a_report_that_was_not_written_is_not_called_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "run")
    keep_evaluation(folder, evaluation(None), ("no", "yes"))
    write = evaluation_section.write_atomically

    def full(path: Path, content: bytes | str) -> None:
        if path.name == "report.html":
            raise OSError("the disk is full")
        write(path, content)

    monkeypatch.setattr(evaluation_section, "write_atomically", full)
    for _ in range(2):
        with pytest.raises(OSError, match="full"):
            keep_evaluation(folder, evaluation(None), ("no", "yes"))
        assert any("does not show the last evaluation" in line for line in verify_run(folder).open)
    monkeypatch.undo()
    keep_evaluation(folder, evaluation(None), ("no", "yes"))
    assert not any("does not show the last" in line for line in verify_run(folder).open)
    edited = (folder / "report.html").read_text().replace("Accuracy", "Accuracy, really")
    (folder / "report.html").write_text(edited)
    with pytest.raises(ValueError, match="its evaluations are not those"):
        verify_run(folder)


def test_a_damaged_report_loses_no_evaluation(tmp_path: Path) -> None:
    """It was charged and printed by then, and once not written down."""
    folder = saved(tmp_path / "run")
    damaged = b"\xff\r\n" + PAGE.encode()
    (folder / "report.html").write_bytes(damaged)
    keep_evaluation(folder, evaluation(None), ("no", "yes"))
    assert len(json.loads((folder / NAME).read_text())["evaluations"]) == 1
    assert (folder / "report.html").read_bytes().startswith(damaged[:6])


def test_a_record_that_was_signed_or_leads_nowhere_is_missed(tmp_path: Path) -> None:
    folder = saved(tmp_path / "run")
    (folder / "evaluations.sig").write_text("00")
    with pytest.raises(ValueError, match=f"{NAME} was signed, and is not here"):
        verify_run(folder)
    (folder / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=NAME):
        verify_run(folder)


@pytest.mark.parametrize("files", [["report.html"], {"report.html": 1}, 3])
def test_digests_of_another_form_are_named(tmp_path: Path, files: Any) -> None:
    folder = saved(tmp_path / "run")
    document = json.loads((folder / "certificate.json").read_text()) | {"files": files}
    (folder / "certificate.json").write_text(json.dumps(with_digest(document)))
    said = CliRunner().invoke(app, ["verify", str(folder)])
    assert "certificate lacks entries or has wrong ones" in re.sub(r"\s+", " ", said.output)


@pytest.mark.parametrize("text", ["[]", "{", "3"])
def test_a_damaged_search_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tune.json").write_text(text)
    with pytest.raises(ValueError, match=r"tune\.json: it is damaged"):
        training_of(tmp_path)


def test_scores_are_written_down_before_they_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that was killed in between once left scores that only its reader knew of."""
    folder = saved(tmp_path / "run")
    found, kept = evaluation(None), []
    monkeypatch.setattr("dpoptim.runs.evaluate.evaluate_run", lambda *a, **k: found)
    monkeypatch.setattr("dpoptim.runs.saved_model.load_model", lambda _: small_run())
    monkeypatch.setattr("dpoptim.runs.saved_model.model_file", lambda run: run / "model.pt")
    monkeypatch.setattr(
        "dpoptim.commands.evaluate.say", lambda _: kept.append((folder / NAME).exists())
    )
    monkeypatch.setattr(type(small_run()), "class_names", ("no", "yes"), raising=False)
    arguments = ["evaluate", str(folder), "h.csv", "--epsilon", "1", "--delta", "1e-5"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert kept[0]
