"""Data sets that a reader brings in a folder, since they are in no package; taken to be public."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dpoptim.data import Data, hold_out_fifth
from dpoptim.data.arrays import PIXELS, from_arrays
from dpoptim.data.idx import read_idx_folder
from dpoptim.data.image_folders import read_image_folder
from dpoptim.data.npz_files import Arrays, chosen_arrays, read_all, read_npy_folder
from dpoptim.data.public_schemas import natural_order
from dpoptim.reproduce.das_published import SOFTMAX
from dpoptim.reproduce.real_cases import Case, tensors_of
from dpoptim.reproduce.request import FOLDERS
from dpoptim.solvers.linear_model import LinearModel

EMNIST = ("emnist-balanced-train", "emnist-balanced-test")
BY_CLASSES = {10: "CIFAR-10", 100: "CIFAR-100"}
TRAINING, TEST = {"x_train", "y_train"}, {"x_test", "y_test"}


@contextmanager
def naming_option(option: str) -> Iterator[None]:
    """Name the option, and what its folder has to hold, in an error of whatever reads it."""
    try:
        yield
    except (OSError, ValueError) as error:
        # the readers' own advice is about options of other commands
        found = str(error).partition(" Fix: ")[0].rstrip(".")
        kind = FileNotFoundError if isinstance(error, OSError) else ValueError
        raise kind(f"--{option}: {found}. Give {FOLDERS[option]}.") from None


def feature_sets(folder: Path, name: str | None = None) -> list[Case]:
    """Every data set in a folder of features, in order of names, or the one of that name.

    Raises:
        FileNotFoundError: there is none. ValueError: arrays are missing or do not agree.
    """
    with naming_option("features"):
        found = [
            path
            for path in sorted(folder.glob("*"))
            if path.suffix == ".npz" or (path / "x_train.npy").is_file()
        ]
        found = [path for path in found if name in (None, paper_name(path))]
        if not found:
            raise FileNotFoundError(f"{folder} holds no {name or 'NAME'}.npz")
        return [case_of(read_feature_set(path)) for path in found]


def paper_name(path: Path) -> str:
    """The name that Das et al. give to a data set: CIFAR-100 for cifar100.npz; others stay."""
    name = path.name.removesuffix(".npz")
    return next((each for each in SOFTMAX if letters(each) == letters(name)), name)


def letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def read_feature_set(path: Path) -> Data:
    """Features as they are; where no part tests, a fifth, drawn at random, is held out."""
    arrays = read_all(path) if path.is_file() else read_npy_folder(path, TRAINING | TEST)
    tests = bool(TEST & arrays.keys())
    if missing := (TRAINING | TEST if tests else TRAINING) - arrays.keys():
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}")
    data = public_data_set(path, paper_name(path), chosen_arrays(path, arrays, "y_train"))
    return data if tests else hold_out_fifth(data, seed=0)


def emnist(folder: Path) -> Case:
    """EMNIST, balanced: raw pixels in [0, 1], as Das et al. have them.

    Raises:
        FileNotFoundError: a file is missing. ValueError: a file is damaged.
    """
    with naming_option("emnist"):
        return case_of(public_data_set(folder, "EMNIST", read_idx_folder(folder, *EMNIST)))


def cifar(folder: Path) -> Data:
    """CIFAR-10, CIFAR-100, or other pictures sorted by class: pixels in [0, 1], shuffled.

    Raises:
        FileNotFoundError: a file is missing. ValueError: a file is damaged, or no part tests.
    """
    with naming_option("cifar"):
        arrays = read_image_folder(folder)
        if arrays.x_test is None:
            raise ValueError(f"{folder} has no images to test on")
        if arrays.x.shape[1:2] != (3,):
            raise ValueError(f"{folder} holds no images in colour")
        data = shuffled(public_data_set(folder, folder.resolve().name, arrays))
    theirs = data.x.shape[1:] == (3, 32, 32)
    return replace(data, name=BY_CLASSES.get(data.classes, data.name)) if theirs else data


def public_data_set(path: Path, name: str, arrays: Arrays) -> Data:
    """A data set of what was read; bytes are pixels."""
    return from_arrays(
        str(path),
        name,
        arrays,
        classes=tuple(sorted({*arrays.labels, *(arrays.labels_test or ())}, key=natural_order)),
        public=True,
        steps=PIXELS if arrays.x.dtype == np.uint8 else (),
    )


def shuffled(data: Data) -> Data:
    """The records in another order: the last choose settings, and many come sorted by class."""
    order = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0)).numpy()
    return replace(data, x=data.x[order], y=data.y[order])


def case_of(data: Data) -> Case:
    """Softmax regression on flattened records, without penalty."""
    x, y, x_test, y_test = tensors_of(shuffled(data))
    x, x_test = x.flatten(1), x_test.flatten(1)
    model = LinearModel("softmax", features=x.shape[1], outputs=data.classes)
    return Case(data.name, model, 0.0, x, y, x_test, y_test)
