"""Tables of clip norms: a filter that is what it says, and every row of a table with and without
it.
"""

import csv
from pathlib import Path

import pytest
import torch

from dpoptim.reproduce import das_baselines
from dpoptim.reproduce.das_published import PRIVATE
from dpoptim.reproduce.das_tables import Recipe, das_table, smooth_pixels
from dpoptim.reproduce.real_cases import Case, tasks_in
from dpoptim.solvers.linear_model import LinearModel


def test_the_filter_is_a_preconditioner_that_damps_what_is_rough() -> None:
    filtered = smooth_pixels(6, cutoff=2.0)
    assert torch.allclose(filtered, filtered.T)
    eigenvalues = torch.linalg.eigvalsh(filtered)
    assert eigenvalues.min() > 0
    assert eigenvalues.max() == pytest.approx(1)
    image = torch.ones(6, 6, dtype=torch.float64)
    flat = torch.cat([image.flatten(), torch.tensor([3.0])])
    assert torch.allclose(flat @ filtered, flat), (
        "neither a constant image nor the intercept changes"
    )
    image[::2, ::2] = image[1::2, 1::2] = -1
    rough = torch.cat([image.flatten(), torch.zeros(1)])
    assert (rough @ filtered).norm() < 0.2 * rough.norm()


def blobs() -> Case:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(3, (2500,), generator=generator)
    x = torch.randn(2500, 4, generator=generator) / 2 + 2 * torch.eye(4)[y]
    model = LinearModel("softmax", features=4, outputs=3)
    return Case("blobs", model, 0.0, x[:2000], y[:2000], x[2000:], y[2000:])


def test_without_privacy_the_best_of_the_rates_is_taken(tmp_path: Path) -> None:
    (row,) = das_baselines.das_baselines(tmp_path, [blobs()], seeds=2, rates=(-0.1, 0.1))
    assert row.learning_rate == 0.1
    assert row.accuracy > 95
    assert len((tmp_path / "das_baselines.csv").read_text().splitlines()) == 2


@pytest.mark.figures
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "smoothing", [None, smooth_pixels(2, cutoff=1.0)], ids=["plain", "smoothed"]
)
def test_every_row_of_a_table_learns(tmp_path, smoothing) -> None:
    rows = das_table(
        tmp_path, blobs(), Recipe((1.0, 2.0), smoothing, epochs=10), seeds=2, epsilons=(4.0,)
    )
    assert rows[-1].clipped_at == PRIVATE
    assert min(row.accuracy for row in rows) > 80  # a third by chance
    with (tmp_path / "das_blobs.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows) == 9


def test_tasks_are_found_in_their_folder_or_below(tmp_path) -> None:
    for name in ("emotion", "emoji"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train_text.txt").write_text("one\n")
    (tmp_path / "cache").mkdir()
    assert tasks_in(tmp_path) == [tmp_path / "emoji", tmp_path / "emotion"]
    assert tasks_in(tmp_path / "emoji") == [tmp_path / "emoji"]
    with pytest.raises(FileNotFoundError, match="no task of TweetEval"):
        tasks_in(tmp_path / "cache")
