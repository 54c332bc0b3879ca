"""Load a table or arrays with labels for training.

A file that cannot be used is refused here, before any training, by a message for its owner.
Nothing here looks at the data to choose a setting, except where its owner declares it public.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpoptim.data.column_names import shown_names
from dpoptim.data.dataset import Data
from dpoptim.data.encoding import encode_table
from dpoptim.data.large_arrays import Rows
from dpoptim.data.opened_files import UTF8, kind_of, known_encoding, name_of
from dpoptim.data.public_schemas import from_public_table, public_target
from dpoptim.data.schema import Column, Scaling, Schema
from dpoptim.data.table_files import TABLE_ENDINGS, column_names

ENDINGS = (*TABLE_ENDINGS, ".npz")

NO_BOUNDS = (
    "--target-bounds is missing: the lowest and highest value of the number to predict, as is "
    "publicly known, such as --target-bounds 0,500000."
)


def load_table(path: str | Path, schema: Schema, *, public: bool = False) -> Data:
    """Load a table (.csv, .csv.gz, .parquet, .arrow) through its schema.

    It is read in chunks; features that outgrow memory go to a file that only this process can open.

    Args:
        path: of the table.
        schema: what is publicly known about its columns.
        public: the owner declares the data public.

    Returns:
        features by the schema, and labels.

    Raises:
        FileNotFoundError, ValueError: naming the file, the column and the fix. These messages are
            for the data's owner, before a run; nothing of the data reaches a log of the run.

    Examples:
        >>> from pathlib import Path
        >>> from dpoptim.data import load_table, parse_schema
        >>> text = '''
        ... [columns.age]
        ... kind = "number"
        ... bounds = [18, 95]
        ... [columns.ill]
        ... kind = "target"
        ... classes = ["no", "yes"]
        ... '''
        >>> _ = Path("visits.csv").write_text("age,ill\\n30,no\\n80,yes\\n")
        >>> load_table("visits.csv", parse_schema(text)).y
        array([0, 1])
    """
    path = existing_table(path)
    target = schema.target
    rows, parts, persons = Rows(schema.width), [], Persons()
    for encoded in encode_table(path, schema, labels=True, persons=True):
        rows.append(encoded.x)
        parts.append(encoded.y)
        persons.append(encoded.persons)
    if not parts:
        raise ValueError(f"{path} has no records.")
    assert target is not None
    return Data(
        name_of(path),
        rows.array(),
        np.concatenate([part for part in parts if part is not None]),
        None,
        None,
        target.classes,
        public,
        target_bounds=target.bounds,
        persons=persons.numbers(),
        encoding=schema,
    )


class Persons:
    """Numbers persons 0, 1, ... in the order in which they are met."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}
        self._parts: list[list[int]] = []

    def append(self, names: list[str] | None) -> None:
        if names is not None:
            known = self._number
            self._parts.append([known.setdefault(name, len(known)) for name in names])

    def numbers(self) -> NDArray[np.int64] | None:
        return np.concatenate(self._parts).astype(np.int64) if self._parts else None


def schema_without_file(
    path: str | Path,
    target: str | None,
    *,
    classes: tuple[str, ...] | None = None,
    target_bounds: tuple[float, float] | None = None,
    public: bool = False,
    person: str | None = None,
    regression: bool = False,
    scaling: Scaling | None = None,
    encoding: str = UTF8,
) -> Schema:
    """A schema where there is none: read off public data, else all columns plain numbers.

    Args:
        target: the label's column.
        classes: the labels that may occur, in order; public.
        target_bounds: of a number to predict instead.
        public: the owner declares the data public.
        regression: predict a number, whose bounds may be read off public data.
        scaling: None: public data by its own bounds, other data by ``"unit-norm"``.
        encoding: of a file of text, as pandas names it; see `Schema`.
        path: of the table.
        person: the column of who a row belongs to, if any.

    Returns:
        the schema.

    Raises:
        FileNotFoundError, ValueError: naming the file, the column and the fix.

    Examples:
        >>> from pathlib import Path
        >>> from dpoptim.data import schema_without_file
        >>> _ = Path("public.csv").write_text("age,ill\\n30,no\\n80,yes\\n")
        >>> schema_without_file("public.csv", "ill", public=True).target.classes
        ('no', 'yes')
    """
    path, encoding = existing_table(path), known_encoding(encoding, "encoding")
    names = [name for name, _ in column_names(path, encoding)]
    target = refuse_columns(path, names, target, person)
    known = target_column(path, target, classes, target_bounds)
    if public and scaling in (None, "bounds"):
        regression = regression or target_bounds is not None
        found = from_public_table(
            path, target=target, person=person, regression=regression, encoding=encoding
        )
        return found if known is None else with_column(found, known)
    if known is None:
        if not public:
            raise ValueError(NO_BOUNDS if regression else classes_missing(path))
        known = public_target(path, target, regression=regression, encoding=encoding)
    columns = [
        known if name == target else Column(name, "person" if name == person else "number")
        for name in names
    ]
    return Schema(tuple(columns), scaling or "unit-norm", encoding=encoding)


def with_column(schema: Schema, column: Column) -> Schema:
    """The schema with this column in place of its own of that name."""
    columns = (column if each.name == column.name else each for each in schema.columns)
    return replace(schema, columns=tuple(columns))


def refuse_columns(path: Path, names: Sequence[str], target: str | None, person: str | None) -> str:
    """Return the label's column; refuse names that are not there, and tables of it alone."""
    if target is None:
        raise ValueError(
            f"{path}: --target is missing; it names the label's column, one of "
            f"{shown_names(names)}."
        )
    for option, name in (("--target", target), ("--person-column", person)):
        if name is not None and name not in names:
            raise ValueError(
                f"{path} has no column {name!r}; {option} takes one of {shown_names(names)}."
            )
    if set(names) <= {target, person}:
        raise ValueError(
            f"{path} has no column beside the label {target!r}; there is nothing to learn from."
        )
    return target


def target_column(
    path: Path, target: str, classes: tuple[str, ...] | None, bounds: tuple[float, float] | None
) -> Column | None:
    """The target as declared; None where it must be read off the data."""
    if bounds is not None:
        return Column(target, "target", bounds=bounds)
    if classes is None:
        return None
    check_classes(path, classes)
    return Column(target, "target", classes=classes)


def check_classes(source: str | Path, classes: tuple[str, ...]) -> None:
    if len(set(classes)) < len(classes):
        raise ValueError(f"--classes names a label twice: {', '.join(classes)}.")
    if len(classes) < 2:
        raise ValueError(
            f"{source}: the label takes fewer than two values; there is nothing to classify."
        )


def classes_missing(source: str | Path) -> str:
    return (
        f"{source}: --classes is missing. The list of labels goes into the released model, so on "
        "private data it must be known beforehand: declare it (--classes no,yes, or in a schema, "
        "which `dpoptim schema new` drafts), or declare the data public (--data-is-public)."
    )


def existing_table(path: str | Path) -> Path:
    """The path of a file that is there and whose ending says that it can be read."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; --data takes digits, fashion-mnist, or a file "
            f"({', '.join(ENDINGS)})."
        )
    if kind_of(path) not in ENDINGS:
        raise ValueError(
            f"{path}: cannot read {path.suffix or 'a file without ending'}; give one of "
            f"{', '.join(ENDINGS)}."
        )
    return path
