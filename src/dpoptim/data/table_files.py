"""Tables as named columns, a chunk of records at a time: from CSV, Parquet and Arrow files."""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from numpy.typing import NDArray

from dpoptim.data import arrow_files
from dpoptim.data.column_names import SEPARATORS, refuse_one_name, shown_names
from dpoptim.data.opened_files import (
    IN_PLACE,
    UTF8,
    decoding,
    kind_of,
    open_text,
    undecodable_error,
)

CHUNK = 65_536  # records at a time, of tables of ordinary width
MOST_CELLS = 4_000_000  # at a time, of wide ones
# text as in the file, or numbers with NaN for what is missing
Values = Sequence[str] | NDArray[Any]
LONGEST_HEADER = 1 << 20  # characters
QUOTED = re.compile(r'"[^"]*"')
WHAT_AND_FIX = ("a file that can be read", "save it again as UTF-8 text")  # of `decoding`
OF_EXCEL = ["sep=", ""]  # a line before the names, which says what is between columns

TABLE_ENDINGS = (".csv", *arrow_files.ENDINGS)


class Kept:
    """Lines of a file as they are read, and those since ``kept`` was cleared."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(lines)
        self.kept: list[str] = []

    def __iter__(self) -> "Kept":
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.kept.append(line)
        return line


@dataclass(frozen=True)
class Chunk:
    """Some records of a table, column by column.

    Attributes:
        first: number of the first record, counted from 1.
        columns: by name, each with one value a record.
    """

    first: int
    columns: dict[str, Values]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))


def is_table(path: Path) -> bool:
    """Whether the file's name says that it holds named columns."""
    return kind_of(path) in TABLE_ENDINGS


def column_names(path: Path, encoding: str = UTF8) -> list[tuple[str, str | None]]:
    """The columns in order: number, boolean, date or text; None where the file does not say."""
    if kind_of(path) in arrow_files.ENDINGS:
        return arrow_files.names_and_kinds(path)
    with csv_rows(path, encoding, header_only=True) as rows:
        return [(name, None) for name in header_of(path, rows, encoding)]


def read_columns(
    path: Path, names: Sequence[str] | None = None, encoding: str = UTF8
) -> Iterator[Chunk]:
    """The named columns (None: all), in chunks; only one chunk is in memory at a time.

    Args:
        encoding: of a file of text that has no mark of its own at its beginning.

    Raises:
        ValueError: the file is damaged or lacks a column; naming the file, the line or column, and
            the fix.
    """
    known = [name for name, _ in column_names(path, encoding)]
    wanted = list(known if names is None else names)
    held = set(known)
    absent = [name for name in wanted if name not in held]
    if absent:
        raise ValueError(
            f"{path} has no column {', '.join(map(repr, absent[:3]))}{found_instead(wanted, known)}"
        )
    if kind_of(path) in arrow_files.ENDINGS:
        first = 1
        for columns in arrow_files.column_chunks(path, wanted, CHUNK):
            chunk = Chunk(first, columns)
            first += len(chunk)
            yield chunk
        return
    yield from read_csv(path, wanted, encoding)


def read_csv(path: Path, wanted: Sequence[str], encoding: str) -> Iterator[Chunk]:
    with csv_rows(path, encoding) as rows:
        header = header_of(path, rows, encoding)
        places = {name: place for place, name in enumerate(header)}
        size = max(1, min(CHUNK, MOST_CELLS // len(header)))
        first = 1
        while records := list(islice(rows, size)):
            wrong = next(
                (i for i, record in enumerate(records) if len(record) != len(header)), None
            )
            if wrong is not None:
                raise ValueError(
                    f"{path}, record {first + wrong}: {len(records[wrong])} columns where the "
                    f"header has {len(header)}. Fix: put quotation marks around what has the "
                    "separator of columns in it, and close each one."
                )
            columns = list(zip(*records, strict=True))
            yield Chunk(first, {name: columns[places[name]] for name in wanted})
            first += len(records)


def separator_of(path: Path, encoding: str = UTF8) -> str:
    """The character between columns, by the first line alone, less what is quoted in it."""
    with open_text(path, encoding, first_line_only=True) as file:
        first = QUOTED.sub("", file.readline(LONGEST_HEADER))
    return next((each for each in SEPARATORS if each in first), SEPARATORS[0])


@cache
def whole_record(separator: str) -> re.Pattern[str]:
    """A record's text: fields in quotation marks, doubled inside, and others without any."""
    field = rf'(?:"(?:[^"]++|"")*+"|[^"\r\n{re.escape(separator)}]*+)'
    return re.compile(rf"{field}(?:{re.escape(separator)}{field})*+[\r\n]*+")


class csv_rows:  # noqa: N801, a context manager, named as a function
    """Open a CSV file (gzipped or not) as an iterator of rows; blank lines are left out.

    Raises:
        ValueError: at whatever row the file is damaged.

    **Guarantee.** No record decides how others are read: `whole_record` has an even number of
    quotation marks, so a stray one would leave the last field open, which is refused.
    """

    def __init__(self, path: Path, encoding: str, *, header_only: bool = False) -> None:
        self._path, self._encoding, self._header_only = path, encoding, header_only

    def __enter__(self) -> Iterator[list[str]]:
        self._text = self._opened()
        return self._rows()

    def __exit__(self, *_: object) -> None:
        self._text.close()

    def _opened(self) -> TextIO:
        try:
            with decoding(self._path, *WHAT_AND_FIX):
                self._separator = separator_of(self._path, self._encoding)
                return open_text(self._path, self._encoding, first_line_only=self._header_only)
        except ValueError as error:
            raise self._explained(error, 0) from None

    def _rows(self) -> Iterator[list[str]]:
        path, lines = self._path, Kept(self._text)
        reader = csv.reader(lines, delimiter=self._separator, strict=True)
        while True:
            lines.kept.clear()
            try:
                with decoding(path, *WHAT_AND_FIX):
                    row = next(reader, None)
            except ValueError as error:
                raise self._explained(error, reader.line_num) from None
            if row is None:
                return
            if any("\0" in value for value in row):
                raise ValueError(
                    f"{path}, line {reader.line_num}: a NUL character. Fix: the file is damaged; "
                    'or it is UTF-16 without a mark, then encoding = "utf-16-le" in its schema.'
                )
            text = "".join(lines.kept)
            if '"' in text and not whole_record(self._separator).fullmatch(text):
                raise self._stray(reader.line_num)
            if row:
                yield row

    def _stray(self, line: int) -> ValueError:
        return ValueError(
            f"{self._path}, near line {line}: a quotation mark inside of a field, or one that is "
            f"left open, or a field of more than {csv.field_size_limit():,} characters. Fix: put "
            "fields with quotation marks into quotation marks and double those inside, as pandas' "
            "to_csv does."
        )

    def _explained(self, error: ValueError, line: int) -> ValueError:
        if "(Unicode" in str(error):
            text = getattr(self, "_text", None)  # whose mark may say something else
            return undecodable_error(self._path, text.encoding if text else self._encoding)
        return self._stray(line) if "(Error)" in str(error) else error  # csv.Error


def header_of(path: Path, rows: Iterator[list[str]], encoding: str) -> list[str]:
    row = next(rows, None)
    if row == OF_EXCEL:
        row = next(rows, None)
    if row is None:
        raise ValueError(f"{path} is empty. Fix: its first line must name the columns.")
    names = [name.strip() for name in row]
    if any(IN_PLACE in name for name in names):
        raise undecodable_error(path, encoding)
    refuse_one_name(path, names)
    return names


def found_instead(wanted: Sequence[str], known: Sequence[str]) -> str:
    """The thing in a column's place, and the fix; no first line that may be a record."""
    if set(wanted) & set(known):
        return f"; it has {shown_names(known)}. Fix: add the column, or name another one."
    return ", nor any other that was asked for. Fix: its first line must name the columns."
