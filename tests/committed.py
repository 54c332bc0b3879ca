"""The committed tables of `benchmarks/results`, as tests read them."""

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


def rows_of(name: str) -> Rows:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def columns(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}
