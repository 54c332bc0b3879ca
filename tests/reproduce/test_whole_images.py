"""The folders that `benchmarks/whole_images.py` makes for ``dpoptim train``, and its table."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from committed import rows_of
from dpoptim.data.image_folders import read_image_folder


@pytest.mark.parametrize(("write", "shape"), [("cifar", (3, 32, 32)), ("mnist", (28, 28))])
def test_folders_are_read_as_they_were_made(
    bench: Callable[[str], ModuleType], tmp_path: Path, write: str, shape: tuple[int, ...]
) -> None:
    made, rng = bench("whole_images"), np.random.default_rng(0)
    training, test = (
        (rng.integers(0, 256, (n, *shape), dtype=np.uint8), rng.integers(0, 10, n)) for n in (12, 5)
    )
    getattr(made, f"write_{write}")(tmp_path, training, test)
    found = read_image_folder(tmp_path)
    for (x, y), x_found, y_found in (
        (training, found.x, found.labels),
        (test, found.x_test, found.labels_test),
    ):
        assert np.array_equal(x, x_found)
        assert [str(label) for label in y] == list(y_found)


def test_garments_are_coloured_on_their_part_of_a_photograph(
    bench: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    """White garments stay bright on the black part of pictures, each in colours of its own."""
    made = bench("colour_images")
    picture = np.zeros((300, 400, 3), np.uint8)
    picture[:, :320] = 255  # the columns that images to train on show
    for i in range(10):
        Image.fromarray(picture).save(tmp_path / f"{i}.jpg")
    grey = np.zeros((6, 28, 28), np.uint8)
    grey[:, 8:20, 8:20] = 255
    x = made.garments(tmp_path, grey, 0, (0.8, 1.0))
    assert x.shape == (6, 3, 32, 32)
    assert x[:, :, :2, :2].max() < 60
    assert x[:, :, 14:18, 14:18].mean() > 60
    assert len(np.unique(x[:, :, 16, 16], axis=0)) == 6
    assert np.array_equal(x, made.garments(tmp_path, grey, 0, (0.8, 1.0)))


def test_the_table_is_of_runs_that_the_command_makes(bench: Callable[[str], ModuleType]) -> None:
    made = bench("whole_images")
    asked = [{name: str(value) for name, value in asdict(run).items()} for run in made.RUNS]
    for row in rows_of("whole_images.csv"):
        assert {name: row[name] for name in asked[0]} in asked
        assert 50 < float(row["accuracy"]) < 100
        assert float(row["processor seconds"]) > 0
