"""Data for the command line: the bundled digits, Fashion-MNIST from its IDX files, and tables from .npz or .csv.

A file that cannot be used is refused here, before any training, by a message for its owner. Nothing here looks at the
data to choose a setting, except for the labels of a table that its owner declares public.
"""

import csv
import gzip
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpoptim.text_features import encode_text

__all__ = ["Data", "encode_text", "hold_out_fifth", "load_digits", "load_fashion_mnist", "load_table"]

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]
FASHION_MNIST_DIRECTORY = "/usr/share/datasets/fashion-mnist"  # Debian's package dataset-fashion-mnist
IDX_UNSIGNED_BYTE = 0x08


@dataclass(frozen=True)
class Data:
    """Features (records, ...) and labels 0..classes-1, for training and, where there is one, a hold-out.

    Attributes:
        public: whether anything computed from the data may be shown (hold-out curves, non-private comparison).
    """

    name: str
    x: Floats
    y: Labels
    x_test: Floats | None
    y_test: Labels | None
    class_names: tuple[str, ...]
    public: bool

    @property
    def classes(self) -> int:
        return len(self.class_names)


def load_digits(seed: int = 0) -> Data:
    """scikit-learn's 1,797 handwritten digits (8 x 8), one fifth held out at random by ``seed``."""
    from sklearn.datasets import load_digits as bundled

    images, labels = bundled(return_X_y=True)
    x: Floats = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    y: Labels = labels.astype(np.int64)
    names = tuple(str(digit) for digit in range(10))
    return hold_out_fifth(Data("digits", x, y, None, None, names, public=True), seed)


def hold_out_fifth(data: Data, seed: int) -> Data:
    """Hold out a random fifth of a public data set."""
    order = np.random.default_rng(seed).permutation(len(data.x))
    held_out, rest = order[: len(order) // 5], order[len(order) // 5 :]
    return replace(data, x=data.x[rest], y=data.y[rest], x_test=data.x[held_out], y_test=data.y[held_out])


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


def read_idx(folder: Path, stem: str, axes: int) -> NDArray[np.uint8]:
    """One IDX file of unsigned bytes: magic number, big-endian sizes, entries."""
    candidates = [folder / f"{stem}.gz", folder / stem]
    path = next((p for p in candidates if p.is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"{candidates[0]} does not exist (nor without .gz). Fix: point --data-dir at the folder of Fashion-MNIST's "
            "four IDX files; on Debian, install the package dataset-fashion-mnist."
        )
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            content = stream.read()
    except (OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be read ({error}); fetch it again.") from None
    header = 4 + 4 * axes
    if len(content) < header or content[:4] != bytes([0, 0, IDX_UNSIGNED_BYTE, axes]):
        raise ValueError(f"{path} is not an IDX file of unsigned bytes with {axes} axes; fetch it again.")
    sizes = struct.unpack(f">{axes}I", content[4:header])
    if len(content) - header != int(np.prod(sizes)):
        raise ValueError(f"{path} should hold {sizes} entries but is cut short; fetch it again.")
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes)


def load_table(
    path: str | Path, target: str | None, *, classes: tuple[str, ...] | None = None, public: bool = False
) -> Data:
    """A table of numbers with a label column: ``.csv`` with a header line, or ``.npz`` with arrays.

    Args:
        path: a .csv file; or a .npz file with an array of features ``x`` (or ``X``) and one of labels.
        target: the label's column (.csv) or array (.npz; default ``y``).
        classes: the labels that may occur, in order; public. None: read off the data, which only public data allows.
        public: the owner declares the data public.

    Raises:
        FileNotFoundError, ValueError: naming the file, the column and the fix. These messages are for the data's owner,
            before a run; nothing of the data reaches a log of the run.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; --data takes digits, fashion-mnist, a .csv or a .npz file.")
    if path.suffix == ".csv":
        x, raw = read_csv(path, target)
    elif path.suffix == ".npz":
        x, raw = read_npz(path, target or "y")
    else:
        raise ValueError(f"{path}: cannot read {path.suffix or 'a file without ending'}; give a .csv or a .npz file.")
    if len(x) == 0:
        raise ValueError(f"{path} has no records.")
    if not np.isfinite(x).all():
        row = int(np.argwhere(~np.isfinite(x.reshape(len(x), -1)).all(1))[0, 0])
        raise ValueError(f"{path}: record {row + 1} has a feature that is NaN or infinite; clean or drop it.")
    if classes is None and not public:
        raise ValueError(
            f"{path}: --classes is missing. The list of labels goes into the released model, so on private data it must be "
            "known beforehand: declare it (--classes no,yes), or declare the data public (--data-is-public)."
        )
    names = classes if classes is not None else tuple(sorted(set(raw.tolist()), key=natural_order))
    if len(set(names)) < len(names):
        raise ValueError(f"--classes names a label twice: {', '.join(names)}.")
    if len(names) < 2:
        raise ValueError(f"{path}: the label takes fewer than two values; there is nothing to classify.")
    place = {name: i for i, name in enumerate(names)}
    unknown = next((i for i, label in enumerate(raw.tolist()) if label not in place), None)
    if unknown is not None:
        raise ValueError(
            f"{path}: record {unknown + 1} has a label outside the declared classes {', '.join(names)}; "
            "add it to --classes or drop the record. (Labels are compared as text: 1.0 is not 1.)"
        )
    y = np.array([place[label] for label in raw.tolist()], dtype=np.int64)
    return Data(path.stem, x, y, None, None, names, public)


def natural_order(label: str) -> tuple[int, float, str]:
    """Numbers by value, then text."""
    try:
        return (0, float(label), label)
    except ValueError:
        return (1, 0.0, label)


def read_csv(path: Path, target: str | None) -> tuple[Floats, NDArray[np.str_]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:  # with or without a byte-order mark
            rows = list(csv.reader(stream))
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; save it as UTF-8.") from None
    if not rows:
        raise ValueError(f"{path} is empty; its first line must name the columns.")
    header, body = [name.strip() for name in rows[0]], rows[1:]
    if target is None:
        raise ValueError(f"{path}: --target is missing; it names the label's column, one of {', '.join(header)}.")
    if target not in header:
        raise ValueError(f"{path} has no column {target!r}; --target takes one of {', '.join(header)}.")
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{path} has two columns named {twice!r}; rename one.")
    if len(header) < 2:
        raise ValueError(f"{path} has no column beside the label {target!r}; there is nothing to learn from.")
    column = header.index(target)
    features = np.empty((len(body), len(header) - 1), dtype=np.float32)
    labels = []
    for number, row in enumerate(body, start=2):
        if len(row) != len(header):
            raise ValueError(f"{path}, line {number}: {len(row)} columns where the header has {len(header)}.")
        values = row[:column] + row[column + 1 :]
        try:
            with np.errstate(over="ignore"):  # too large for float32 is infinite, and refused by the caller
                features[number - 2] = [float(value) for value in values]
        except ValueError:
            names = header[:column] + header[column + 1 :]
            bad = next(name for name, value in zip(names, values, strict=True) if not is_number(value))
            raise ValueError(
                f"{path}, line {number}: column {bad!r} is empty or not a number; fill, encode or drop it before training."
            ) from None
        labels.append(row[column].strip())
    return features, np.array(labels, dtype=np.str_)


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_npz(path: Path, target: str) -> tuple[Floats, NDArray[np.str_]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError):
        raise ValueError(
            f"{path} is not a .npz archive of plain arrays; write it with numpy.savez(path, x=..., y=...)."
        ) from None
    features = next((name for name in ("x", "X") if name in arrays), None)
    if features is None or target not in arrays:
        raise ValueError(
            f"{path} holds the arrays {', '.join(arrays) or '(none)'}; it must hold features 'x' and labels {target!r} "
            "(--target names another array)."
        )
    x, raw = arrays[features], arrays[target]
    real = np.issubdtype(x.dtype, np.number) or x.dtype == np.bool_
    if x.ndim < 2 or not real or np.iscomplexobj(x):
        raise ValueError(f"{path}: {features!r} must be an array of real numbers (records, ...), got shape {x.shape}.")
    if raw.shape != (len(x),):
        raise ValueError(f"{path}: {target!r} has shape {raw.shape}; it must hold one label for each of {len(x)} rows.")
    with np.errstate(over="ignore"):  # too large for float32 is infinite, and refused by the caller
        x = x.astype(np.float32)
    return x, np.array([str(label) for label in raw.tolist()], dtype=np.str_)
