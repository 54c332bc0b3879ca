"""Names of columns in messages, which a file without a first line of them takes from a record."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

SEPARATORS = ",;\t|"  # of columns; the first that the first line has in it is the file's


def refuse_one_name(path: Path, names: Sequence[str]) -> None:
    """Refuse two columns of one name, which nobody could tell apart."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(
            f"{path} has two columns of one name: {abridged(twice[:1])}. Fix: rename one."
        )


def abridged(names: Sequence[str], most: int = 12) -> str:
    """The names, or the first of many; none where one is a number, and so maybe a record's."""
    if any(reads_as_number(part) for name in names for part in re.split(f"[{SEPARATORS}]", name)):
        return f"{len(names)} others, not shown as the first line may be a record"
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
