"""A classification table from a file: numbers, and labels whose list is public.

A file that cannot be used is refused here, before any training, by a message for its owner. Nothing here looks at the
data to choose a setting, except for the labels of a table that its owner declares public.
"""

from pathlib import Path

import numpy as np

from dpoptim.data.csv_files import read_csv
from dpoptim.data.dataset import Data
from dpoptim.data.npz_files import read_npz


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
