"""Exact audit of raw data as they are read: what a record becomes is its own affair.

So it is with features of tables and images; and with columns, whose values, labels and owners are
read one by one, whoever else is there. Programs hold a column by what is in it: whole numbers as
floats where one has a gap, numbers as text where one is a word. So one record may change how all
others look.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from dpoptim.audit.bounds import Floats
from dpoptim.audit.small_runs import linear_of_zeros
from dpoptim.audit.statistics import PUBLIC, RECORDS, shifts_seen
from dpoptim.data.encoding import encode_table
from dpoptim.data.preparation import CHUNK, STEPS
from dpoptim.data.schema import Schema, parse_schema
from dpoptim.evaluation import evaluate_classifier
from dpoptim.methods import DPSGD
from dpoptim.preprocessing import DPClassCounts, DPOneHot
from dpoptim.privacy_unit import Unit
from dpoptim.training.attach import attach
from dpoptim.training.batches.privacy_units import Persons

TABLE = """
[columns.age]
kind = "number"
bounds = [0, 100]
fill = 50
[columns.since]
kind = "date"
bounds = [2020-01-01, 2020-12-31]
fill = 2020-06-01
[columns.town]
kind = "category"
categories = ["jena", "1"]
"""
ROWS = [  # each with something that no other has
    ("20", "2020-03-01", "jena"),
    ("-1e30", "1900-01-01", "1.0"),
    ("", "", ""),
    ("1e30", "2999-12-31", "ulm"),
    ("80", "2020-11-01T12:00+02:00", "1"),
]
# a text between quotation marks, as programs write it that do not double those inside
STRAY = ("50", "2020-03-01", '"said ""')
SETTINGS: dict[str, dict[str, Any]] = {"divide": {"by": 255.0}}  # of steps that have no defaults
OTHERS = (1, 2, None, 2, 1, 3)
STRANGE = (None, 2.5, "word", "2.0", 1e300)  # each held otherwise than whole numbers are
CLASSES = (1, 2)
OWNED_TABLE = """
[columns.age]
kind = "number"
bounds = [0, 9]
[columns.code]
kind = "category"
categories = ["1", "2"]
[columns.who]
kind = "person"
[columns.ill]
kind = "target"
classes = ["0", "1"]
"""


def encoded(records: Sequence[tuple[str, ...]], schema: Schema) -> Floats:
    """The records' features as `dpoptim train` reads them from a file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        names = tuple(column.name for column in schema.columns)
        path.write_text("".join(",".join(record) + "\n" for record in (names, *records)))
        parts = [part.x for part in encode_table(path, schema, labels=False)]
    return np.concatenate(parts).astype(np.float64)


def encoding() -> str:
    """The detector: features that depend on another record, or are longer than the norm bound."""
    schema, found = parse_schema(TABLE), []
    together = encoded(ROWS, schema)
    for place, record in enumerate(ROWS):
        others = encoded(ROWS[:place] + ROWS[place + 1 :], schema)
        if not np.array_equal(others, np.delete(together, place, axis=0)):
            found.append(f"refuted: without {record} the features of others are not the same")
            break
    found += stray_marks(schema)
    assert schema.row_norm is not None
    longest = float(np.linalg.norm(together, axis=1).max())
    if longest > schema.row_norm * (1 + 1e-6):
        found.append(f"refuted: a record is {longest:.4g} long, {schema.row_norm:.4g} is promised")
    return "; ".join(found)


def stray_marks(schema: Schema) -> list[str]:
    """Records that decide how others are read, by a quotation mark; a table may be refused."""
    records = [(age, since, f'"{town}"') for age, since, town in ROWS]
    together = encoded(records, schema)
    for place in range(len(records)):
        try:
            others = encoded([*records[:place], STRAY, *records[place + 1 :]], schema)
        except ValueError:
            continue
        if not np.array_equal(np.delete(others, place, 0), np.delete(together, place, 0)):
            return [f"refuted: with {STRAY} in its place, others are read otherwise"]
    return []


def image_features() -> str:
    """The detector: features of an image that depend on the others, to the last bit.

    Every listed step, on more colour images than are prepared at a time.
    """
    images = np.random.default_rng(0).uniform(0, 1, (CHUNK + 2, 3, 8, 8)).astype(np.float32)
    watched, found = (0, CHUNK + 1), []
    for name, kind in STEPS.items():
        step = kind(**SETTINGS.get(name, {}))
        together = step(images)
        for place in watched:
            others = np.sqrt(images)
            others[place] = images[place]
            alone = step(images[place : place + 1])[0]
            if not np.array_equal(alone, together[place]):
                found.append(f"refuted: {name} gives an image other features when it is alone")
            elif not np.array_equal(step(others)[place], alone):
                found.append(f"refuted: {name} gives an image other features beside other images")
    return "; ".join(dict.fromkeys(found))


def column_as_held(values: Sequence[Any]) -> list[Any]:
    """A column as programs hold it, who choose one type for all of its values."""
    if any(isinstance(value, str) for value in values):
        return [None if value is None else str(value) for value in values]
    if any(value is None or isinstance(value, float) for value in values):
        return [float("nan") if value is None else float(value) for value in values]
    return list(values)


def shift_by_record(fit: Callable[[list[Any]], Any], record: Any) -> float:
    """How far one record moves what is released, in units of its bound for this price."""
    with shifts_seen() as absent:
        fit(column_as_held(OTHERS))
    with shifts_seen() as present:
        fit(column_as_held((*OTHERS, record)))
    (before, deviation), (after, _) = absent[0], present[0]
    return float((after - before).norm()) / deviation


def codes(values: Sequence[Any]) -> tuple[np.ndarray, list[Any]]:
    """A column encoded by public categories, and those that it was encoded by."""
    column = np.empty((len(values), 1), dtype=object)
    column[:, 0] = column_as_held(values)
    step = DPOneHot([[*CLASSES, None]])
    return step.fit_transform(column), step.categories_


def columns() -> str:
    """The detector: others' codes or counts that one record moves, or a code of its own."""
    found = []
    alone, names = codes(OTHERS)
    fits: dict[str, Callable[[list[Any]], Any]] = {
        "a count of classes": lambda y: DPClassCounts(CLASSES, **PUBLIC).fit(y),
        "an evaluation": lambda y: evaluate_classifier(
            np.full((len(y), 2), 0.5), y, classes=CLASSES, bins=2, **PUBLIC
        ),
    }
    whole = {name: shift_by_record(fit, 1) for name, fit in fits.items()}
    for record in STRANGE:
        together, by = codes((*OTHERS, record))
        if together.shape[1] != alone.shape[1] or by != names:
            found.append(f"refuted: {record!r} makes a category of its own")
        elif not np.array_equal(together[:-1], alone):
            found.append(f"refuted: beside {record!r} others have other categories")
        elif np.linalg.norm(together[-1]) > 1:
            found.append(f"refuted: {record!r} is in two categories of one column")
        for name, fit in fits.items():
            if shift_by_record(fit, record) > whole[name] * (1 + 1e-9):
                found.append(f"refuted: {record!r} moves {name} by more than any label")
    return "; ".join(found)


def reads_rows_without_owner(read: Callable[[], Any]) -> bool:
    """Whether rows without an owner are read as somebody's."""
    try:
        read()
    except ValueError:
        return False
    return True


def owners() -> str:
    """The detector: several rows without an owner that are taken for one person's."""
    found = []
    for word in ("", "NA"):
        names = ["ann", word, word, "bob"]
        for where, read in readers(names).items():
            if reads_rows_without_owner(read):
                found.append(f"refuted: rows of {word!r} {where} are one person's")
    return "; ".join(found)


def readers(names: list[str]) -> dict[str, Callable[[], Any]]:
    """Ways by which owners of rows come in."""

    def from_a_file() -> None:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "table.csv"
            lines = [f'1,1,"{name}",0\n' for name in names]
            path.write_text("".join(["age,code,who,ill\n", *lines]))
            for _ in encode_table(path, parse_schema(OWNED_TABLE), labels=True, persons=True):
                pass

    return {
        "in persons=": lambda: Persons.of(names, len(names), 2),
        "in a table": from_a_file,
        "in a hold-out": lambda: scored(names),
    }


def scored(names: list[str]) -> None:
    """Score a model in training, whose guarantee is of persons, on rows of these owners."""
    plan = DPSGD(1.0).plan(
        n=RECORDS, batch_size=3, steps=1, delta=1e-5, noise_multiplier=1.0, neighboring="zero-out"
    )
    plan = dataclasses.replace(plan, unit=Unit("person", 2))
    data = TensorDataset(torch.zeros(RECORDS, 2), torch.arange(RECORDS) % 2)
    hold_out = TensorDataset(torch.zeros(len(names), 2), torch.arange(len(names)) % 2)
    model = linear_of_zeros(2, 2, bias=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own: dict[str, Any] = {"persons": range(RECORDS), "rows_per_record": 2, "noise_seed": 0}
    with attach(plan, model, optimizer, data, **own) as private:
        private.evaluate(hold_out, persons=names, epsilon=1.0, noise_seed=0)
