"""What the benchmarks have in common: results as a file, and as tables of a page."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path


def save_csv(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """One line for each row, at least one; all have the same keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_between(page: Path, tables: Mapping[str, str], benchmark: str) -> None:
    """Put tables between the comments of a page that name them and the benchmark."""
    text = page.read_text()
    for name, table in tables.items():
        begin, end = (
            f"<!-- {name}: made by benchmarks/{benchmark}.py -->",
            f"<!-- end of {name} -->",
        )
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"{page} has no marks {begin!r} and {end!r}")
        text = f"{before}{begin}\n{table}\n{end}{after}"
    page.write_text(text)
