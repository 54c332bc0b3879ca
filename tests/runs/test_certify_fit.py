"""A fit ends in a run directory, too: its certificate follows from what it released."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from sklearn.base import clone

import dpoptim
from dpoptim.accounting.event_json import event_text
from dpoptim.audit.command import audit_run
from dpoptim.documents import dump, with_digest
from dpoptim.errors import PrivacyError
from dpoptim.estimators import (
    DPLinearRegression,
    DPLogisticRegression,
    DPSGDClassifier,
    DPSGDRegressor,
)
from dpoptim.preprocessing import DPMinMaxScaler, DPStandardScaler, PrivatePipeline
from dpoptim.runs.certify_fit import pickled, record_of
from dpoptim.runs.fit_record import FitRecord
from dpoptim.runs.verify import check_ledger, verify_run
from dpoptim.tuning import DPSearchCV

N = 400
X = np.random.default_rng(0).uniform(-1, 1, (N, 3))
Y = X[:, 0] > 0
BUDGET: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5}
CLASSES: dict[str, Any] = {"classes": [False, True]}


def pipeline(**more: Any) -> PrivatePipeline:
    steps = [
        ("scale", DPStandardScaler(lower=-1, upper=1)),
        ("model", DPLogisticRegression(**CLASSES)),
    ]
    return PrivatePipeline(steps, **BUDGET, **more)


def search(**more: Any) -> DPSearchCV:
    return DPSearchCV(
        DPLogisticRegression(**CLASSES, steps=3),
        {"l2": [0.0, 0.1]},
        mean_trials=2,
        **BUDGET,
        **more,
    )


LEARNERS: dict[str, Any] = {
    "classifier": lambda **more: DPLogisticRegression(**BUDGET, **CLASSES, **more),
    "regressor": lambda **more: DPLinearRegression(**BUDGET, target_bound=1.0, **more),
    "network": lambda **more: DPSGDClassifier(**BUDGET, **CLASSES, epochs=1, **more),
    "network of numbers": lambda **more: DPSGDRegressor(
        **BUDGET, target_bound=1.0, epochs=1, **more
    ),
    "pipeline": pipeline,
    "search": search,
    "scaler": lambda **more: DPStandardScaler(**BUDGET, lower=-1, upper=1, **more),
}


def fitted(name: str, **more: Any) -> Any:
    targets = X[:, 0] if name in ("regressor", "network of numbers") else Y
    return LEARNERS[name](**more).fit(X, targets)


def ledger_at(path: Path) -> dpoptim.Ledger:
    return dpoptim.Ledger(path, epsilon=9.0, delta=1e-4, neighboring="zero-out")


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "certificate.json").read_text())
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LEARNERS)
def test_what_it_writes_is_verified(name: str, tmp_path: Path) -> None:
    ledger = ledger_at(tmp_path / "patients.sqlite")
    learner = fitted(name, ledger=ledger)
    folder = dpoptim.certify(learner, tmp_path / "run", data="made up", settings={"scaled by": "9"})
    verified = verify_run(folder, ledgers=[tmp_path / "patients.sqlite"])
    assert "model.pkl is the model that the certificate is about" in verified.checked
    assert any(line.startswith("the ledger holds its charge") for line in verified.checked)
    assert any("it is a pickle" in line for line in verified.open)
    assert not verified.unknown
    written = read(folder)
    assert written["verdict"]["kind"] == "proven"
    assert written["guarantee"]["text"] == str(learner.privacy_)
    assert written["ledger"]["reservation"] == learner.ledger_run_
    assert [entry.id for entry in ledger.entries()] == [learner.ledger_run_]
    assert written["training"]["scaled by"] == "9"
    assert (written["model"]["parameters"] > 0) == (name != "scaler")


def test_the_pickle_names_its_charge_and_no_folder(tmp_path: Path) -> None:
    learner = fitted("pipeline", ledger=ledger_at(tmp_path / "patients.sqlite"))
    folder = dpoptim.certify(learner, tmp_path / "run", data="made up")
    content = (folder / "model.pkl").read_bytes()
    assert str(tmp_path).encode() not in content
    assert b"patients" not in content
    again = pickle.loads(content)
    assert again.ledger is None
    assert again.ledger_run_ == learner.ledger_run_
    assert {step.ledger_run_ for _, step in again.steps} == {learner.ledger_run_}
    assert (again.predict(X) == learner.predict(X)).all()
    with pytest.raises(PrivacyError, match="names no ledger now"):
        dpoptim.certify(again, tmp_path / "again", data="made up")
    again.set_params(ledger=ledger_at(tmp_path / "other.sqlite"))
    with pytest.raises(PrivacyError, match="holds no run"):
        dpoptim.certify(again, tmp_path / "again", data="made up")


def test_an_edit_is_seen(tmp_path: Path) -> None:
    folder = dpoptim.certify(fitted("classifier"), tmp_path / "run", data="made up")
    for path, before, after in (
        ("certificate.json", '"made up"', '"made good"'),
        ("plan.json", f'"n": {N}', f'"n": {N + 1}'),
        ("report.html", "made up", "made good"),
    ):
        text = (folder / path).read_text()
        assert before in text
        (folder / path).write_text(text.replace(before, after))
        with pytest.raises(ValueError, match="edited|damaged|digest"):
            verify_run(folder)
        (folder / path).write_text(text)
    verify_run(folder)
    (folder / "model.pkl").write_bytes(pickled(fitted("classifier")))
    with pytest.raises(ValueError, match="not the model of this certificate"):
        verify_run(folder)


def test_a_record_that_promises_more_than_its_event_is_refused(tmp_path: Path) -> None:
    """Also with its digest made anew: the epsilon is computed from the event."""
    folder = dpoptim.certify(fitted("classifier"), tmp_path / "run", data="made up")
    document = json.loads((folder / "plan.json").read_text())
    document["guarantee"]["epsilon"] = 0.5
    (folder / "plan.json").write_text(dump(with_digest(document)))
    with pytest.raises(ValueError, match="promises epsilon=0.5"):
        verify_run(folder)


def test_a_file_alone_is_refused_with_what_to_ask_for(tmp_path: Path) -> None:
    path = tmp_path / "model.joblib"
    path.write_bytes(pickled(fitted("classifier")))
    with pytest.raises(ValueError, match="ask for the folder that dpoptim train, or"):
        verify_run(path)


def test_verify_opens_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = dpoptim.certify(fitted("classifier"), tmp_path / "run", data="made up")

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle was opened")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    verify_run(folder)


def test_without_a_ledger_others_are_on_trust(tmp_path: Path) -> None:
    folder = dpoptim.certify(fitted("classifier"), tmp_path / "run", data="made up")
    written = read(folder)
    assert written["ledger"] is None
    assert any("this fit alone" in line for line in written["basis"]["trusted"])
    assert "charged to no ledger" in (folder / "report.html").read_text()


def test_seeded_noise_is_marked(tmp_path: Path) -> None:
    folder = dpoptim.certify(fitted("classifier", noise_seed=1), tmp_path / "run", data="made up")
    assert read(folder)["verdict"] == {
        "kind": "marked",
        "title": "Seeded: not for release",
        "text": read(folder)["verdict"]["text"],
        "for_release": False,
    }
    verify_run(folder)


def test_a_warm_start_is_unproven(tmp_path: Path) -> None:
    learner = LEARNERS["classifier"](warm_start=True).fit(X, Y)
    folder = dpoptim.certify(learner.fit(X, Y), tmp_path / "run", data="made up")
    assert read(folder)["verdict"]["kind"] == "unproven"
    verify_run(folder)


def test_what_no_event_pays_for_is_refused(tmp_path: Path) -> None:
    stream = LEARNERS["classifier"]().partial_fit(X, Y)
    dpoptim.certify(stream, tmp_path / "one chunk", data="made up")
    edited = fitted("classifier")
    edited.privacy_ = dpoptim.Guarantee(0.5, 1e-5, "zero-out", "exact Gaussian")
    for learner, why in (
        (LEARNERS["classifier"](), "is not fitted"),
        (DPMinMaxScaler(lower=-1, upper=1).fit(X), "learnt nothing privately"),
        (stream.partial_fit(X, Y), "several chunks"),
        (edited, "leave privacy_ as its fit set it"),
    ):
        with pytest.raises(PrivacyError, match=why):
            dpoptim.certify(learner, tmp_path / "run", data="made up")
    with pytest.raises(TypeError, match="fitted estimator"):
        dpoptim.certify(object(), tmp_path / "run", data="made up")
    with pytest.raises(TypeError, match="leave them out"):
        dpoptim.certify(fitted("classifier"), tmp_path / "run", data="made up", weights={})
    assert not (tmp_path / "run").exists()


def test_who_vouches_stands_in_certificate_and_report(tmp_path: Path) -> None:
    learner = fitted("classifier")
    named = {f"n={N}": "Ada Lovelace"}
    folder = dpoptim.certify(learner, tmp_path / "run", data="made up", vouched_by=named)
    (line,) = read(folder)["vouched_by"]
    assert line.startswith(f"n={N} is public")
    page = (folder / "report.html").read_text()
    assert "vouched for by: Ada Lovelace" in page
    assert "vouched for by: ____" in page
    lines = len(read(folder)["basis"]["trusted"])
    assert f"{lines - 1} of {lines} lines that are taken on trust" in " ".join(
        verify_run(folder).open
    )
    dpoptim.certify(learner, folder, data="made up", vouched_by="Ada Lovelace")
    assert len(read(folder)["vouched_by"]) == lines
    assert f"vouches for {lines} of {lines}" in " ".join(verify_run(folder).open)
    for wrong in ({"no such line": "Ada"}, {"n=": " "}, {"": "Ada"}):
        with pytest.raises(ValueError, match="part of one line that is taken on trust"):
            dpoptim.certify(learner, folder, data="made up", vouched_by=wrong)


def test_labels_tell_fits_apart_and_state_their_own_pair(tmp_path: Path) -> None:
    ledger = ledger_at(tmp_path / "patients.sqlite")
    for name, more in (("classifier", {}), ("regressor", {"label": "prices"}), ("search", {})):
        fitted(name, ledger=ledger, **more)
    dpoptim.private_mean(X[:, 0], -1, 1, epsilon=0.1, delta=1e-6, ledger=ledger, label="age")
    labels = [entry.label for entry in ledger.entries()]
    pair = "(epsilon=1 at delta=1e-05)"
    assert labels[0].startswith(f"DPLogisticRegression {pair}, ")
    assert labels[1].startswith(f"prices {pair}, ")
    assert labels[2] == f"DPSearchCV, DPLogisticRegression {pair}"
    assert labels[3] == "age"


def test_privacy_states_the_pair_of_the_ledger() -> None:
    learner = fitted("classifier", ledger=ledger_at(None))  # type: ignore[arg-type]
    (note,) = (each for each in learner.privacy_.notes if "as its ledger states it" in each)
    assert note.endswith("epsilon=0.837 at delta=0.0001")
    assert "epsilon=0.837 at delta=0.0001" in learner.ledger.describe()


def test_clones_have_the_label_and_no_charge(tmp_path: Path) -> None:
    for name in ("classifier", "pipeline", "search"):
        learner = fitted(name, label="the first", ledger=ledger_at(tmp_path / "l.sqlite"))
        copy = clone(learner)
        assert copy.get_params()["label"] == "the first"
        assert not hasattr(copy, "ledger_run_")


def test_a_fit_is_no_plan_to_attack(tmp_path: Path) -> None:
    folder = dpoptim.certify(fitted("classifier"), tmp_path / "run", data="made up")
    with pytest.raises(ValueError, match="attacks plans of steps"):
        audit_run(folder, trials=10, seed=0)


def test_a_record_comes_back_as_it_was() -> None:
    event = event_text(GaussianDpEvent(2.0))
    record = FitRecord("M", 10, event, "zero-out", 1e-5, "person", ("a note",))
    assert FitRecord.from_json(record.to_json()) == record


def test_parts_that_another_fit_has_fitted_are_certified_by_themselves(tmp_path: Path) -> None:
    """A pipeline's last step, say, whose later fit cost more than the pipeline's own."""
    rows = np.random.default_rng(0).uniform(-1, 1, (300, 2))
    labels = (rows[:, 0] > 0).astype(int)
    scale, last = DPStandardScaler(lower=-1, upper=1), DPLogisticRegression(classes=[0, 1])
    shared = [("s", scale), ("m", last)]
    first, second = (
        PrivatePipeline(shared, epsilon=epsilon, delta=1e-5).fit(rows, labels)
        for epsilon in (0.5, 8.0)
    )
    with pytest.raises(PrivacyError, match="fitted by another fit"):
        dpoptim.certify(first, tmp_path / "first", data="made up")
    dpoptim.certify(second, tmp_path / "second", data="made up")
    last.set_params(epsilon=20.0, delta=1e-5).fit(rows, labels)
    with pytest.raises(PrivacyError, match="fitted by another fit"):
        dpoptim.certify(second, tmp_path / "again", data="made up")


def test_settings_that_changed_after_the_fit_are_not_beside_its_guarantee(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).uniform(-1, 1, (300, 2))
    model = DPLogisticRegression(epsilon=1.0, delta=1e-5, classes=[0, 1])
    model.fit(rows, (rows[:, 0] > 0).astype(int)).set_params(epsilon=0.01)
    dpoptim.certify(model, tmp_path / "run", data="made up")
    written = json.loads((tmp_path / "run/certificate.json").read_text())
    assert not {"epsilon", "delta", "neighboring"} & {*written["training"]}
    assert written["guarantee"]["epsilon"] > 0.9


def test_a_unit_that_was_not_charged_is_refused(tmp_path: Path) -> None:
    """Also where the folder was written by somebody else, and only the ledger tells."""
    rows = np.random.default_rng(2).uniform(-1, 1, (300, 2))
    ledger = dpoptim.Ledger(tmp_path / "l.sqlite", neighboring="zero-out")
    model = DPLogisticRegression(epsilon=1.0, delta=1e-5, classes=[0, 1], ledger=ledger)
    model.fit(rows, (rows[:, 0] > 0).astype(int))
    dpoptim.certify(model, tmp_path / "run", data="made up")
    verify_run(tmp_path / "run", ledgers=[tmp_path / "l.sqlite"])
    model.privacy_ = replace(model.privacy_, unit="person")
    with pytest.raises(PrivacyError, match="charged for each record"):
        dpoptim.certify(model, tmp_path / "again", data="made up")
    with pytest.raises(ValueError, match="charged for each record"):
        check_ledger(tmp_path / "l.sqlite", ledger.entries()[0], record_of(model))
