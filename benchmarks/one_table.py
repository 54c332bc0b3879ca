"""The command line of benchmarks that make one table: ``--out FOLDER``."""

import argparse
import csv
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_table(name: str, about: str | None, rows: Iterable[Mapping[str, object]]) -> None:
    """Write rows, which are made when the arguments are known to be right, as FOLDER/name.csv."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {name}.csv")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    made = list(rows)
    with (out / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(made[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(made)
