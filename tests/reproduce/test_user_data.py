"""Data sets of a reader's own, in every format: read, run by their command, and refused clearly."""

import gzip
import math
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
import torch
import typer
from PIL import Image

from brought import Labelled, bright_squares, rows_in, run
from dpoptim.cli import app
from dpoptim.reproduce import (
    das_baselines,
    das_networks,
    das_published,
    das_tables,
    user_data,
)
from dpoptim.reproduce.das_tables import Recipe
from dpoptim.reproduce.request import FOLDERS

CLASSES, RECORDS, TESTS = 12, 900, 200  # the last tenth is of the last class


def sorted_by_class(count: int, seed: int, *, told: bool = True) -> Labelled:
    """As many features as classes, one of which tells the class; or, if not told, none does."""
    rng = np.random.default_rng(seed)
    y = np.sort(rng.integers(0, CLASSES, count))
    x = rng.normal(size=(count, CLASSES)).astype(np.float32) / 2
    if told:
        x[np.arange(count), y] += 3
    return x, y


@pytest.fixture
def features(tmp_path: Path) -> Path:
    """CIFAR-100 by its name, a set of another name without tests, and one that tells nothing."""
    folder = tmp_path / "features"
    (folder / "mine").mkdir(parents=True)
    for name, told in (("cifar100", True), ("noise", False)):
        (x, y), (u, v) = (sorted_by_class(count, count, told=told) for count in (RECORDS, TESTS))
        np.savez(folder / f"{name}.npz", x_train=x, y_train=y, x_test=u, y_test=v)
    x, y = sorted_by_class(RECORDS, 1)
    np.save(folder / "mine" / "x_train.npy", x[:, :, None])
    np.save(folder / "mine" / "y_train.npy", np.array(list("abcdefghijkl"))[y])
    (folder / "notes.txt").write_text("not a data set")
    return folder


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few cells and rates."""
    monkeypatch.setattr(das_tables, "PERCENTILES", (0,))
    monkeypatch.setattr(das_tables, "FEATURES", Recipe((2.0,), epochs=8, below=(10.0,)))
    monkeypatch.setattr(das_baselines, "EPOCHS", 5)
    monkeypatch.setattr(das_networks, "BATCH", 150)
    monkeypatch.setattr(das_networks, "EPOCHS", 2)
    monkeypatch.setattr(das_networks, "CLIP_NORMS", (0.1, 1.0))
    monkeypatch.setattr(das_networks, "MORE_STEPS", (8.0,))
    monkeypatch.setattr(das_networks, "MORE_RATES", (0.1,))


def test_sets_that_come_by_class_are_shuffled(features: Path) -> None:
    """The last tenth chooses settings: it has all classes, and records keep their labels."""
    for case in user_data.feature_sets(features):
        assert len(case.y[-len(case.y) // 10 :].unique()) == CLASSES
        if case.name != "noise":
            assert (case.x.argmax(1) == case.y).float().mean() > 0.95


@pytest.mark.figures
@pytest.mark.usefixtures("_few")
def test_features_are_learnt_where_they_tell_classes(features: Path, tmp_path: Path) -> None:
    """Sorted by class as they come; the paper's figures beside the set that is named as its."""
    run("das-table4", "--features", features, "--out", tmp_path)
    cells = [
        (clip, epsilon)
        for epsilon in (2.0, 4.0, 6.0)
        for clip in ("10", "0 %", das_published.PRIVATE)
    ]
    for name in ("cifar_100", "mine", "noise"):
        rows = rows_in(tmp_path / f"das_{name}.csv")
        assert [(row["clipped_at"], float(row["epsilon"])) for row in rows] == cells
        scores = [float(row["accuracy"]) for row in rows]
        assert max(scores) < 30 if name == "noise" else min(scores) > 70
        printed = das_published.SOFTMAX["CIFAR-100"]
        for row, (clip, epsilon) in zip(rows, cells, strict=True):
            if name == "cifar_100":
                place = das_published.EPSILONS.index(epsilon)
                assert float(row["paper"]) == printed[clip][place]
            else:
                assert math.isnan(float(row["paper"]))


@pytest.mark.usefixtures("_few")
def test_table_5_takes_cifar_10_alone(features: Path, tmp_path: Path) -> None:
    said = run("das-table5", "--features", features, "--out", tmp_path, code=2)
    assert "holds no CIFAR-10.npz" in said
    (features / "cifar100.npz").rename(features / "CIFAR_10.npz")
    run("das-table5", "--features", features, "--out", tmp_path)
    assert [path.name for path in tmp_path.glob("*.csv")] == ["das_cifar_10.csv"]


@pytest.mark.figures
@pytest.mark.usefixtures("_few")
def test_features_without_privacy_and_by_networks(features: Path, tmp_path: Path) -> None:
    (features / "mine" / "x_train.npy").unlink()
    run("das-baselines", "--features", features, "--out", tmp_path)
    plain = {row["data"]: row for row in rows_in(tmp_path / "das_baselines.csv")}
    assert plain["CIFAR-100"]["paper"] == "66.91"
    assert float(plain["CIFAR-100"]["accuracy"]) > 80 > 30 > float(plain["noise"]["accuracy"])
    (features / "noise.npz").unlink()
    run("das-table7", "--features", features, "--out", tmp_path)
    rows = rows_in(tmp_path / "das_networks_cifar_100.csv")
    assert [row["paper"] for row in rows] == [  # at clip norm 1, and without privacy
        *("0.5492", "0.5908", "0.6133"),
        "0.6731",
    ]
    assert float(rows[-1]["accuracy"]) > 0.8
    assert not (tmp_path / "das_networks.csv").exists()  # which is of Fashion-MNIST


def idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


def test_emnist_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, seed in (("train", 0), ("test", 1)):
        x, y = bright_squares(700, seed, (28, 28))
        idx(tmp_path / f"emnist-balanced-{part}-images-idx3-ubyte.gz", x)
        idx(tmp_path / f"emnist-balanced-{part}-labels-idx1-ubyte.gz", y)
    monkeypatch.setattr(das_tables, "PERCENTILES", (0,))
    monkeypatch.setattr(das_tables, "BELOW_OF_EMNIST", (3.0,))
    monkeypatch.setattr(das_tables, "Recipe", partial(Recipe, (2.0,), epochs=10))
    run("das-table6", "--emnist", tmp_path, "--out", tmp_path)
    rows = rows_in(tmp_path / "das_emnist.csv")
    assert [row["paper"] for row in rows[:2]] == ["63.17", "62.85"]
    assert min(float(row["accuracy"]) for row in rows) > 90


def test_cifar_in_both_forms(bench: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """The same images, whichever way they are kept, though shuffled."""
    training, test = (bright_squares(20, seed, (3, 32, 32)) for seed in (0, 1))
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    bench("whole_images").write_cifar(pickled, training, test)
    for part, (x, y) in (("train", training), ("test", test)):
        for i, (image, label) in enumerate(zip(x, y, strict=True)):
            path = tmp_path / "pictures" / part / str(label) / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.moveaxis(image, 0, -1)).save(path)
    found = [user_data.cifar(folder) for folder in (pickled, tmp_path / "pictures")]
    assert [data.name for data in found] == ["pickled", "pictures"]  # of two classes
    for part in ("x", "x_test"):
        a, b = (getattr(data, part).reshape(20, -1) for data in found)
        assert np.array_equal(np.unique(a, axis=0), np.unique(b, axis=0))
    a, b = (
        {image.tobytes(): label for image, label in zip(data.x, data.y, strict=True)}
        for data in found
    )
    assert a == b
    assert not np.array_equal(found[0].x, training[0] / np.float32(255))


GIVEN = {  # and the experiments that read it
    "features": ("das-table4", "das-table5", "das-table7", "das-baselines"),
    "emnist": ("das-table6", "das-table7", "das-baselines"),
    "cifar": ("dice-vit",),
    "e2e": ("dice-table3",),
}


@pytest.mark.parametrize(
    ("option", "experiment"), [(option, name) for option in GIVEN for name in GIVEN[option]]
)
def test_a_wrong_folder_is_named_with_what_it_must_hold(
    option: str, experiment: str, tmp_path: Path
) -> None:
    """One that is not there, and one that holds something else."""
    (tmp_path / "notes.txt").write_text("nothing")
    beside = ("--model", tmp_path) if option in ("cifar", "e2e") else ()
    for folder in (tmp_path / "nowhere", tmp_path):
        said = run(experiment, f"--{option}", folder, *beside, "--out", tmp_path, code=2)
        assert f"--{option}: {folder}" in said
        assert f"Give {FOLDERS[option]}." in said


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["das-table4"], "features"),
        (["das-table5"], "tweets"),
        (["dice-table3"], "e2e"),
        (["dice-table3", "--model", "."], "e2e"),
        (["dice-vit", "--model", "."], "cifar"),
        (["dice-vit", "--cifar", "."], "model"),
    ],
)
def test_a_folder_that_is_needed_is_asked_for(
    words: list[str], option: str, tmp_path: Path
) -> None:
    said = run(*words, "--out", tmp_path, code=2)
    assert f"{words[0]} needs --{option}, {FOLDERS[option]}." in said


def test_features_that_do_not_agree_are_refused(features: Path, tmp_path: Path) -> None:
    x, y = sorted_by_class(30, 0)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"x_train": x}, "lacks y_train"),
        ({"x_train": x, "y_train": y, "x_test": x}, "lacks y_test"),
        ({"x_train": x, "y_train": y[:-1]}, "one label for each record"),
        ({"x_train": x, "y_train": y, "x_test": x[:, :5], "y_test": y}, "another shape"),
    ]
    for arrays, said in wrong:
        np.savez(features / "a.npz", **arrays)
        with pytest.raises(ValueError, match=rf"--features: .*{said}.* Give a folder of data sets"):
            user_data.feature_sets(features)
    (features / "a.npz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"--features: .*a\.npz is not a \.npz archive"):
        user_data.feature_sets(features)


def test_the_lines_of_the_help_make_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With networks and images made up in torchvision's place."""
    command = typer.main.get_command(app)
    assert isinstance(command, click.Group) or hasattr(command, "commands")
    lines = command.commands["reproduce"].help.partition("\b\n")[2]
    assert len(lines.splitlines()) == 8

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flatten, self.fc = torch.nn.Flatten(), torch.nn.Linear(3 * 16, 1000)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.flatten(x))

    class Images(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
        def __init__(
            self,
            root: str,
            train: bool,
            transform: Callable[[torch.Tensor], torch.Tensor],
            *,
            download: bool = False,
        ) -> None:
            self.seed, self.transform = int(train), transform

        def __len__(self) -> int:
            return 300

        def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
            if i >= 300:
                raise IndexError
            x = torch.full((3, 4, 4), float(self.seed))
            x[0, 0, 0] = i
            return self.transform(x), i % 100

    weights = SimpleNamespace(transforms=lambda: lambda x: 2 * x)
    scope = {
        "models": SimpleNamespace(
            ResNet18_Weights=SimpleNamespace(IMAGENET1K_V1=weights),
            resnet18=lambda weights: Network(),
        ),
        "datasets": SimpleNamespace(CIFAR100=Images),
        "Identity": torch.nn.Identity,
        "DataLoader": torch.utils.data.DataLoader,
        "cat": torch.cat,
        "numpy": np,
    }
    monkeypatch.chdir(tmp_path)
    exec(lines, scope)
    (case,) = user_data.feature_sets(tmp_path)
    assert case.name == "CIFAR-100"
    assert case.model.outputs == 100
    assert case.x.shape == case.x_test.shape == (300, 48)
    assert torch.equal(case.x_test[:, 0], 2 * torch.arange(300.0))
    assert torch.equal(case.x[:, 0] / 2 % 100, case.y.float())


def test_the_papers_tables_agree() -> None:
    """Table 3 has the best of Table 4's clip norms beside those that were found privately."""
    best = {"Caltech-256": (74.03, 79.00, 80.50), "Food-101": (49.26, 54.85, 56.67)}
    best["CIFAR-100"] = (55.10, 60.35, 61.16)
    for name, without in best.items():
        given_norms = {**das_published.SOFTMAX[name]}
        found = given_norms.pop(das_published.PRIVATE)
        assert tuple(map(max, zip(*given_norms.values(), strict=True))) == without
        assert all(a < b for a, b in zip(found, without, strict=True))
