"""Apply a schema: each record of a table becomes features by itself."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpoptim.data.numbers import as_days, as_numbers, as_texts, places_among
from dpoptim.data.preparation import UnitNorm
from dpoptim.data.schema import Column, Schema
from dpoptim.data.table_files import Chunk, Values, read_columns
from dpoptim.missing_values import is_missing

Floats = NDArray[np.float32]
UNMATCHED = (
    "column {!r}: no record has one of its categories; are they written otherwise in the schema?"
)


@dataclass(frozen=True)
class Encoded:
    """Some records in order.

    Attributes:
        first: number of the first record in its file, counted from 1.
        x: float32 of shape (records, schema.width).
        y: places among the classes (int64), or numbers to predict scaled to [-1, 1] (float32);
            None if not asked for.
        persons: whose row each is, as text; None without a person column.
        kept: columns that were asked for as they are, in the file's own values.
    """

    first: int
    x: Floats
    y: NDArray[np.int64] | NDArray[np.float32] | None
    persons: list[str] | None
    kept: Sequence[Values] = ()


def encode_table(
    path: Path, schema: Schema, *, labels: bool, persons: bool = False, keep: Sequence[str] = ()
) -> Iterator[Encoded]:
    """Read a table and apply the schema by column name, in chunks; other columns are ignored.

    Args:
        labels, persons: whether to read the target, and whose record each is; new records to
            predict need neither.
        keep: names of further columns, to come along unread.

    Raises:
        ValueError: the table is damaged, lacks a column of the schema, or holds a value that the
            schema does not allow. These messages are for the data's owner, before a run.

    **Guarantee.** A record's features are a function of that record and the schema.
    """
    target = schema.target if labels else None
    person = schema.person if persons else None
    if labels and target is None:
        raise ValueError("schema: no column of kind 'target'; say which one is to be predicted.")
    names = [column.name for column in schema.features]
    names += [target.name] if target else []
    names += [person] if person else []
    marks = {column.name: schema.missing_of(column) for column in schema.columns}
    for whole in read_columns(path, list(dict.fromkeys([*names, *keep])), schema.encoding):
        kept = [whole.columns[name] for name in keep]
        chunk = Chunk(
            whole.first,
            {
                name: gaps_emptied(values, marks.get(name, ()))
                for name, values in whole.columns.items()
            },
        )
        yield Encoded(
            chunk.first,
            encode_records(path, chunk, schema),
            None if target is None else targets_of(path, chunk, target, schema),
            None if person is None else persons_of(path, chunk, schema),
            kept,
        )


def gaps_emptied(values: Values, marks: Sequence[str]) -> Values:
    """The values, emptied where they are one of the marks that stand for none."""
    if not marks:
        return values
    none = places_among(marks, values) >= 0
    if isinstance(values, np.ndarray):
        values = values.astype(object)
        values[none] = None
        return values
    return ["" if gone else value for value, gone in zip(values, none.tolist(), strict=True)]


def encode_records(path: Path, chunk: Chunk, schema: Schema) -> Floats:
    """Features of the records, float32 of shape (records, schema.width)."""
    x: Floats = np.zeros((len(chunk), schema.width), dtype=np.float32)
    place = 0
    for column in schema.features:
        values = chunk.columns[column.name]
        if column.kind in ("number", "date"):
            numbers = (
                days_of(path, chunk, column)
                if column.kind == "date"
                else numbers_of(path, chunk, column, schema)
            )
            gaps = np.isnan(numbers)
            # infinite numbers of unscaled columns are refused below
            with np.errstate(over="ignore"):
                x[:, place] = np.where(
                    gaps, fill_value(column, schema), scaled_into_bounds(numbers, column, schema)
                )
            if column.fill is not None:
                x[:, place + 1] = gaps
        else:
            one_hot(x[:, place : place + column.width], values, column)
        place += column.width
    if schema.scaling == "unit-norm":
        x = UnitNorm()(x)
    finite = np.isfinite(x).all(1)
    if not finite.all():
        record = chunk.first + int(np.argmin(finite))
        raise ValueError(
            f"{path}: record {record} has a feature that is NaN or infinite; clean it, or give "
            "fill values."
        )
    return x


def scaled_into_bounds(
    numbers: NDArray[np.float64], column: Column, schema: Schema
) -> NDArray[np.float64]:
    """Numbers moved into the bounds, if any, and by ``scaling="bounds"`` to [-1, 1]."""
    if column.bounds is None:
        return numbers
    inside = np.clip(numbers, *column.bounds)
    if schema.scaling == "bounds":
        return to_unit(inside, column.bounds)
    return inside - column.bounds[0] if column.kind == "date" else inside


def to_unit(numbers: NDArray[np.float64], bounds: tuple[float, float]) -> NDArray[np.float64]:
    low, high = bounds
    return (numbers - (low + high) / 2) / ((high - low) / 2)


def fill_value(column: Column, schema: Schema) -> float:
    """The stand-in for a missing number, scaled; NaN where the schema names none."""
    if column.fill is not None:
        value = column.fill
    elif column.bounds is not None:
        value = sum(column.bounds) / 2
    else:
        return np.nan
    return float(scaled_into_bounds(np.array([value]), column, schema)[0])


def one_hot(features: Floats, values: Values, column: Column) -> None:
    found = places_among(column.categories, values)
    (rows,) = np.nonzero(found >= 0)
    features[rows, found[rows]] = 1


def numbers_of(path: Path, chunk: Chunk, column: Column, schema: Schema) -> NDArray[np.float64]:
    values = chunk.columns[column.name]
    decimal, thousands = schema.marks_of(column)
    numbers, bad = as_numbers(values, decimal, thousands, column.unit or "")
    if bad is not None:
        mark, other = ("point", ",") if decimal == "." else ("comma", ".")
        grouped = f"{thousands!r} between" if thousands else "no mark of"
        where = f"{path}, record {chunk.first + bad}: column {column.name!r} is not a number"
        if column.kind == "number" and column.bounds is None:  # as without a schema
            raise ValueError(
                f"{where}, as all columns are taken for where no schema describes them. Fix: "
                f"dpoptim schema new {path} drafts one; say there whether the column is a "
                "category, a date, or dropped, or how its numbers are written."
            )
        raise ValueError(
            f"{where} (with a decimal {mark} and {grouped} thousands). Fix: correct it; or, in the "
            f'schema that dpoptim schema new drafts, say decimal = "{other}" or thousands = '
            f'"{other}" above the columns or in this one, or in the column unit = "$" where a '
            "number is written $5; or make it a date or a category, or drop it."
        )
    return numbers


def days_of(path: Path, chunk: Chunk, column: Column) -> NDArray[np.float64]:
    days, bad = as_days(chunk.columns[column.name], column.format)
    if bad is not None:
        kind = "an ISO date" if column.format is None else f"a date written {column.format!r}"
        raise ValueError(
            f"{path}, record {chunk.first + bad}: column {column.name!r} is not {kind}. Fix: "
            "write dates as 2024-12-31, with a time (T10:30) if need be; or say in the schema how "
            'they are written, as format = "%d.%m.%Y" for 31.12.2024 (none for a file with types '
            "of its own); or make the column a category or drop it."
        )
    return days


def targets_of(
    path: Path, chunk: Chunk, target: Column, schema: Schema
) -> NDArray[np.int64] | NDArray[np.float32]:
    if target.bounds is not None:
        numbers = numbers_of(path, chunk, target, schema)
        if np.isnan(numbers).any():
            record = chunk.first + int(np.argmax(np.isnan(numbers)))
            raise ValueError(
                f"{path}: record {record} has no value of the target {target.name!r}; drop the "
                "record."
            )
        return to_unit(np.clip(numbers, *target.bounds), target.bounds).astype(np.float32)
    y = places_among(target.classes, chunk.columns[target.name])
    if (y < 0).any():
        other = int(np.argmax(y < 0))
        record = chunk.first + other
        if is_missing(as_texts(chunk.columns[target.name])[other]):
            raise ValueError(
                f"{path}: record {record} has no value of the target {target.name!r}; drop the "
                "record. (If such a text is a class of its own, add it to the declared classes.)"
            )
        raise ValueError(
            f"{path}: record {record} has a label outside the declared classes "
            f"{', '.join(target.classes)}; add it to the classes or drop the record. (Labels are "
            "compared as text, but that 1.0 is 1, and TRUE is true.)"
        )
    return y


def persons_of(path: Path, chunk: Chunk, schema: Schema) -> list[str]:
    person = next(column for column in schema.columns if column.kind == "person")
    values = chunk.columns[person.name]
    persons = as_texts(values)
    if isinstance(values, np.ndarray):  # NaN and NaT alone differ from themselves
        gaps = values != values  # noqa: PLR0124
        persons = ["" if gap else name for gap, name in zip(gaps, persons, strict=True)]
    unnamed = (not name if person.any_name else is_missing(name) for name in persons)
    nobody = next((place for place, gap in enumerate(unnamed) if gap), None)
    if nobody is not None:
        raise ValueError(
            f"{path}: record {chunk.first + nobody} belongs to nobody: column {person.name!r} is "
            "empty there, or says NA, null or the like. Fix: give it a person of its own, or drop "
            "it; or say any_name = true in the schema's column, if people are called so."
        )
    return persons


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
