"""Names of columns: in messages, and written as ranges.

A file without a first line of names takes them from a record, so messages show them with care.
Columns whose names differ by a number alone share an entry: ``pixel_{0..783}`` is 784 of them.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

SEPARATORS = ",;\t|"  # of columns; the first that the first line has in it is the file's


def refuse_one_name(path: Path, names: Sequence[str]) -> None:
    """Refuse two columns of one name, which nobody could tell apart."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(
            f"{path} has two columns of one name: {shown_names(twice[:1])}. Fix: rename one."
        )


def shown_names(names: Sequence[str]) -> str:
    """The names, or the first of many; none where one is a number, and so maybe a record's."""
    if any(reads_as_number(part) for name in names for part in re.split(f"[{SEPARATORS}]", name)):
        return f"{len(names)} others, not shown as the first line may be a record"
    rest = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return ", ".join(names[:MOST_SHOWN]) + rest


def reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


Entry = TypeVar("Entry")

RANGE = re.compile(r"(?P<head>[^{}]*)\{(?P<first>\d+)\.\.(?P<last>\d+)\}(?P<tail>[^{}]*)")
NUMBERED = re.compile(r"(?P<head>.*?)(?P<number>\d+)(?P<tail>\D*)", re.DOTALL)
MOST_SHOWN = 12  # names in a message
MOST = 100_000  # columns of one range
FEWEST = 4  # columns that a draft writes as a range


def is_range(name: str) -> bool:
    return RANGE.fullmatch(name) is not None


def names_of(name: str) -> list[str]:
    """The names that a range stands for, in order; any other name stands for itself.

    A first number with zeros before it, ``{000..299}``, gives all numbers as many digits.

    Raises:
        ValueError: the last number is below the first, or there are over 100,000.
    """
    found = RANGE.fullmatch(name)
    if found is None:
        return [name]
    first, last = int(found["first"]), int(found["last"])
    if not 0 <= last - first < MOST:
        raise ValueError(
            f"schema: columns {name!r}: a range has its lowest number first and at most {MOST:,} "
            "columns, such as pixel_{0..783}."
        )
    digits = len(found["first"]) if found["first"].startswith("0") else 1
    return [
        f"{found['head']}{number:0{digits}}{found['tail']}" for number in range(first, last + 1)
    ]


def expand_ranges(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Entries by column, ranges written out; a column's own entry goes before that of a range.

    Raises:
        ValueError: a range is none (see `names_of`), or a column is in two.
    """
    columns: dict[str, Entry] = {}
    ranges: dict[str, str] = {}  # that a column was in
    for written, entry in entries.items():
        for name in names_of(written):
            if is_range(written) and ranges.setdefault(name, written) != written:
                raise ValueError(
                    f"schema: column {name!r} is in {ranges[name]!r} and in {written!r}; keep one."
                )
            columns[name] = entries.get(name, entry)
    return columns


def runs_of(columns: Sequence[tuple[str, Entry]]) -> Iterator[tuple[str, int, Entry]]:
    """Columns in order, those that differ by a number alone as one range.

    Args:
        columns: names, and what columns of a range have in common.

    Yields:
        a name or a range, how many columns it is, and what they have in common.
    """
    place = 0
    while place < len(columns):
        name, kind = columns[place]
        count = length_of_run(columns, place)
        if count < FEWEST:
            yield name, 1, kind
            place += 1
            continue
        found, last = split_at_number(name), split_at_number(columns[place + count - 1][0])
        yield f"{found[0]}{{{found[1]}..{last[1]}}}{found[2]}", count, kind
        place += count


def length_of_run(columns: Sequence[tuple[str, object]], place: int) -> int:
    """How many columns from this one on are those of a range, kinds alike."""
    name, kind = columns[place]
    head, number, tail = split_at_number(name)
    if not number or "{" in name or "}" in name:
        return 1
    digits = len(number) if number.startswith("0") else 1
    count = 1
    for other, of_other in columns[place + 1 :]:
        expected = f"{head}{int(number) + count:0{digits}}{tail}"
        if other != expected or of_other != kind or count == MOST:
            break
        count += 1
    return count


def split_at_number(name: str) -> tuple[str, str, str]:
    """A name's last number, between what stands before it and behind it."""
    found = NUMBERED.fullmatch(name)
    return (name, "", "") if found is None else (found["head"], found["number"], found["tail"])
