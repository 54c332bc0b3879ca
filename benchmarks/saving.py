"""What the benchmarks have in common: results as a file."""

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
