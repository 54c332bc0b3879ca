"""Tables as tests read them: the committed ones of `benchmarks/results`, and others."""

import csv
from dataclasses import fields
from pathlib import Path

import pytest

from dpoptim.data import FASHION_MNIST_DIRECTORY

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RESULTS = BENCHMARKS / "results"
Rows = list[dict[str, str]]

fashion = pytest.mark.skipif(
    not Path(FASHION_MNIST_DIRECTORY).is_dir(), reason="Fashion-MNIST is not there"
)


def rows_of(name: str, folder: Path = RESULTS) -> Rows:
    """A table's rows; of a committed one, unless it is in another folder."""
    with (folder / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def columns(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}
