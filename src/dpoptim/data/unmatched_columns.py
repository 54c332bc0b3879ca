"""Columns of categories that no record of a file has: maybe they are written otherwise."""

from pathlib import Path

import numpy as np

from dpoptim.data.encoding import Floats, encode_table
from dpoptim.data.schema import Schema

UNMATCHED = (
    "column {!r}: no record has one of its categories; are they written otherwise in the schema?"
)


class UnmatchedColumns:
    """Finds them chunk by chunk. Private, as the records are."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._found = np.zeros(schema.width, dtype=bool)
        self._records = 0

    def add(self, x: Floats) -> None:
        """Look at some records' features, of shape (records, schema.width)."""
        self._found |= (x != 0).any(0)
        self._records += len(x)

    def names(self) -> tuple[str, ...]:
        """Columns of categories without any, in order; none of a file without records."""
        found, place = [], 0
        for column in self._schema.features:
            of_it = self._found[place : place + column.width]
            if column.kind == "category" and self._records and not of_it.any():
                found.append(column.name)
            place += column.width
        return tuple(found)


def unmatched_columns(path: Path, schema: Schema) -> tuple[str, ...]:
    """Those of a whole table. Private.

    Raises:
        ValueError: as `encode_table` has it.
    """
    columns = UnmatchedColumns(schema)
    for encoded in encode_table(path, schema, labels=False):
        columns.add(encoded.x)
    return columns.names()
