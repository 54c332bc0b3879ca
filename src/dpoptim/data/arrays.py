"""Arrays of records with labels: .npz files and public image sets, prepared record by record."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpoptim.data.dataset import Data, Labels
from dpoptim.data.image_folders import read_image_folder
from dpoptim.data.npz_files import Arrays, read_npz
from dpoptim.data.numbers import places_among
from dpoptim.data.preparation import ChannelsFirst, Divide, Preparation, Step
from dpoptim.data.public_schemas import natural_order
from dpoptim.data.tables import check_classes, classes_missing, existing_table

PIXELS: tuple[Step, ...] = (ChannelsFirst(), Divide(255.0))  # bytes to [0, 1]


def load_arrays(
    path: str | Path,
    target: str | None = None,
    *,
    classes: tuple[str, ...] | None = None,
    public: bool = False,
    pixels: Sequence[Step] = PIXELS,
    numbers: Sequence[Step] = (),
    cache: Path | None = None,
) -> Data:
    """Load features and labels from a .npz file or a folder of images, with their hold-out if any.

    Args:
        target: the array of labels; None: ``y`` or ``y_train``.
        classes: the labels that may occur, in order; public. None: read off the data, which only
            public data allows.
        public: the owner declares the data public.
        cache: see `Preparation`.
        pixels, numbers: what happens to records of bytes, which are pixels, and to records of
            other numbers.
        path: of the file or folder.

    Returns:
        features and labels, with what makes such features of new records.

    Raises:
        FileNotFoundError, ValueError: naming the file, the array and the fix.

    Examples:
        >>> import numpy as np
        >>> from dpoptim.data import load_arrays
        >>> np.savez("points.npz", x=np.eye(4, dtype=np.float32), y=np.array([0, 1, 0, 1]))
        >>> load_arrays("points.npz", classes=("0", "1")).x.shape
        (4, 4)
    """
    path = Path(path)
    arrays = read_image_folder(path) if path.is_dir() else read_npz(existing_table(path), target)
    steps = pixels if arrays.x.dtype == np.uint8 else numbers
    return from_arrays(
        str(path), path.stem, arrays, classes=classes, public=public, steps=steps, cache=cache
    )


def from_arrays(
    source: str,
    name: str,
    arrays: Arrays,
    *,
    classes: tuple[str, ...] | None,
    public: bool,
    steps: Sequence[Step],
    cache: Path | None = None,
) -> Data:
    """Make a data set of what a file holds; ``source`` is named in errors."""
    if len(arrays.x) == 0:
        raise ValueError(f"{source} has no records.")
    preparation = Preparation(arrays.x.shape[1:], tuple(steps))
    if classes is None and not public:
        raise ValueError(classes_missing(source))
    names = classes if classes is not None else tuple(sorted(set(arrays.labels), key=natural_order))
    check_classes(source, names)
    return Data(
        name,
        prepared_features(source, preparation, arrays.x, cache),
        label_numbers(source, arrays.labels, names),
        None
        if arrays.x_test is None
        else prepared_features(source, preparation, arrays.x_test, cache),
        None if arrays.labels_test is None else label_numbers(source, arrays.labels_test, names),
        names,
        public,
        encoding=preparation,
    )


def label_numbers(source: str, labels: list[str], names: tuple[str, ...]) -> Labels:
    y = places_among(names, labels)
    if (y < 0).any():
        raise ValueError(
            f"{source}: record {int(np.argmax(y < 0)) + 1} has a label outside the declared "
            f"classes {', '.join(names)}; add it to --classes or drop the record. (Labels are "
            "compared as text, but that 1.0 is 1.)"
        )
    return y


def prepared_features(
    source: str, preparation: Preparation, x: NDArray[Any], cache: Path | None
) -> NDArray[np.float32]:
    try:
        return preparation(x, cache=cache)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
