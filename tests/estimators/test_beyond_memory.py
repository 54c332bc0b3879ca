"""Tables larger than memory are read in blocks: no fit holds a copy of one."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpoptim.data import ParquetRows
from dpoptim.estimators import DPLinearRegression, DPLogisticRegression

ROWS, FEATURES, GROUP = 200_000, 10, 10_000
COMMON: Any = {"epsilon": 2.0, "delta": 1e-6, "data_norm": 2.0, "noise_seed": 0}
FITS = {
    "sums": DPLinearRegression(**COMMON, target_bound=1.0, solver="sufficient-statistics"),
    "gradients": DPLogisticRegression(**COMMON, classes=[0, 1], steps=2),
}


@contextmanager
def limited_to(share: float) -> Iterator[None]:
    """What numpy holds meanwhile must stay below that share of the table, which a copy breaks."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < share * ROWS * FEATURES * 4


@pytest.fixture(scope="module")
def table() -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (ROWS, FEATURES)).astype(np.float32)


@pytest.fixture(scope="module")
def labels(table: np.ndarray) -> np.ndarray:
    """Of the rows; what a fit loads is loaded, or it would count as what numpy holds."""
    labels = (table[:, 0] > 0).astype(np.int8)
    for fit in FITS.values():
        fit.fit(table[:GROUP], labels[:GROUP])
    return labels


@pytest.mark.parametrize("fit", FITS)
def test_a_memory_map_is_not_copied(
    tmp_path: Path, table: np.ndarray, labels: np.ndarray, fit: str
) -> None:
    np.save(tmp_path / "x.npy", table)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    with limited_to(0.75):
        FITS[fit].fit(mapped, labels)
    with pytest.raises(AssertionError), limited_to(0.75):
        np.array(mapped)  # the limit is one that a copy breaks


@pytest.mark.parametrize("fit", FITS)
def test_parquet_is_read_a_row_group_at_a_time(
    tmp_path: Path, table: np.ndarray, labels: np.ndarray, fit: str
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    names = [f"x{j}" for j in range(FEATURES)]
    columns = pytest.importorskip("pyarrow").table(dict(zip(names, table.T, strict=True)))
    parquet.write_table(columns, tmp_path / "x.parquet", row_group_size=GROUP)
    rows, read = ParquetRows(tmp_path / "x.parquet", names), []
    rows[:1]  # loads what reading needs
    once = ParquetRows._read

    def spy(self: ParquetRows, number: int) -> Any:
        found = once(self, number)
        read.append(len(found))
        return found

    with pytest.MonkeyPatch.context() as patch, limited_to(0.75):
        patch.setattr(ParquetRows, "_read", spy)
        FITS[fit].fit(rows, labels)
    assert max(read) == GROUP
    assert sum(read) >= ROWS
