"""``dpoptim predict``: a trained model reads records by column name, chunk by chunk, to CSV."""

import csv
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dpoptim.data import Floats, Preparation, Schema
from dpoptim.data.encoding import UnmatchedColumns, encode_table
from dpoptim.data.npz_files import read_features
from dpoptim.data.numbers import as_texts
from dpoptim.data.opened_files import kind_of
from dpoptim.data.table_files import Values, is_table
from dpoptim.estimators.table import clip_rows
from dpoptim.files import begin_beside
from dpoptim.runs.saved_model import SavedModel, load_model, model_file
from dpoptim.target_range import TargetRange

CHUNK = 8192  # records at a time, of arrays


@dataclass(frozen=True)
class Predicted:
    """The file of predictions; ``score``, by ``measure``, where true values were public.

    Attributes:
        unmatched: columns of categories of which no record has one; as private as the records.
    """

    records: int
    score: float | None
    measure: str
    unmatched: tuple[str, ...] = ()


def predict_file(
    run: Path,
    data: Path,
    out: Path,
    *,
    public: bool = False,
    keep: Sequence[str] = (),
    overwrite: bool = False,
) -> Predicted:
    """Predict every record of ``data`` and write ``out``: one line a record, in order.

    Columns: those to keep; ``prediction``; and for classification ``probability of CLASS`` for each
    class.

    Args:
        run: a run directory, or its ``model.pt``.
        data: a table with the columns that the model was trained on, in any order; or arrays in a
            .npz file.
        public: the owner declares ``data`` public, true values included: compute the score, if
            they are there.
        keep: columns of a table that are copied beside the predictions, such as who a record is of.
        overwrite: replace ``out`` if it is there.

    Raises:
        FileNotFoundError, ValueError: naming the file, the column and the fix. ``out`` is then as
            it was.

    **Guarantee.** The model is private already, and nothing here touches its training data. The
    predictions are as private as the records in ``data``: whoever may see those may see these.
    """
    files = {"the records to predict": data, "the model": model_file(run)}
    refuse_to_replace(out, files, overwrite=overwrite)
    saved = load_model(run)
    if saved.encoding is None:
        raise ValueError(
            f"{run} does not say how features are made of records; train again with this version."
        )
    score = Score(saved) if public else None
    header = ["prediction", *(f"probability of {name}" for name in saved.class_names)]
    refuse_to_keep(data, keep, header)
    columns = UnmatchedColumns(saved.encoding) if isinstance(saved.encoding, Schema) else None
    records = 0
    temporary, handle = begin_beside(out, private=False)
    try:
        with os.fdopen(handle, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*keep, *header])
            for x, y, kept in features_of(saved, data, with_targets=public, keep=keep):
                outputs = outputs_of(saved, x)
                writer.writerows(lines_beside_kept(kept, lines_of(saved, outputs)))
                records += len(x)
                if columns is not None:
                    columns.add(x)
                if score is not None and y is not None:
                    score.add(outputs, y)
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    measure = "accuracy" if saved.target_bounds is None else "R2"
    unmatched = () if columns is None else columns.names()
    return Predicted(records, None if score is None else score.value(), measure, unmatched)


def refuse_to_replace(out: Path, kept: Mapping[str, Path], *, overwrite: bool) -> None:
    """Refuse a place for predictions that is no file's, or one of the files that are kept.

    Args:
        overwrite: whether others are not.
    """
    if out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"--out {out} must be a file's name, in a folder that is there.")
    for what, path in kept.items():
        if out.exists() and path.exists() and out.samefile(path):
            raise ValueError(f"--out {out} would replace {what}. Fix: another name.")
    if out.exists() and not overwrite:
        raise ValueError(f"--out {out} exists; name another file, or allow --overwrite.")


def refuse_to_keep(data: Path, keep: Sequence[str], header: Sequence[str]) -> None:
    if keep and not is_table(data):
        raise ValueError(
            f"--id names a column of a table, and {data} is none. Fix: leave it out; predictions "
            "are in the order of the records."
        )
    twice = next((name for name in keep if name in header or keep.count(name) > 1), None)
    if twice is not None:
        raise ValueError(
            f"--id {twice} would be two columns of one name in the predictions. Fix: name each "
            "column once, and none that is called as one of the predictions."
        )


def lines_beside_kept(kept: Sequence[Values], lines: Iterable[list[str]]) -> Iterator[list[str]]:
    """Lines of predictions behind their records' kept values."""
    texts = [as_texts(values) for values in kept]
    return ([*own, *line] for *own, line in zip(*texts, lines, strict=True))


def features_of(
    saved: SavedModel, data: Path, *, with_targets: bool, keep: Sequence[str] = ()
) -> Iterator[tuple[Floats, NDArray[np.int64] | NDArray[np.float32] | None, Sequence[Values]]]:
    """The records as the model takes them, in chunks, with targets where asked for and there.

    Args:
        keep: columns of a table that come along.
    """
    if not data.is_file():
        raise FileNotFoundError(
            f"{data} does not exist; --data takes a file with the records to predict."
        )
    if isinstance(saved.encoding, Schema):
        if not is_table(data):
            raise ValueError(
                f"{data}: the model was trained on a table; give one with the same columns."
            )
        for encoded in encode_table(data, saved.encoding, labels=with_targets, keep=keep):
            yield encoded.x, encoded.y, encoded.kept
        return
    assert isinstance(saved.encoding, Preparation)
    if kind_of(data) != ".npz":
        raise ValueError(
            f"{data}: the model was trained on arrays; give a .npz file with features 'x'."
        )
    if with_targets:
        raise ValueError(
            "--data-is-public scores tables; for arrays, leave it out and compare the predictions."
        )
    x = read_features(data)
    for start in range(0, len(x), CHUNK):
        try:
            yield saved.encoding(x[start : start + CHUNK]), None, ()
        except ValueError as error:
            raise ValueError(f"{data}, from record {start + 1} on: {error}") from None


@torch.no_grad()
def outputs_of(saved: SavedModel, x: Floats) -> NDArray[np.float64]:
    """Class probabilities, float64 (records, classes); or predicted numbers, (records, 1)."""
    if saved.row_norm is not None:
        x = clip_rows(x.reshape(len(x), -1), saved.row_norm).astype(np.float32).reshape(x.shape)
    outputs = saved.model(torch.from_numpy(np.ascontiguousarray(x))).double()
    if saved.target_bounds is None:
        return outputs.softmax(1).numpy()
    low, high = saved.target_bounds
    predicted = TargetRange.of(saved.target_bounds).unscaled(outputs.numpy())
    return np.clip(predicted, low, high)


def lines_of(saved: SavedModel, outputs: NDArray[np.float64]) -> Iterator[list[str]]:
    if saved.target_bounds is not None:
        yield from ([f"{value:.9g}"] for value in outputs[:, 0].tolist())
        return
    for best, row in zip(outputs.argmax(1).tolist(), outputs.tolist(), strict=True):
        yield [saved.class_names[best], *(f"{value:.6g}" for value in row)]


class Score:
    """Accuracy, or R2, of public records as they come."""

    def __init__(self, saved: SavedModel) -> None:
        self._bounds = saved.target_bounds
        self._right = self._count = 0
        self._sums = np.zeros(3)  # of squared errors, of targets, of their squares

    def add(self, outputs: NDArray[np.float64], y: NDArray[np.int64] | NDArray[np.float32]) -> None:
        self._count += len(y)
        if self._bounds is None:
            self._right += int((outputs.argmax(1) == y).sum())
            return
        low, high = self._bounds
        unit = (outputs[:, 0] - low) / (high - low) * 2 - 1
        targets = y.astype(np.float64)
        self._sums += [np.square(unit - targets).sum(), targets.sum(), np.square(targets).sum()]

    def value(self) -> float | None:
        if self._count == 0:
            return None
        if self._bounds is None:
            return self._right / self._count
        errors, total, squares = self._sums
        spread = squares - total**2 / self._count
        return float(1 - errors / spread) if spread > 0 else None
