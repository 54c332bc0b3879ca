"""Public data sets: scikit-learn's digits, and Fashion-MNIST from its IDX files."""

from pathlib import Path

import numpy as np

from dpoptim.data.dataset import Data, Floats, Labels, hold_out_fifth
from dpoptim.data.idx import read_idx

FASHION_MNIST_DIRECTORY = "/usr/share/datasets/fashion-mnist"  # Debian's package dataset-fashion-mnist


def load_digits(seed: int = 0) -> Data:
    """scikit-learn's 1,797 handwritten digits (8 x 8), one fifth held out at random by ``seed``."""
    from sklearn.datasets import load_digits as bundled

    images, labels = bundled(return_X_y=True)
    x: Floats = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    y: Labels = labels.astype(np.int64)
    names = tuple(str(digit) for digit in range(10))
    return hold_out_fifth(Data("digits", x, y, None, None, names, public=True), seed)


def load_fashion_mnist(directory: str | Path = FASHION_MNIST_DIRECTORY) -> Data:
    """Fashion-MNIST (60,000 + 10,000 images of 28 x 28) from its four IDX files, gzipped or not.

    Raises:
        FileNotFoundError: a file is missing; says which, and how to get it.
        ValueError: a file is not in the IDX format, or images and labels do not match.
    """
    folder = Path(directory)
    parts: dict[str, tuple[Floats, Labels]] = {}
    for part, stem in (("train", "train"), ("test", "t10k")):
        images = read_idx(folder, f"{stem}-images-idx3-ubyte", axes=3)
        labels = read_idx(folder, f"{stem}-labels-idx1-ubyte", axes=1)
        if len(images) != len(labels):
            raise ValueError(f"{folder}: {len(images)} {part} images but {len(labels)} labels; fetch the files again.")
        if len(labels) == 0 or labels.max() > 9:
            raise ValueError(f"{folder}: the {part} labels are not 0..9; these are not Fashion-MNIST's files.")
        x: Floats = images[:, None].astype(np.float32) / np.float32(255)
        parts[part] = (x, labels.astype(np.int64))
    names = (
        "t-shirt",
        "trouser",
        "pullover",
        "dress",
        "coat",
        "sandal",
        "shirt",
        "sneaker",
        "bag",
        "ankle boot",
    )
    return Data("fashion-mnist", *parts["train"], *parts["test"], names, public=True)
