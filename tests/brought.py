"""Data sets as a reader of the papers brings them, and the command that takes them."""

import csv
from pathlib import Path

import numpy as np

import command_work

Labelled = tuple[np.ndarray, np.ndarray]


def run(*words: object, code: int = 0) -> str:
    return command_work.run("reproduce", *words, "--quick", code=code)


def rows_in(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def bright_squares(count: int, seed: int, shape: tuple[int, ...]) -> Labelled:
    """Dark images with a bright square, whose height tells which of two classes it is."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, count)
    x = rng.integers(0, 60, (count, *shape), dtype=np.uint8)
    for image, label in zip(x, y, strict=True):
        image[..., 16 * label : 16 * label + 8, 4:12] = 255
    return x, y
