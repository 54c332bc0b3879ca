"""Images as people have them: folders of IDX files, CIFAR's pickles, or pictures by class."""

import pickle
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dpoptim.data.idx import read_idx_folder
from dpoptim.data.npz_files import Arrays
from dpoptim.data.opened_files import decoding

PICTURES = (".jpg", ".jpeg", ".png")
CIFAR = {  # first file of each kind, the files to train on and to test, the labels, their names
    "data_batch_1": (
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        ("test_batch",),
        b"labels",
        b"label_names",
    ),
    "train": (("train",), ("test",), b"fine_labels", b"fine_label_names"),
}
NAMES_OF_CLASSES = ("batches.meta", "meta")
# all that CIFAR's pickles need; everything else is refused, so no code in a file is run
HARMLESS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


def read_image_folder(folder: Path) -> Arrays:
    """Read a folder of images with their labels, by whichever of the usual forms it has.

    * ``train-images-idx3-ubyte(.gz)`` and its kin, as for MNIST;
    * ``data_batch_1``, ... and ``test_batch`` (CIFAR-10), or ``train`` and ``test`` (CIFAR-100),
      in Python's pickle format;
    * ``train/CLASS/*.jpg`` and, if there is a hold-out, ``test/CLASS/*.jpg``: pictures of one
      size, sorted by class.

    Returns:
        Bytes of shape (n, height, width) or (n, channels, height, width), and labels as text.

    Raises:
        FileNotFoundError, ValueError: naming the file and the fix.
    """
    for first, (train, test, labels, names) in CIFAR.items():
        if (folder / first).is_file():
            return read_cifar(folder, train, test, labels, names)
    if (folder / "train").is_dir():
        return read_pictures(folder)
    return read_idx_folder(folder)


def read_cifar(
    folder: Path, train: tuple[str, ...], test: tuple[str, ...], labels: bytes, names: bytes
) -> Arrays:
    classes = class_names(folder, names)
    parts = [read_batches(folder, part, labels) for part in (train, test)]
    known = [
        [classes[label] if label < len(classes) else str(label) for label in part[1]]
        for part in parts
    ]
    return Arrays(parts[0][0], known[0], parts[1][0], known[1])


def read_batches(
    folder: Path, files: tuple[str, ...], key: bytes
) -> tuple[NDArray[np.uint8], list[int]]:
    images: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    for name in files:
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; fetch CIFAR's Python version again.")
        batch = read_pickle(path)
        x, y = batch.get(b"data", np.zeros(0)), batch.get(key, [])
        right = (
            isinstance(x, np.ndarray) and x.dtype == np.uint8 and x.ndim == 2 and x.shape[1] == 3072
        )
        whole = isinstance(y, list) and all(type(label) is int and label >= 0 for label in y)
        if not (right and whole and len(x) == len(y)):
            raise ValueError(f"{path} does not hold CIFAR's images and labels; fetch it again.")
        images.append(x.reshape(-1, 3, 32, 32))
        labels += y
    return np.concatenate(images), labels


def class_names(folder: Path, key: bytes) -> list[str]:
    """The names of the classes, if their file is there."""
    path = next((folder / name for name in NAMES_OF_CLASSES if (folder / name).is_file()), None)
    if path is None:
        return []
    names = read_pickle(path).get(key, [])
    if not isinstance(names, list) or not all(isinstance(name, bytes | str) for name in names):
        raise ValueError(f"{path} does not hold the names of CIFAR's classes; fetch it again.")
    return [name.decode("utf-8", "replace") if isinstance(name, bytes) else name for name in names]


class ArraysOnly(pickle.Unpickler):
    """An unpickler of numbers, text, lists, dicts and numpy arrays of bytes; makes nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in HARMLESS:
            raise pickle.UnpicklingError("a pickle that asks for more than arrays")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def read_pickle(path: Path) -> dict[Any, Any]:
    """Read a dictionary of arrays and lists from a pickle, running nothing it may hold."""
    with (
        decoding(path, "a pickle of plain arrays", "fetch it again from a source that you trust"),
        path.open("rb") as file,
    ):
        found = unpickled(file)
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no dictionary; fetch CIFAR's Python version again.")
    return {key.encode() if isinstance(key, str) else key: value for key, value in found.items()}


def unpickled(file: BinaryIO) -> Any:
    return ArraysOnly(file, encoding="bytes").load()


def read_pictures(folder: Path) -> Arrays:
    """Pictures in ``train/CLASS/`` and, if it is there, ``test/CLASS/``."""
    x, labels = read_sorted(folder / "train")
    if not (folder / "test").is_dir():
        return Arrays(x, labels, None, None)
    x_test, labels_test = read_sorted(folder / "test")
    if x_test.shape[1:] != x.shape[1:]:
        raise ValueError(
            f"{folder}: pictures in test/ have another size than those in train/; resize them."
        )
    return Arrays(x, labels, x_test, labels_test)


def read_sorted(folder: Path) -> tuple[NDArray[np.uint8], list[str]]:
    try:
        from PIL import Image
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"{missing}. Fix: pip install 'dpoptim[images]', which reads pictures."
        ) from missing
    files = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in PICTURES)
    if not files:
        raise FileNotFoundError(
            f"{folder} holds no pictures; sort them as {folder}/CLASS/NAME.jpg."
        )
    pictures = []
    for path in files:
        with (
            decoding(path, "a picture", "save it again, or take it out"),
            Image.open(path) as image,
        ):
            pictures.append(np.moveaxis(np.asarray(image.convert("RGB")), -1, 0))
        if pictures[-1].shape != pictures[0].shape:
            raise ValueError(
                f"{path} has another size than {files[0]}; resize all pictures to one size."
            )
    return np.stack(pictures), [path.parent.name for path in files]
