"""Scattering features from the command line: trained on, kept, and made again of new images."""

import gzip
import math
import pickle
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from command_work import run
from dpoptim.methods import DPFTRL, DPSGD
from dpoptim.optimizers import optimizer
from dpoptim.plan import Plan
from dpoptim.planning.ranking import REACH
from dpoptim.recipes import Recipe, for_numbers, noise_walk, rate_of, recipe, steady_rate
from dpoptim.runs.models import build_model

Bytes = NDArray[np.uint8]


@pytest.mark.parametrize("model", [pytest.param("softmax", marks=pytest.mark.variants), "cnn"])
def test_scattering_from_images_to_predictions(tmp_path: Path, model: str) -> None:
    text = run(
        *(
            "train",
            "--data",
            "digits",
            "--features",
            "scattering",
            "--model",
            model,
            "--epsilon",
            "8",
            "--epochs",
            "10",
            "--no-compare",
        ),
        *("--cache", str(tmp_path / "cache"), "--noise-seed", "1", "--out", str(tmp_path / "run")),
    )
    assert float(re.search(r"accuracy, private ([\d.]+)%", text).group(1)) > 80  # type: ignore[union-attr]
    certificate = (tmp_path / "run" / "certificate.json").read_text()
    assert "scattering, J=2, L=8" in certificate
    assert ("whitened" in certificate) == (model == "softmax")
    assert len(list((tmp_path / "cache").iterdir())) == 1
    images, labels = load_digits(return_X_y=True)
    np.savez(tmp_path / "new.npz", x=images[:200].reshape(-1, 8, 8))
    run(
        "predict",
        str(tmp_path / "run"),
        str(tmp_path / "new.npz"),
        "--out",
        str(tmp_path / "p.csv"),
    )
    predicted = [line.split(",")[0] for line in (tmp_path / "p.csv").read_text().splitlines()[1:]]
    assert np.mean([a == str(b) for a, b in zip(predicted, labels, strict=False)]) > 0.8


@pytest.mark.variants
@pytest.mark.slow
def test_the_cnn_on_pixels_of_few_images(tmp_path: Path) -> None:
    text = run(
        *("train", "--data", "digits", "--model", "cnn", "--epsilon", "4", "--no-compare"),
        *("--noise-seed", "1", "--seed", "1", "--out", str(tmp_path / "run")),
    )
    assert float(re.search(r"accuracy, private ([\d.]+)%", text).group(1)) > 88  # type: ignore[union-attr]


def test_tables_have_no_scattering(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n1,0\n2,1\n")
    text = run(
        *(
            "train",
            "--data",
            str(tmp_path / "t.csv"),
            "--target",
            "y",
            "--data-is-public",
            "--features",
            "scattering",
        ),
        code=2,
    )
    assert "is for images" in text


def test_the_recipe_knows_the_features() -> None:
    assert recipe("softmax", 60_000, "scattering") != recipe("softmax", 60_000)
    assert recipe("cnn", 60_000, "scattering") == recipe("cnn", 60_000)


def test_rates_are_for_rows_as_long_as_they_are() -> None:
    """Noise moves what a weight adds to an output as far, however many features there are."""
    grey, colour = (recipe("softmax", 50_000, "scattering", size=size) for size in (3_969, 15_552))
    assert grey == recipe("softmax", 50_000, "scattering")
    for name in ("learning_rate", "walk"):
        ratio = getattr(colour, name) / getattr(grey, name)
        assert ratio * math.sqrt(15_552 / 3_969) == pytest.approx(1, rel=0.03)
    grey, colour = (recipe("cnn", 50_000, "scattering", size=size) for size in (3_969, 15_552))
    assert grey == recipe("cnn", 50_000)
    assert colour == replace(grey, learning_rate=0.51)


def test_the_cnn_reads_pixels_and_planes_of_features() -> None:
    pixels, planes = build_model("cnn", (3, 8, 8), 10), build_model("cnn", (81, 2, 2), 10)
    assert pixels(torch.rand(5, 3, 8, 8)).shape == (5, 10)
    assert not planes(torch.rand(5, 81, 2, 2)).any()  # starts at zero
    convolutions = [layer for layer in planes if isinstance(layer, torch.nn.Conv2d)]
    assert [layer.kernel_size for layer in convolutions] == [(1, 1)]
    with pytest.raises(ValueError, match="at least 4 x 4"):
        build_model("cnn", (1, 2, 2), 10)


def planned_by(method: DPSGD | DPFTRL, by: Recipe, n: int) -> Plan:
    return method.plan(
        n=n,
        batch_size=by.batch_size,
        epochs=by.epochs,
        epsilon=2.7,
        delta=1e-5,
        neighboring="zero-out",
    )


@pytest.mark.parametrize("model", ["softmax", "cnn"])
def test_noise_moves_weights_as_far_on_few_images_as_on_many(model: str) -> None:
    many, few = (recipe(model, n, "scattering") for n in (200_000, 1_000))
    assert steady_rate(many, planned_by(DPSGD(1.0), many, 200_000)) == many.learning_rate
    plan = planned_by(DPSGD(1.0), few, 1_000)
    rate = steady_rate(few, plan)
    assert rate < few.learning_rate / 2
    assert rate / (1 - few.momentum) * noise_walk(plan) == pytest.approx(few.walk, rel=0.05)
    # a clip norm of 5 makes sums and noise 5 times as large
    assert steady_rate(few, planned_by(DPSGD(5.0), few, 1_000)) == pytest.approx(rate / 5, rel=0.1)


def test_how_far_noise_moves_weights() -> None:
    by = recipe("softmax", 5_000, "scattering")
    plan = planned_by(DPSGD(2.0), by, 5_000)
    expected = 2 * plan.noise_multiplier * math.sqrt(plan.steps) / plan.batch_size
    assert noise_walk(plan) == pytest.approx(expected, rel=1e-6)
    plain = planned_by(DPFTRL(2.0, noise="independent"), by, 5_000)
    passes = math.sqrt(by.epochs)  # a record takes part once in each
    expected = 2 * plain.noise_multiplier * passes * math.sqrt(plain.steps) / plain.batch_size
    assert noise_walk(plain) == pytest.approx(expected, rel=1e-6)
    assert noise_walk(planned_by(DPFTRL(2.0, momentum=0.9), by, 5_000)) < noise_walk(plain)


def striped(n: int, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Bytes, Bytes]:
    """Noise with a bright bar, upright for odd labels and lying for even ones."""
    labels = (np.arange(n) % 10).astype(np.uint8)
    images = rng.integers(0, 60, (n, *shape), dtype=np.uint8)
    bar = slice(shape[-1] // 3, shape[-1] // 2)
    images[labels % 2 == 1, ..., :, bar] += 150
    images[labels % 2 == 0, ..., bar, :] += 150
    return images, labels % 2


def mnist_as_idx(folder: Path, rng: np.random.Generator) -> Path:
    for part, n in (("train", 300), ("t10k", 100)):
        for kind, array in zip(
            ("images-idx3", "labels-idx1"), striped(n, (28, 28), rng), strict=True
        ):
            sizes = struct.pack(f">{array.ndim}I", *array.shape)
            with gzip.open(folder / f"{part}-{kind}-ubyte.gz", "wb") as file:
                file.write(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())
    return folder


def mnist_as_npz(folder: Path, rng: np.random.Generator) -> Path:
    (x, y), (x_test, y_test) = (striped(n, (28, 28), rng) for n in (300, 100))
    np.savez(folder / "mnist.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    return folder / "mnist.npz"


def cifar_as_pickles(folder: Path, rng: np.random.Generator) -> Path:
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        x, y = striped(60, (3, 32, 32), rng)
        batch = {b"data": x.reshape(60, -1), b"labels": y.tolist()}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": [b"cat", b"ship"]}))
    return folder


@pytest.mark.set_aside("mnist_as_npz")
@pytest.mark.parametrize("files", [mnist_as_idx, mnist_as_npz, cifar_as_pickles])
def test_the_usual_files(files: Callable[..., Path], tmp_path: Path) -> None:
    data = files(tmp_path, np.random.default_rng(0))
    text = run(
        *("train", "--data", str(data), "--data-is-public", "--features", "scattering"),
        *("--epsilon", "8", "--delta", "1e-4", "--epochs", "3", "--no-compare"),
        *("--noise-seed", "1", "--out", str(tmp_path / "run")),
    )
    assert float(re.search(r"accuracy, private ([\d.]+)%", text).group(1)) > 90  # type: ignore[union-attr]


def test_adaptive_rates_are_held_back_by_the_same_walk() -> None:
    """Of each weight by the noise of all steps: that of the recipe, where it is the shorter."""
    base = recipe("cnn", 5_000)
    plan = planned_by(DPSGD(1.0), base, 5_000)
    for walk in (1e-3, 1e-2):
        rate = rate_of(replace(base, walk=walk), plan, optimizer("adam"), 1_000)
        assert rate * plan.steps**0.5 == pytest.approx(walk, rel=0.05)
    free = rate_of(replace(base, walk=math.inf), plan, optimizer("adam"), 1_000)
    assert free * (1_000 * plan.steps) ** 0.5 == pytest.approx(REACH, rel=0.05)
    eighth = rate_of(for_numbers(base, 1_000), plan, optimizer("adam"), 1_000)
    assert eighth == pytest.approx(free / 8, rel=0.05)
