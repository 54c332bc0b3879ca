"""``dpoptim evaluate``: a saved model's noisy score on private records, charged beforehand."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.ledger_settings import PERSONS
from dpoptim.data import Floats, Schema
from dpoptim.data.encoding import encode_table
from dpoptim.data.table_files import is_table
from dpoptim.evaluation import (
    ClassifierScores,
    RegressorScores,
    evaluate_classifier,
    evaluate_regressor,
)
from dpoptim.runs.predict import outputs_of
from dpoptim.runs.saved_model import SavedModel, load_model
from dpoptim.statistics import ask_first
from dpoptim.target_range import TargetRange

NO_LEDGER = "this evaluation alone: no ledger counts what else these records cost"


def evaluate_run(
    run: Path,
    data: Path,
    *,
    epsilon: float,
    delta: float,
    ledger: Path | None = None,
    neighboring: str | None = None,
    n: int | None = None,
    confidence: float = 0.95,
    noise_seed: int | None = None,
) -> ClassifierScores | RegressorScores:
    """Score a saved model on private records: `evaluate_classifier`, `evaluate_regressor`.

    Args:
        run: a run directory, or its ``model.pt``, of a model of a table.
        data: the records, with every column of the run's schema, target included.
        epsilon, delta: what the evaluation may cost.
        ledger: the file in which it is charged, made without a budget if it does not exist; None:
            nowhere, which the guarantee then says.
        neighboring: None: the ledger's relation, else ``"zero-out"``.
        n: public number of records (of persons, where the schema names a person column).
        confidence: of the intervals, in (0, 1).
        noise_seed: repeatable noise, for tests; the guarantee then says that it is not for release.

    Raises:
        FileNotFoundError, ValueError: naming file, column and fix; before anything is spent.
        BudgetExceeded: the ledger does not admit it; nothing is drawn.

    **Guarantee.** ``guarantee`` of the scores, charged before the noise is drawn. Each record is
    encoded and goes through the model by itself, so that no record's score depends on another.
    Where the schema names a person column, only the first record of each person counts, and the
    guarantee is per person.
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
    unit = "record" if saved.encoding.person is None else "person"
    with opened(ledger, neighboring, unit) as charged:
        relation = (neighboring or "zero-out") if charged is None else charged.neighboring
        if relation == "add-or-remove-one" and n is None:
            raise ValueError(
                "--n is missing: add-or-remove-one hides how many records there are, and the "
                "ledger, if one is named, keeps to it. Fix: --n, a public estimate; or a ledger "
                "under zero-out."
            )
        ask_first(charged, epsilon=epsilon, delta=delta, neighboring=relation)
        outputs, y = outputs_and_targets(saved, saved.encoding, data)
        common: dict[str, Any] = {
            "epsilon": epsilon,
            "delta": delta,
            "confidence": confidence,
            "neighboring": relation,
            "n": n,
            "ledger": charged,
            "noise_seed": noise_seed,
        }
        scores = scores_of(saved, outputs, y, common)
    notes = scores.guarantee.notes if ledger is not None else (*scores.guarantee.notes, NO_LEDGER)
    return replace(scores, guarantee=replace(scores.guarantee, unit=unit, notes=notes))


@contextmanager
def opened(path: Path | None, neighboring: str | None, unit: str) -> Iterator[Ledger | None]:
    """The ledger file; a new one takes the relation named, or zero-out. None: no ledger.

    Raises:
        ValueError: it counts what persons spend and the evaluation is per record, or the other way
            round.
    """
    if path is None:
        yield None
        return
    existing = path.exists()
    relation = neighboring if existing else neighboring or "zero-out"
    name = None if existing else path.stem + (PERSONS if unit == "person" else "")
    with Ledger(path, dataset=name, neighboring=relation) as ledger:
        if ledger.dataset.endswith(PERSONS) != (unit == "person"):
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


def to_json(scores: ClassifierScores | RegressorScores) -> dict[str, Any]:
    """The scores as strict JSON can hold them."""
    found = {**asdict(scores), "guarantee": scores.guarantee.to_json()}
    if isinstance(scores, ClassifierScores):
        found["confusion"] = scores.confusion.tolist()
        found["histogram"] = scores.histogram.tolist()
    return found
