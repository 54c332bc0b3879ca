"""Arrays of features and labels from numpy's .npz archives."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpoptim.data.opened_files import decoding

# names of arrays, as people use them
FEATURES = (("x_train", "x_test"), ("X_train", "X_test"), ("x", None), ("X", None))
ORDINARY_TARGET = "y"
OF_SPARSE = {"data", "shape", "format"}  # of files of scipy.sparse.save_npz
TO_PREDICT = ("x", "X", "x_test", "X_test")


@dataclass(frozen=True)
class Arrays:
    """Contents of a .npz file: features as they are, labels as text, a hold-out if there."""

    x: NDArray[Any]
    labels: list[str]
    x_test: NDArray[Any] | None
    labels_test: list[str] | None


def read_npz(path: Path, target: str | None) -> Arrays:
    """Read arrays ``x`` and ``y``, or ``x_train``, ``y_train``, ``x_test``, ``y_test``.

    Args:
        target: name of the label's array; None: ``y`` or ``y_train``.

    Raises:
        ValueError: the file is damaged, an array is missing, or shapes do not agree.
    """
    return chosen_arrays(path, read_all(path), target)


def chosen_arrays(path: Path, arrays: dict[str, NDArray[Any]], target: str | None) -> Arrays:
    """Take features and labels, to train and maybe to test, from the arrays that ``path`` holds."""
    held = ", ".join(arrays) or "(none)"
    pair = next((names for names in FEATURES if names[0] in arrays), None)
    if arrays.keys() >= OF_SPARSE:
        raise ValueError(
            f"{path} holds a sparse table of SciPy, which the command line does not read. Fix: "
            "dpoptim.estimators, which do; or hashed into few columns, as "
            "numpy.savez(path, x=table.toarray(), y=labels)."
        )
    if pair is None:
        raise ValueError(
            f"{path} holds the arrays {held}; it must hold features 'x' and labels 'y', or "
            "x_train, y_train, x_test, y_test (--target names another array of labels)."
        )
    x, label = pair[0], target or ("y_train" if pair[1] else ORDINARY_TARGET)
    x_test, label_test = pair[1], label.replace("_train", "_test")
    if label not in arrays:
        raise ValueError(
            f"{path} holds the arrays {held}, and no labels {label!r}. Fix: --target names the "
            "array of labels."
        )
    checked_arrays(path, arrays[x], arrays[label], x, label)
    features, labels = arrays[x], as_text(arrays[label])
    if x_test is None or label_test == label or not {x_test, label_test} <= arrays.keys():
        return Arrays(features, labels, None, None)
    checked_arrays(path, arrays[x_test], arrays[label_test], x_test, label_test)
    if arrays[x_test].shape[1:] != features.shape[1:]:
        raise ValueError(f"{path}: {x_test!r} has records of another shape than {x!r}.")
    return Arrays(features, labels, arrays[x_test], as_text(arrays[label_test]))


def read_all(path: Path) -> dict[str, NDArray[Any]]:
    with (
        decoding(
            path, "a .npz archive of plain arrays", "write it with numpy.savez(path, x=..., y=...)"
        ),
        path.open("rb") as stream,  # opened here, since numpy leaves damaged ones open
        np.load(stream, allow_pickle=False) as archive,
    ):
        return {name: np.asarray(archive[name]) for name in archive.files}


def read_npy_folder(folder: Path, names: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Read those of the named arrays that the folder holds, each as NAME.npy."""
    arrays = {}
    for path in (folder / f"{name}.npy" for name in names):
        if path.is_file():
            with decoding(path, "a plain array", "write it with numpy.save(path, array)"):
                arrays[path.stem] = np.load(path, allow_pickle=False)
    return arrays


def read_features(path: Path) -> NDArray[Any]:
    """Read the features to predict from: the array ``x``, ``X`` or ``x_test``, or the only one.

    Raises:
        ValueError: the file is damaged, or none of its arrays is named so.
    """
    arrays = read_all(path)
    name = next((name for name in TO_PREDICT if name in arrays), None)
    if name is None and len(arrays) == 1:
        (name,) = arrays
    if name is None:
        raise ValueError(
            f"{path} holds the arrays {', '.join(arrays) or '(none)'}; name the one to predict "
            "'x', such as by numpy.savez(path, x=...)."
        )
    return arrays[name]


def checked_arrays(
    path: Path, x: NDArray[Any], labels: NDArray[Any], name: str, label: str
) -> None:
    real = np.issubdtype(x.dtype, np.number) or x.dtype == np.bool_
    if x.ndim < 2 or not real or np.iscomplexobj(x):
        raise ValueError(
            f"{path}: {name!r} must be an array of real numbers (records, ...), got {x.dtype}, "
            f"with {x.ndim} axes."
        )
    if labels.shape != (len(x),):
        raise ValueError(
            f"{path}: {label!r} must hold one label for each record of {name!r}, in one axis."
        )


def as_text(labels: NDArray[Any]) -> list[str]:
    return [str(label) for label in labels.tolist()]
