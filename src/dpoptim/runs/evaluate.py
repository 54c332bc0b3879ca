"""``dpoptim evaluate``: a saved model's noisy score on private records, charged beforehand."""

import datetime
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
from numpy.typing import NDArray

from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.ledger_settings import PERSONS, dataset_of_unit
from dpoptim.data import Floats, Schema
from dpoptim.data.encoding import encode_table
from dpoptim.data.opened_files import name_of
from dpoptim.data.table_files import is_table
from dpoptim.evaluation import (
    ClassifierScores,
    RegressorScores,
    evaluate_classifier,
    evaluate_regressor,
)
from dpoptim.evaluation.scored_records import APART, LABEL, NO_LEDGER, Records
from dpoptim.plan import Plan
from dpoptim.printable import printable
from dpoptim.runs.evaluations import (
    Evaluation,
    costs_together,
    label_ending,
    read_evaluations,
)
from dpoptim.runs.outcome import try_writing
from dpoptim.runs.predict import outputs_of
from dpoptim.runs.result import LedgerEntry
from dpoptim.runs.saved_model import SavedModel, load_model, model_file
from dpoptim.runs.verify import read_certificate, read_document
from dpoptim.runs.whole_budget import whole_budget
from dpoptim.statistics import ask_first
from dpoptim.target_range import TargetRange

# a digest of private records that anybody can compute tells whether a guess of them is right
BY_NAME = "; files are compared by their names alone"


def evaluate_run(
    run: Path,
    data: Path,
    *,
    epsilon: float,
    delta: float,
    ledger: Path | None = None,
    budget: str | None = None,
    dataset: str | None = None,
    records: Records | None = None,
    neighboring: str | None = None,
    n: int | None = None,
    confidence: float = 0.95,
    noise_seed: int | None = None,
) -> Evaluation:
    """Score a saved model on private records: `evaluate_classifier`, `evaluate_regressor`.

    Args:
        run: a run directory, or its ``model.pt``, of a model of a table.
        data: the records, with every column of the run's schema, target included.
        epsilon, delta: what the evaluation may cost.
        ledger: the file in which it is charged, made if it does not exist; None: nowhere, which
            the guarantee then says.
        budget: of a new ledger, ``"EPSILON,DELTA"``; None: it writes down, and refuses nothing.
        dataset: the ledger's name for its records; None: its file's name, or as it is stored.
        records: ``"hold-out"``, or ``"training"``: among those that the model was trained on. None:
            a hold-out, where neither ledger nor file is known to be of the training.
        neighboring: None: the ledger's relation; else ``"add-or-remove-one"`` with ``n``, and
            ``"zero-out"`` without.
        n: public number of records (of persons, where the schema names a person column).
        confidence: of the intervals, in (0, 1).
        noise_seed: repeatable noise, for tests; the guarantee then says that it is not for release.

    Returns:
        the scores, and how they were charged; `evaluations.keep` writes it down.

    Raises:
        FileNotFoundError, ValueError: naming file, column and fix; before anything is spent.
        BudgetExceeded: the ledger does not admit it; nothing is drawn.

    **Guarantee.** ``guarantee`` of the scores, charged before the noise is drawn. Each record is
    encoded and goes through the model by itself, so that no record's score depends on another.
    Where the schema names a person column, only the first record of each person counts, and the
    guarantee is per person. It is that of the scores alone: for records that the model was trained
    on, the training comes on top, as their ledger counts it.
    """
    saved = load_model(run)
    if not isinstance(saved.encoding, Schema):
        raise ValueError(
            f"{run} was not trained on a table; dpoptim.evaluation.evaluate_classifier scores any "
            "predictions."
        )
    if not data.is_file():
        raise FileNotFoundError(f"{data} does not exist; name a file with hold-out records.")
    if not is_table(data):
        raise ValueError(
            f"{data}: the model was trained on a table; give one with the same columns."
        )
    file = model_file(run)
    folder = file.parent
    costs_together(read_evaluations(folder)["evaluations"])  # to which this one is added
    training = event_of_training(folder)
    try_writing(folder)
    model = hashlib.sha256(file.read_bytes()).hexdigest()
    unit = "record" if saved.encoding.person is None else "person"
    with open_ledger(ledger, budget, dataset, neighboring, unit, n) as charged:
        relation = charged.neighboring
        if relation == "add-or-remove-one" and n is None:
            raise ValueError(
                "--n is missing: add-or-remove-one hides how many records there are, and the "
                "ledger, if one is named, keeps to it. Fix: --n, a public estimate; or a ledger "
                "under zero-out."
            )
        kind = kind_of_records(folder, data, charged, records)
        ask_first(charged, epsilon=epsilon, delta=delta, neighboring=relation)
        outputs, y = outputs_and_targets(saved, saved.encoding, data)
        common: dict[str, Any] = {
            "epsilon": epsilon,
            "delta": delta,
            "confidence": confidence,
            "neighboring": relation,
            "n": n,
            "ledger": charged,
            "label": label_of(folder, model),
            "records": kind,
            "noise_seed": noise_seed,
        }
        scores = scores_of(saved, outputs, y, common)
        charge = next(each for each in charged.entries() if each.id == charged.made[-1])
        left = str(charged.remaining())
        entry = LedgerEntry(str(ledger), charged.dataset, charge.id, left)
    notes = [f"{note}{BY_NAME}" if note == APART else note for note in scores.guarantee.notes]
    notes += [] if ledger is not None else [NO_LEDGER]
    return Evaluation(
        replace(scores, guarantee=replace(scores.guarantee, unit=unit, notes=tuple(notes))),
        name_of(data),
        kind,
        charge.event,
        None if ledger is None else entry,
        model,
        datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        training if kind == "training" else None,
    )


def label_of(folder: Path, model: str) -> str:
    """The evaluation in a ledger: it names run and model, by which `verify` finds it."""
    return f"{LABEL} of {folder.resolve().name[:100]}, {label_ending(model)}"


def kind_of_records(folder: Path, data: Path, ledger: Ledger, said: Records | None) -> Records:
    """Kind of records, by what is public; a doubt is for the caller to settle.

    Raises:
        ValueError: the ledger, or the file's name, is that of the training, and nothing was said;
            or what was said cannot be.
    """
    trained_on, reservation = training_of(folder)
    counted = reservation is not None and any(each.id == reservation for each in ledger.entries())
    if said == "training" and not counted:
        raise ValueError(
            "--records training: their ledger counts the training, too, and the one named does "
            "not hold its charge. Fix: --ledger, the training's own; or a hold-out."
        )
    if said is not None:
        return said
    if counted or name_of(data) == trained_on:
        why = (
            "the ledger holds the charge of this model's own training"
            if counted
            else f"the model was trained on a file of the same name, {printable(name_of(data))!r}"
        )
        raise ValueError(
            f"{why}, so these records may be those it was trained on, whose scores say nothing of "
            "new ones. Fix: --records hold-out, if a rule or coin for each record alone kept them "
            "from the training (on your word, which is written down); --records training, if not; "
            "or the ledger of a hold-out of its own."
        )
    return "hold-out"


def training_of(folder: Path) -> tuple[str | None, str | None]:
    """The training's data set and its charge, where the run directory names them."""
    if (folder / "certificate.json").is_file():
        written = read_document(folder / "certificate.json", read_certificate)
        return written["data"]["name"], (written["ledger"] or {}).get("reservation")
    if (folder / "tune.json").is_file():
        found = read_document(folder / "tune.json", read_search)
        return found.get("data"), found.get("reservation")
    return None, None


def read_search(text: str) -> dict[str, Any]:
    """The outcome of a search. ValueError for a text that is none."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError("it is damaged. Fix: give the folder that `dpoptim tune --out` wrote.")
    return found


def event_of_training(folder: Path) -> dp_accounting.DpEvent | None:
    """Event of the training, where its run directory has a plan."""
    path = folder / "plan.json"
    return read_document(path, Plan.from_json).event if path.is_file() else None


@contextmanager
def open_ledger(
    path: Path | None,
    budget: str | None,
    dataset: str | None,
    neighboring: str | None,
    unit: str,
    n: int | None,
) -> Iterator[Ledger]:
    """The ledger file, or one in memory.

    A new one takes the relation named, or as in `dpoptim train` add-or-remove-one where n is
    public, else zero-out.

    Raises:
        ValueError: it counts what persons spend and the evaluation is per record, or the other way
            round.
    """
    existing = path is not None and path.exists()
    usual = "zero-out" if n is None else "add-or-remove-one"
    relation = neighboring if existing else neighboring or usual
    name = None if path is None or existing else dataset or path.stem
    name = dataset if name is None else name
    name = None if name is None else dataset_of_unit(name, unit)
    epsilon, delta = whole_budget(budget, path)
    with Ledger(path, dataset=name, epsilon=epsilon, delta=delta, neighboring=relation) as ledger:
        if path is not None and ledger.dataset.endswith(PERSONS) != (unit == "person"):
            raise ValueError(
                f"{path} is the ledger of {ledger.dataset!r}, and this evaluation's guarantee is "
                f"per {unit}; guarantees of records and of persons do not add up. Fix: name "
                "another ledger."
            )
        yield ledger.of_units(unit)


def scores_of(
    saved: SavedModel, outputs: NDArray[np.float64], y: NDArray[np.float64], common: dict[str, Any]
) -> ClassifierScores | RegressorScores:
    if saved.target_bounds is None:
        return evaluate_classifier(outputs, y, classes=range(len(saved.class_names)), **common)
    targets = TargetRange.of(saved.target_bounds).unscaled(y)
    return evaluate_regressor(outputs[:, 0], targets, target_bound=saved.target_bounds, **common)


def outputs_and_targets(
    saved: SavedModel, schema: Schema, data: Path
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Outputs of records that count, (records, outputs), and their targets. Private."""
    outputs: list[NDArray[np.float64]] = []
    targets: list[NDArray[np.float64]] = []
    seen: set[str] = set()
    for chunk in encode_table(data, schema, labels=True, persons=schema.person is not None):
        assert chunk.y is not None
        counting = (
            first_of_each(chunk.persons, seen) if chunk.persons is not None else range(len(chunk.x))
        )
        outputs += [outputs_of_one(saved, chunk.x[row]) for row in counting]
        targets.append(chunk.y[list(counting)].astype(np.float64))
    if not outputs:
        raise ValueError(f"{data} holds no records; give a table with hold-out records.")
    return np.stack(outputs), np.concatenate(targets)


def first_of_each(persons: list[str], seen: set[str]) -> list[int]:
    """Rows of persons not seen before, who are seen now."""
    rows = []
    for row, person in enumerate(persons):
        if person not in seen:
            seen.add(person)
            rows.append(row)
    return rows


def outputs_of_one(saved: SavedModel, x: Floats) -> NDArray[np.float64]:
    """One record through the model alone: in a batch, its last digits could depend on others."""
    return outputs_of(saved, x[None])[0]
