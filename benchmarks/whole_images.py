"""`dpoptim train` from folders in the formats of CIFAR-10 and MNIST: accuracy, time and memory.

    python benchmarks/whole_images.py --pictures FOLDER --out benchmarks/results

writes whole_images.csv, a line a run of `RUNS`, as runs end, and goes on where it was interrupted.
Images are made up, as many as CIFAR-10 and MNIST have, and are neither. Every run is one command
with all defaults but for those in `RUNS`; models are scored on images of their own, whose originals
no training image shows:

* "garments": Fashion-MNIST in colours on crops of photographs (colour_images.py), 50,000 made of
  its first 50,000 training images, 10,000 of its test images, these on the right-hand fifth of
  each photograph, which is on no training image;
* "moved digits": scikit-learn's digits, enlarged, turned, stretched, sheared, moved and bent
  (choose_cnn.py), 60,000 made of 1,438 of them and 10,000 of the 359 others, of which none was
  trained or chosen on there.

FOLDER holds ten or more photographs (*.jpg), as Debian's mate-backgrounds has in "nature".
"""

import argparse
import csv
import json
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import choose_cnn
import colour_images
from dpoptim.data import FASHION_MNIST_DIRECTORY, load_digits
from dpoptim.data.idx import read_idx

Bytes = NDArray[np.uint8]
Labelled = tuple[Bytes, NDArray[np.int64]]
GARMENTS, DIGITS = "garments", "moved digits"
TRAINED_ON, SCORED_ON = {GARMENTS: 50_000, DIGITS: 60_000}, 10_000
SHOWN, HIDDEN = (0.0, 0.8), (0.8, 1.0)  # columns of photographs
MEBIBYTE = 1024  # in the kibibytes of `ru_maxrss`


@dataclass(frozen=True)
class Run:
    """A command's options, and the seed of initialisation; noise is fresh in every run."""

    images: str
    model: str
    options: str
    epsilon: float
    seed: int = 1


SCATTERED, VIEWS = "--features scattering", "--views 4"
SEEDS = (1, 2, 3)
RUNS = [
    *(Run(GARMENTS, model, SCATTERED, 3.0, seed) for model in ("softmax", "cnn") for seed in SEEDS),
    *(
        Run(DIGITS, model, options, 2.93, seed)
        for model, options in (("softmax", SCATTERED), ("cnn", SCATTERED), ("cnn", ""))
        for seed in SEEDS
    ),
    *(Run(DIGITS, "cnn", VIEWS, 2.93, seed) for seed in SEEDS),
]


def fashion(part: str) -> Labelled:
    folder = Path(FASHION_MNIST_DIRECTORY)
    labels = read_idx(folder, f"{part}-labels-idx1-ubyte", axes=1)
    return read_idx(folder, f"{part}-images-idx3-ubyte", axes=3), labels.astype(np.int64)


def coloured(pictures: Path) -> tuple[Labelled, Labelled]:
    """Garments to train on, and others to score on."""
    (x, y), (x_test, y_test) = fashion("train"), fashion("t10k")
    x, y = x[: TRAINED_ON[GARMENTS]], y[: TRAINED_ON[GARMENTS]]
    return (
        (colour_images.garments(pictures, x, 0, SHOWN), y),
        (colour_images.garments(pictures, x_test[:SCORED_ON], 1, HIDDEN), y_test[:SCORED_ON]),
    )


def moved_digits() -> tuple[Labelled, Labelled]:
    """Digits to train on, and others to score on, bytes (n, 28, 28)."""
    data, generator = load_digits(0), torch.Generator().manual_seed(5)
    assert data.x_test is not None
    assert data.y_test is not None

    def made(x: NDArray[np.float32], y: NDArray[np.int64], count: int) -> Labelled:
        large = choose_cnn.enlarged(torch.from_numpy(x), 0.0)
        images, labels = choose_cnn.bent(large, torch.from_numpy(y), count, generator)
        return (255 * images[:, 0].clamp(0, 1)).byte().numpy(), labels.numpy()

    training = made(data.x, data.y, TRAINED_ON[DIGITS])
    return training, made(data.x_test, data.y_test, SCORED_ON)


def write_cifar(folder: Path, training: Labelled, test: Labelled) -> None:
    """Files as CIFAR-10's Python version has: five batches and one to test."""
    batches = zip(*(np.array_split(each, 5) for each in training), strict=True)
    parts = {f"data_batch_{i + 1}": part for i, part in enumerate(batches)} | {"test_batch": test}
    for name, (x, y) in parts.items():
        with (folder / name).open("wb") as file:
            pickle.dump({b"data": x.reshape(len(x), -1), b"labels": y.tolist()}, file)


def write_mnist(folder: Path, training: Labelled, test: Labelled) -> None:
    """The four IDX files of MNIST."""
    for name, (x, y) in {"train": training, "t10k": test}.items():
        for kind, array in (("images-idx3", x), ("labels-idx1", y.astype(np.uint8))):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (folder / f"{name}-{kind}-ubyte").write_bytes(header + array.tobytes())


def command(run: Run, folder: Path, out: Path) -> list[str]:
    given = {
        "--data": folder,
        "--cache": folder / "cache",
        "--out": out,
        "--model": run.model,
        "--epsilon": run.epsilon,
        "--delta": 1e-5,
        "--seed": run.seed,
    }
    words = [str(word) for pair in given.items() for word in pair]
    alone = "--compare" if run.seed == SEEDS[0] else "--no-compare"
    start = [sys.executable, "-m", "dpoptim", "train", "--data-is-public", alone]
    return [*start, *words, *run.options.split()]


def measured(run: Run, folder: Path) -> dict[str, object]:
    """A line of the table: what the command's run directory says, and what it took."""
    features_were_there = any((folder / "cache").glob("*"))
    with tempfile.TemporaryDirectory() as out:
        words = command(run, folder, Path(out) / "run")
        started = time.perf_counter()
        with subprocess.Popen(words) as process:
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, words)
        seconds = time.perf_counter() - started
        said = json.loads((Path(out) / "run" / "certificate.json").read_text())
    plain = said["scores"]["without_privacy"]
    return {
        **asdict(run),
        "accuracy": round(100 * said["scores"]["private"][-1], 2),
        "without privacy": round(100 * plain[-1], 2) if plain else "",
        "seconds": round(seconds),
        "processor seconds": round(used.ru_utime + used.ru_stime),
        "training seconds": round(said["training"]["seconds"]),
        "features made": run.options == SCATTERED and not features_were_there,
        "MiB": round(used.ru_maxrss / MEBIBYTE),
    }


def folders(pictures: Path, scratch: Path) -> Iterator[tuple[str, Path]]:
    """The name of each set of images, and the folder it is in, which is made if it is not there."""
    for name in (GARMENTS, DIGITS):
        folder = scratch / name
        if not folder.exists():
            begun = scratch / f"{name}, begun"
            begun.mkdir(parents=True, exist_ok=True)
            if name == GARMENTS:
                write_cifar(begun, *coloured(pictures))
            else:
                write_mnist(begun, *moved_digits())
            begun.rename(folder)
        yield name, folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for whole_images.csv")
    parser.add_argument("--pictures", type=Path, required=True, help="folder of photographs")
    parser.add_argument(
        "--scratch",
        type=Path,
        default=Path(tempfile.gettempdir()) / "whole_images",
        help="images and features are kept there, 5 GB",
    )
    parser.add_argument("--only", default="", help="runs whose model and options begin so")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / "whole_images.csv"
    known: list[dict[str, str]] = []
    if path.exists():
        with path.open(newline="") as file:
            known = list(csv.DictReader(file))
    done = [tuple(row[name] for name in asdict(RUNS[0])) for row in known]
    at = dict(folders(asked.pictures, asked.scratch))
    for run in RUNS:
        if tuple(str(value) for value in asdict(run).values()) in done:
            continue
        if not f"{run.images}, {run.model} {run.options}".startswith(asked.only):
            continue
        row = measured(run, at[run.images])
        known.append({name: str(value) for name, value in row.items()})
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
            writer.writeheader()
            writer.writerows(known)
        print(", ".join(known[-1].values()), flush=True)


if __name__ == "__main__":
    main()
