"""Results of an experiment in files: tables, deviations over seeds, and pictures."""

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import stdev
from typing import Any


def write_rows(
    path: Path,
    kind: type[Any],
    rows: Sequence[Any],
    paper: Callable[[Any], float] | None = None,
) -> None:
    """Frozen records as CSV, one line each; what a paper prints for each in a column beside.

    The folder is made if it does not exist.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = {} if paper is None else {"paper": paper}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*(field.name for field in fields(kind)), *beside])
        writer.writeheader()
        for row in rows:
            writer.writerow(asdict(row) | {name: of(row) for name, of in beside.items()})


def deviation(values: Sequence[float]) -> float:
    """The standard deviation over seeds; NaN of one."""
    return stdev(values) if len(values) > 1 else math.nan


def pyplot() -> Any:
    """The drawing side of matplotlib, which draws into files alone."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt
