"""Slices of the tables of accuracies, and of what the CNN was chosen by, made again."""

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from committed import RESULTS, columns, fashion, rows_of
from dpoptim.data import FASHION_MNIST_DIRECTORY, Data
from dpoptim.runs.models import build_model

ACCURACIES = [
    path.stem.removeprefix("accuracy_") for path in sorted(RESULTS.glob("accuracy_*.csv"))
]
CNN_SHAPES = {"pixels": (1, 28, 28), "J=1": (9, 14, 14), "J=2": (81, 7, 7)}
LONG = {"cnn", "rates", "views"}  # to train once


@pytest.mark.parametrize("name", ACCURACIES)
def test_runs_of_accuracies_are_whole(bench: Callable[[str], ModuleType], name: str) -> None:
    """Each line is a run that trained, under settings that a command can ask for again."""
    table = bench("accuracy").Table(RESULTS / f"accuracy_{name}.csv")
    assert table.rows
    for row in table.rows:
        assert row.learning_rate > 0
        assert all(math.isfinite(score) for score in (row.last, row.fifth, row.half))
        assert row.part == "choice" or row.seed > 0


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.figures] * (name in LONG)) for name in ACCURACIES],
)
def test_a_run_of_accuracies(bench: Callable[[str], ModuleType], name: str, tmp_path: Path) -> None:
    """The first on digits."""
    made, tasks = bench("accuracy"), bench("accuracy_tasks")
    known = next(
        row
        for row in made.Table(RESULTS / f"accuracy_{name}.csv").rows
        if row.task.startswith("digits")
    )
    model = known.task.removeprefix("digits, ")
    if model == "scattering":
        data = made.load_digits(0, made.WHITENED, tmp_path)
        task = tasks.by_recipe(data, "softmax", "scattering")
    elif model == "cnn, scattering":
        data = made.load_digits(0, made.SCATTERED, tmp_path)
        task = tasks.by_recipe(data, "cnn", "scattering")
    else:
        task = tasks.digits(model)
    assert task.name == known.task
    found = made.run(made.settings(known), task, known.part, known.seed)
    for tail in made.TAILS:
        assert getattr(found, tail) == pytest.approx(getattr(known, tail), abs=1.0)


@pytest.mark.parametrize("name", ["mechanisms", "rates", "scales", "views"])
def test_accuracies_are_of_settings_that_the_command_has(
    bench: Callable[[str], ModuleType], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which do not depend on what the images show.

    No line is left of what the command once tried, and every group of settings was tested.
    """
    made, tasks = bench("accuracy"), bench("accuracy_tasks")
    x, y = np.zeros((2, 1, 28, 28), np.float32), np.zeros(2, np.int64)
    images = Data("Fashion-MNIST", x, y, x, y, tuple("0123456789"), public=True)
    monkeypatch.setattr(tasks, "load_fashion_mnist", lambda *given: images)
    monkeypatch.setattr(tasks, "CHOOSING", 1)
    request = made.Request(Path("nowhere"))
    groups = [group for _, each in made.EXPERIMENTS[name](request) for group in each]
    rows = made.Table(RESULTS / f"accuracy_{name}.csv").rows
    assert {made.settings(row) for row in rows} <= {trial for group in groups for trial in group}
    tested = {made.settings(row) for row in rows if row.part == "test"}
    assert all(tested & set(group) for group in groups)


def chosen(made: ModuleType, rows: list[Any]) -> list[float]:
    """Scores on test records, by the setting and average of most points on choosing records."""

    def points(trial: Any, tail: str, part: str) -> list[float]:
        mine = [row for row in rows if (made.settings(row), row.part) == (trial, part)]
        return [getattr(row, tail) for row in mine]

    trials = dict.fromkeys(made.settings(row) for row in rows if row.part == "choice")
    ways = [(trial, tail) for trial in trials for tail in made.TAILS]
    best = max(ways, key=lambda way: statistics.mean(points(*way, "choice")))
    return points(*best, "test")


@pytest.mark.parametrize(
    ("table", "column", "ours"),
    [("optimizers", "optimizer", "AdamBC"), ("mechanisms", "method", "banded")],
)
def test_ours_is_never_behind_by_more_than_the_spread(
    bench: Callable[[str], ModuleType], table: str, column: str, ours: str
) -> None:
    """At every epsilon of every task, by 3 seeds or more; on digits, AdamBC as Adam alone."""
    made = bench("accuracy")
    cells: dict[tuple[str, float], dict[str, list[Any]]] = {}
    for row in made.Table(RESULTS / f"accuracy_{table}.csv").rows:
        cell = cells.setdefault((row.task, row.epsilon), {})
        cell.setdefault(getattr(row, column), []).append(row)
    assert len(cells) == 12
    for (task, _), methods in cells.items():
        scores = {name: chosen(made, rows) for name, rows in methods.items()}
        assert len(scores) == 3
        assert min(map(len, scores.values())) >= 3
        if table == "optimizers" and task.startswith("digits"):
            del scores["SGD"]
        best = max(scores.values(), key=statistics.mean)
        spread = max(statistics.stdev(best), statistics.stdev(scores[ours]))
        assert statistics.mean(scores[ours]) >= statistics.mean(best) - spread


def test_what_averages_gain(bench: Callable[[str], ModuleType]) -> None:
    """All of it: nothing is trained."""
    again = [{key: str(value) for key, value in row.items()} for row in bench("averaging").lines()]
    assert again == rows_of("averaging.csv")


def test_what_the_cnn_was_chosen_from(bench: Callable[[str], ModuleType]) -> None:
    made = bench("choose_cnn")
    rows = rows_of("choose_cnn.csv")
    names = columns(made.Trial)
    known = [{name: value for name, value in row.items() if name in names} for row in rows]
    asked = [{name: str(getattr(trial, name)) for name in names} for trial in made.TRIALS]
    assert known == asked
    for trial, row in zip(made.TRIALS, rows, strict=True):
        model = made.build(trial, CNN_SHAPES[trial.features])
        assert sum(parameter.numel() for parameter in model.parameters()) == int(row["weights"])
        assert all(50 < float(row[tail]) < 100 for tail in ("last", "fifth", "half"))


@pytest.mark.parametrize(
    ("features", "network"), [("pixels", "two convolutions"), ("J=2", "1 x 1")]
)
def test_the_cnn_is_as_chosen(
    bench: Callable[[str], ModuleType], features: str, network: str
) -> None:
    made = bench("choose_cnn")
    trial = replace(made.GARMENTS, features=features, network=network, activation="ReLU")
    torch.manual_seed(0)
    chosen = made.build(trial, CNN_SHAPES[features])
    torch.manual_seed(0)
    model = build_model("cnn", CNN_SHAPES[features], 10)
    x = torch.randn(3, *CNN_SHAPES[features])
    torch.testing.assert_close(model[:-1](x), chosen[:-1](x))
    assert repr(model) == repr(chosen)


def test_what_models_on_scattering_features_were_chosen_from(
    bench: Callable[[str], ModuleType],
) -> None:
    """Every trial has its line, in order, of a model with as many weights."""
    made = bench("choose_scattering")
    rows = rows_of("choose_scattering.csv")
    names = columns(made.Trial)
    known = [{name: value for name, value in row.items() if name in names} for row in rows]
    assert known == [{name: str(getattr(trial, name)) for name in names} for trial in made.TRIALS]
    for trial, row in zip(made.TRIALS, rows, strict=True):
        model = made.build(trial.width, (81, 7, 7) if trial.colours == "grey" else (243, 8, 8))
        assert sum(parameter.numel() for parameter in model.parameters()) == int(row["weights"])


def test_the_cnn_of_colour_images_is_as_chosen(bench: Callable[[str], ModuleType]) -> None:
    made = bench("choose_scattering")
    assert repr(build_model("cnn", (243, 8, 8), 10)) == repr(made.build(64, (243, 8, 8)))


def test_colour_images_are_made_of_pictures(
    bench: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    made = bench("colour_images")
    rng = np.random.default_rng(0)
    with pytest.raises(FileNotFoundError, match="give ten or more"):
        made.photographs(tmp_path)
    for i in range(10):
        picture = rng.integers(0, 256, (90, 120, 3), dtype=np.uint8)
        Image.fromarray(picture).save(tmp_path / f"{i}.jpg")
    x, y = made.textures(tmp_path, 30, 0, held_out=False)
    assert x.shape == (30, 3, 32, 32)
    assert set(y) <= set(range(10))
    again, labels = made.textures(tmp_path, 30, 0, held_out=False)
    assert np.array_equal(x, again)
    assert np.array_equal(y, labels)
    assert not np.array_equal(made.textures(tmp_path, 30, 0, held_out=True)[0], x)


@fashion
@pytest.mark.figures
def test_a_run_that_the_cnn_was_chosen_by(bench: Callable[[str], ModuleType]) -> None:
    made = bench("choose_cnn")
    trial = replace(made.GARMENTS, activation="ReLU")
    known = rows_of("choose_cnn.csv")[made.TRIALS.index(trial)]
    found = made.run(trial, Path(FASHION_MNIST_DIRECTORY))
    for tail in ("last", "fifth", "half"):
        assert found[tail] == pytest.approx(float(known[tail]), abs=1.0)
