"""Results of an experiment for the terminal: its tables, and the names of its files."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dpoptim.terminal import cell, say

MOST_ROWS = 30  # of a table that is shown; its file has all


@contextmanager
def shown(experiment: str, out: Path, console: Console) -> Iterator[None]:
    """Say that an experiment runs, and when it is over what it has written into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    before = versions(out)
    with console.status(f"{experiment} is running"):
        yield
    written = sorted(path for path, of in versions(out).items() if before.get(path) != of)
    for path in written:
        if path.suffix == ".csv":
            console.print(table_of(path))
    say(f"saved in {out}/: {', '.join(path.name for path in written)}", to=console)


def versions(folder: Path) -> dict[Path, tuple[int, int]]:
    """When each file was written last, and how long it is."""
    files = (path for path in folder.iterdir() if path.is_file())
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


def table_of(path: Path) -> Table:
    """The first `MOST_ROWS` rows of a CSV file, numbers to four digits."""
    with path.open(newline="", encoding="utf-8") as file:
        names, *rows = csv.reader(file)
    more = len(rows) - MOST_ROWS
    table = Table(title=path.name, caption=f"and {more} more rows in the file" if more > 0 else "")
    for name in names:
        table.add_column(cell(name))
    for row in rows[:MOST_ROWS]:
        table.add_row(*(cell(short(value)) for value in row))
    return table


def short(value: str) -> str:
    """A number to four digits; other text, and whole numbers, as they are."""
    try:
        number = float(value)
    except ValueError:
        return value
    return value if value.lstrip("-").isdigit() else f"{number:.4g}"
