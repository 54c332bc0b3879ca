"""Tables of numbers with a label column from CSV files."""

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpoptim.data.dataset import Floats


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
