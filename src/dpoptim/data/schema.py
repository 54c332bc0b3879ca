"""A schema: the public description of a table, from which every record is encoded by itself.

Bounds, categories and fill values are said by people who know the domain, never read off private
data. So scaling by them costs no privacy, and a model that was trained with a schema reads new
rows by column name.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from dpoptim.arguments import real_number
from dpoptim.data.column_names import expand_ranges
from dpoptim.data.numbers import day_number
from dpoptim.data.opened_files import UTF8, known_encoding
from dpoptim.data.schema_values import (
    bounds_of,
    flag_of,
    is_left_open,
    missing_bounds,
    refuse_format,
    texts_of,
)

Kind = Literal["number", "date", "category", "drop", "person", "target"]
Scaling = Literal["bounds", "unit-norm", "none"]
Decimal = Literal[".", ","]
Thousands = Literal["", ".", ",", " ", "'"]
OF_TABLE: dict[str, Any] = {"scaling": Scaling, "decimal": Decimal, "thousands": Thousands}
OPTIONS: dict[Kind, tuple[str, ...]] = {
    "number": ("bounds", "fill", "unit", "decimal", "thousands", "missing"),
    "date": ("bounds", "fill", "format", "missing"),
    "category": ("categories",),
    "drop": (),
    "person": ("missing", "any_name"),
    "target": ("classes", "bounds", "unit", "decimal", "thousands"),
}


@dataclass(frozen=True)
class Column:
    """Public knowledge about one column.

    Attributes:
        name: as in the file's first line.
        kind: ``"number"``; ``"date"``; ``"category"``; ``"drop"``: not looked at; ``"person"``:
            whose row it is; ``"target"``: what is predicted.
        bounds: of a number: lowest and highest value; what lies outside is moved to the nearer
            one. None: not scaled. Of a date: first and last day, in whole days since 1970-01-01.
        fill: stands for a missing number or date (in the units of ``bounds``), whose absence then
            also makes a feature of its own. None: the middle of the bounds stands for it, and
            nothing else is said.
        unit: for readers, such as ``"years"``; and what a file may write before or behind the
            number, such as ``"$"``.
        categories: the values that count, each a feature; any other value, or none, sets no
            feature.
        classes: the values of a target to classify, in order. A target with ``bounds`` instead is
            a number to predict.
        format: how a file writes a date, as `datetime.strptime` takes it (``"%d.%m.%Y"`` for
            31.12.2024); None: 2024-12-31, with or without a time.
        decimal, thousands, missing: of a column that is written otherwise than the table's others;
            None: as these are.
        any_name: of persons: whether NA, null and the like are names; an empty text is none.
    """

    name: str
    kind: Kind
    bounds: tuple[float, float] | None = None
    fill: float | None = None
    unit: str | None = None
    categories: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    format: str | None = None
    decimal: Decimal | None = None
    thousands: Thousands | None = None
    missing: tuple[str, ...] | None = None
    any_name: bool = False

    @property
    def width(self) -> int:
        """The number of features that it makes."""
        if self.kind in ("number", "date"):
            return 1 if self.fill is None else 2
        return len(self.categories) if self.kind == "category" else 0


@dataclass(frozen=True)
class Schema:
    """The columns of a table, and how records are scaled.

    Attributes:
        columns: in the order of the features.
        scaling: ``"bounds"``: each number to [-1, 1] by its bounds; ``"unit-norm"``: each record
            to Euclidean norm 1 by itself; ``"none"``. Dates that are not scaled by their bounds
            count days from the first.
        decimal: the mark in numbers that a file has as text.
        thousands: the mark between their groups of digits: ``"."``, ``","``, ``" "`` (also one that
            does not break) or ``"'"``; ``""``: there is none, and a number with one is refused.
        missing: what stands for no number, date or person, beside nothing, NA, null and the like.
        encoding: of a file of text, as pandas names it; a byte-order mark in the file goes before.
    """

    columns: tuple[Column, ...]
    scaling: Scaling = "bounds"
    decimal: Decimal = "."
    thousands: Thousands = ""
    missing: tuple[str, ...] = ()
    encoding: str = UTF8

    def __post_init__(self) -> None:
        for kind in ("target", "person"):
            several = [column.name for column in self.columns if column.kind == kind]
            if len(several) > 1:
                raise ValueError(
                    f"schema: {' and '.join(several)} are both of kind {kind!r}; choose one."
                )
        if not any(column.width for column in self.columns):
            raise ValueError(
                "schema: no column of kind 'number', 'date' or 'category'; there is nothing to "
                "learn from."
            )
        if self.thousands == self.decimal:
            raise ValueError(same_marks("", self.decimal))
        for column in self.columns:
            decimal, thousands = self.marks_of(column)
            if decimal == thousands:
                raise ValueError(same_marks(f"column {column.name!r}: ", decimal))
            scaled = column.kind == "date" or (column.kind == "number" and self.scaling == "bounds")
            if scaled and column.bounds is None:
                raise ValueError(missing_bounds(column.name, column.kind))

    def marks_of(self, column: Column) -> tuple[Decimal, Thousands]:
        """The decimal mark of a column's numbers, and the one between groups of digits."""
        return (
            self.decimal if column.decimal is None else column.decimal,
            self.thousands if column.thousands is None else column.thousands,
        )

    def missing_of(self, column: Column) -> tuple[str, ...]:
        """Texts that stand for no value in a column; none where a list says what counts."""
        listed = column.kind == "category" or column.classes
        return () if listed else self.missing if column.missing is None else column.missing

    @cached_property
    def features(self) -> tuple[Column, ...]:
        """The columns that make features, in order."""
        return tuple(column for column in self.columns if column.width)

    @property
    def width(self) -> int:
        return sum(column.width for column in self.features)

    @property
    def target(self) -> Column | None:
        return next((column for column in self.columns if column.kind == "target"), None)

    @property
    def person(self) -> str | None:
        return next((column.name for column in self.columns if column.kind == "person"), None)

    @property
    def row_norm(self) -> float | None:
        """A public bound on the norm of an encoded record; None where nothing bounds it."""
        if self.scaling == "none":
            return None
        if self.scaling == "unit-norm":
            return 1.0
        # A number and the mark that it is missing, or one category of a column: each feature
        # within [-1, 1].
        return (
            float(sum(1 if column.kind == "category" else column.width for column in self.features))
            ** 0.5
        )


def read_schema(path: str | Path) -> Schema:
    """Read a schema from a TOML file.

    Args:
        path: of the file.

    Returns:
        the schema.

    Raises:
        FileNotFoundError; ValueError: naming the file, the column and the fix.

    Examples:
        >>> from pathlib import Path
        >>> from dpoptim.data import read_schema
        >>> text = '''
        ... [columns.age]
        ... kind = "number"
        ... bounds = [18, 95]
        ... [columns.ill]
        ... kind = "target"
        ... classes = ["no", "yes"]
        ... '''
        >>> _ = Path("visits.schema.toml").write_text(text)
        >>> [column.name for column in read_schema("visits.schema.toml").columns]
        ['age', 'ill']
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; save it as UTF-8.") from None
    try:
        return parse_schema(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_schema(text: str) -> Schema:
    """Parse a schema in TOML, as `dpoptim.data.schema_files.to_toml` writes it.

    Args:
        text: of the file.

    Returns:
        the schema.

    Raises:
        ValueError: naming the column and the fix.

    Examples:
        >>> from dpoptim.data import parse_schema
        >>> text = '''
        ... [columns.age]
        ... kind = "number"
        ... bounds = [18, 95]
        ... [columns.ill]
        ... kind = "target"
        ... classes = ["no", "yes"]
        ... '''
        >>> parse_schema(text).target.name
        'ill'
    """
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"schema: no TOML ({str(error)[:200]}).") from None
    surplus = document.keys() - {*OF_TABLE, "encoding", "missing", "columns"}
    if surplus:
        raise ValueError(
            f"schema: unknown entry {min(surplus)!r}; known are {', '.join(OF_TABLE)}, encoding, "
            "missing and [columns.NAME]."
        )
    columns = document.get("columns")
    of_table = {name: mark_of(name, document[name]) for name in OF_TABLE if name in document}
    if "encoding" in document:
        of_table["encoding"] = known_encoding(document["encoding"], "schema: encoding")
    if "missing" in document:
        of_table["missing"] = texts_of("", "missing", document["missing"])
    if not isinstance(columns, dict) or not all(
        isinstance(entry, dict) for entry in columns.values()
    ):
        raise ValueError("schema: it must hold a table [columns.NAME] for each column.")
    open_ones = [name for name, entry in columns.items() if is_open(entry)]
    if len(open_ones) > 1:
        raise ValueError(
            f"schema: {len(open_ones)} columns are to be filled in: "
            f"{', '.join(map(repr, open_ones))}. Fix: kinds, bounds, categories and classes as "
            'they are publicly known, such as bounds = [0, 120]; or kind = "drop".'
        )
    return Schema(tuple(column_of(*each) for each in expand_ranges(columns).items()), **of_table)


def same_marks(where: str, mark: str) -> str:
    return (
        f"schema: {where}decimal and thousands are both {mark!r}. Fix: say how a number is "
        'written, such as decimal = "," and thousands = "." for 1.234,5.'
    )


def mark_of(name: str, given: object, where: str = "") -> Any:
    """An entry above all columns or in one, such as the decimal mark."""
    known = get_args(OF_TABLE[name])
    if not isinstance(given, str) or given not in known:
        raise ValueError(
            f"schema: {where}{name} must be one of {', '.join(map(repr, known))}, got {given!r}."
        )
    return given


def is_open(entry: Mapping[str, Any]) -> bool:
    """Whether a column is as it was drafted."""
    return any(map(is_left_open, entry.values()))


def column_of(name: str, entry: Mapping[str, Any]) -> Column:
    """A column from its TOML table; refuses unknown, missing and wrong entries by name."""
    kind = entry.get("kind")
    if kind not in OPTIONS:
        raise ValueError(
            f"schema: column {name!r}: kind must be one of {', '.join(OPTIONS)}, got {kind!r}."
        )
    surplus = entry.keys() - {"kind", *OPTIONS[kind]}
    if surplus:
        known = ", ".join(OPTIONS[kind]) or "nothing else"
        raise ValueError(f"schema: column {name!r}: a {kind} takes {known}; not {min(surplus)!r}.")
    unit = entry.get("unit")
    if unit is not None and not isinstance(unit, str):
        raise ValueError(f"schema: column {name!r}: unit must be text, got {unit!r}.")
    where = f"column {name!r}: "
    read = day_number if kind == "date" else real_number
    column = Column(
        name,
        kind,
        bounds=bounds_of(name, kind, entry["bounds"]) if "bounds" in entry else None,
        fill=read(f"schema: column {name!r}: fill", entry["fill"]) if "fill" in entry else None,
        unit=unit,
        categories=texts_of(where, "categories", entry.get("categories", [])),
        classes=texts_of(where, "classes", entry.get("classes", [])),
        missing=texts_of(where, "missing", entry["missing"]) if "missing" in entry else None,
        any_name=flag_of(where, "any_name", entry.get("any_name", False)),
        format=entry.get("format"),
        **{
            mark: mark_of(mark, entry[mark], where)
            for mark in ("decimal", "thousands")
            if mark in entry
        },
    )
    refuse_incomplete(column)
    return column


def refuse_incomplete(column: Column) -> None:
    """Refuse columns without what their kind needs, or whose entries contradict each other."""
    name, kind = column.name, column.kind
    if kind == "category" and not column.categories:
        raise ValueError(
            f'schema: column {name!r}: list its categories, a public list, or use kind = "drop".'
        )
    if kind == "target" and (len(column.classes) >= 2) == (column.bounds is not None):
        raise ValueError(
            f"schema: the target {name!r} needs either classes (at least two, a public list) or "
            "bounds (a number to predict)."
        )
    if column.format is not None:
        refuse_format(name, column.format, column.bounds or (0.0, 1.0))
    if column.fill is not None and column.bounds is not None:
        low, high = column.bounds
        if not low <= column.fill <= high:
            what = "the date" if kind == "date" else f"{column.fill:g}"
            raise ValueError(f"schema: column {name!r}: fill {what} is outside its bounds.")
