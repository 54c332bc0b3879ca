"""Sums of squares from tables of many blocks, read ahead by a thread, are those of the table."""

from pathlib import Path

import numpy as np
import pytest

from dpoptim.solvers import sufficient_statistics as module
from dpoptim.solvers.linear_model import LinearModel


@pytest.mark.parametrize("records", [0, 1, 7, 8, 24, 29])
@pytest.mark.parametrize("rows", [1, 3])
def test_sums_of_blocks_are_those_of_the_table(
    records: int, rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "BLOCK", 8)
    rng = np.random.default_rng(records)
    x = rng.normal(size=(records, rows, 4)).astype(np.float32)
    y, shares = rng.normal(size=(records, rows)), np.full((records, rows), 1 / rows)
    np.save(tmp_path / "x.npy", x)
    on_disk = np.load(tmp_path / "x.npy", mmap_mode="r" if records else None)
    data = (on_disk, y, shares) if rows > 1 else (on_disk[:, 0], y[:, 0])

    gram, cross = module.second_moments(LinearModel("squared", features=4), data, 2.0, 1.5)

    longer = np.concatenate([x, np.ones((records, rows, 1))], 2).reshape(-1, 5).astype(float)
    longer /= np.maximum(np.linalg.norm(longer, axis=1, keepdims=True), 2.0)
    targets = np.clip(y, -1.5, 1.5).reshape(-1) / 1.5
    np.testing.assert_allclose(np.triu(gram), np.triu(longer.T @ longer) / rows, atol=1e-11 * 30)
    np.testing.assert_allclose(cross, longer.T @ targets / rows, atol=1e-11 * 30)


def test_a_table_that_cannot_be_read_says_so_from_the_thread() -> None:
    class Torn:
        shape = (20_000, 2)

        def __len__(self) -> int:
            return 20_000

        def __getitem__(self, here: slice) -> np.ndarray:
            if here.start:
                raise OSError("the disk went away")
            return np.zeros((module.BLOCK, 2))

    with pytest.raises(OSError, match="the disk went away"):
        module.second_moments(
            LinearModel("squared", features=2), (Torn(), np.zeros(20_000)), 1.0, 1.0
        )
