"""Exact audit of tables and images as they are read: a record's features are its own."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dpoptim.data.encoding import encode_table
from dpoptim.data.preparation import CHUNK, STEPS
from dpoptim.data.schema import Schema, parse_schema
from dpoptim.statistics import Floats

SCHEMA = """
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
RECORDS = [  # each with something that no other has
    ("20", "2020-03-01", "jena"),
    ("-1e30", "1900-01-01", "1.0"),
    ("", "", ""),
    ("1e30", "2999-12-31", "ulm"),
    ("80", "2020-11-01T12:00+02:00", "1"),
]


# a text between quotation marks, as programs write it that do not double those inside
STRAY = ("50", "2020-03-01", '"said ""')


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
    schema, found = parse_schema(SCHEMA), []
    together = encoded(RECORDS, schema)
    for place, record in enumerate(RECORDS):
        others = encoded(RECORDS[:place] + RECORDS[place + 1 :], schema)
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
    records = [(age, since, f'"{town}"') for age, since, town in RECORDS]
    together = encoded(records, schema)
    for place in range(len(records)):
        try:
            others = encoded([*records[:place], STRAY, *records[place + 1 :]], schema)
        except ValueError:
            continue
        if not np.array_equal(np.delete(others, place, 0), np.delete(together, place, 0)):
            return [f"refuted: with {STRAY} in its place, others are read otherwise"]
    return []


SETTINGS: dict[str, dict[str, Any]] = {"divide": {"by": 255.0}}  # of steps that have no defaults


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
