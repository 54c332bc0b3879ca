"""Tables before training, for all estimators: bounded rows, public classes, data sets.

Whatever looks at the table here is a rule on each row by itself, or is said to be taken on trust.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import assert_all_finite
from torch import Tensor
from torch.utils.data import TensorDataset

from dpoptim.arguments import bound, real_number
from dpoptim.data.input_arrays import checked_table, number_array, one_axis
from dpoptim.data.parquet_rows import ParquetRows
from dpoptim.data.sparse_rows import EntriesOfRows, SparseRows, clip_entries
from dpoptim.missing_values import is_gap
from dpoptim.solvers.objective import held_in_memory
from dpoptim.target_range import TargetRange

Floats = NDArray[np.float64]
BLOCK = 1 << 13  # rows taken at a time
READ_OFF = "on trust: the classes are public, though they were read off y"
UNEQUAL = "X and y must have equally many rows, one label or target for each record."


class ReadOffWarning(UserWarning):
    """Classes were read off private labels: a label that one record alone has is published."""


def classes_in(labels: NDArray[Any], *, stacklevel: int = 2) -> NDArray[Any]:
    """The labels that occur, in order, with a warning, before anything is spent.

    **Guarantee.** None: whoever reads ``classes_`` sees each label that any record has.
    """
    warnings.warn(
        "the classes are read off y: they are published as they are, and a label that one record "
        "alone has names it. Fix: classes=[...], all that may occur, from public knowledge.",
        ReadOffWarning,
        stacklevel=stacklevel + 1,
    )
    return np.unique(labels)


def clipped_to(columns: int) -> str:
    """A note on rows that nobody has said a bound for."""
    return (
        f"rows were clipped to norm {columns**0.5:.3g}, the root of their number of columns: scale "
        "the features by public constants"
    )


def clip_rows(x: NDArray[Any], norm: float, dtype: DTypeLike | None = None) -> NDArray[Any]:
    """Rows scaled down to ``norm``, in a copy; zero where entries or length are not finite.

    Args:
        x: shape (..., d), float32 or float64.
        norm: > 0.
        dtype: of the copy; None: that of x.
    """
    whole = np.empty(x.shape, x.dtype if dtype is None else dtype)
    given, clipped = (each.reshape(-1, x.shape[-1]) for each in (x, whole))  # this one a view
    for start in range(0, len(clipped), BLOCK):
        here = slice(start, start + BLOCK)
        rows = np.array(given[here], order="C")
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            squared = np.einsum("ij,ij->i", rows, rows).astype(np.float64)
        length = np.sqrt(squared, where=squared > 0, out=np.ones_like(squared))
        # zero, not finite, or out of the range where float32 squares hold
        odd = ~((squared > 1e-30) & (squared < 1e30))
        if odd.any():
            rows[odd], length[odd] = measured_with_care(rows[odd])
        factors = (norm / np.maximum(length, norm))[:, None].astype(rows.dtype)
        np.multiply(rows, factors, out=clipped[here], casting="same_kind")
    return whole


class ClippedRows:
    """`clip_rows` of a table, done as slices of it, or places, are asked for.

    Args:
        x: an array, or what slices to one, of shape (n, d) or (n, K, d).
        norm: > 0.
        dtype: of the slices; None: that of x.
    """

    def __init__(self, x: Any, norm: float, dtype: DTypeLike | None = None) -> None:
        self._x, self._norm, self._dtype = x, norm, dtype
        self.shape = x.shape

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, rows: slice | NDArray[np.intp]) -> NDArray[Any]:
        return clip_rows(self._x[rows], self._norm, self._dtype)

    def at_hand(self) -> "ClippedRows | EntriesOfRows | NDArray[Any]":
        """All of them now, if the table is in memory, or the entries of a wide sparse one."""
        if isinstance(self._x, SparseRows) and self._x.wide:
            return EntriesOfRows(clip_entries(self._x.table, self._norm))
        return self[:] if held_in_memory(self._x) else self


def measured_with_care(rows: NDArray[Any]) -> tuple[NDArray[Any], Floats]:
    """Rows, zero if not finite, and lengths (1 for zero) without overflow or underflow."""
    rows[~np.isfinite(rows).all(1)] = 0
    largest = np.abs(rows).max(1, initial=0.0).astype(np.float64)
    largest[largest == 0] = 1
    with np.errstate(over="ignore"):  # infinite: the row is scaled to zero
        length = largest * np.sqrt(np.square(rows / largest[:, None], dtype=np.float64).sum(1))
    return rows, np.where(length > 0, length, 1)


def public_norm(data_norm: float | None, features: int) -> float:
    """The bound on row norms: given, or the square root of the number of features."""
    if data_norm is None:
        return math.sqrt(features)
    return bound("data_norm", data_norm)


def public_classes(
    classes: Sequence[Any] | None, y: Any, *, rows: int
) -> tuple[NDArray[Any], NDArray[np.int64], tuple[str, ...]]:
    """The classes, each record's class number, and what must be said of it.

    Raises:
        ValueError: not one label for each row, fewer than two classes, or a label that is none of
            the declared ones.
    """
    labels = one_label_a_row(y, rows=rows)
    found, numbers = class_numbers(
        classes_in(labels, stacklevel=6) if classes is None else classes, labels
    )
    return found, numbers, (READ_OFF,) if classes is None else ()


def public_weights(class_weight: object, classes: NDArray[Any]) -> Floats | None:
    """The classes' weights in their order, over the largest of them; None where all are 1.

    Weights above 1 would multiply what a record may add.

    Raises:
        ValueError: not a mapping from classes to finite weights of at least 0.
    """
    if class_weight is None:
        return None
    if not isinstance(class_weight, Mapping):
        raise ValueError(
            f"class_weight must be a mapping from classes to public weights, got {class_weight!r}: "
            "weights from the labels are private. Fix: "
            "dpoptim.preprocessing.DPClassCounts(...).fit(y).class_weight(), which is charged."
        )
    if unknown := [name for name in class_weight if name not in classes]:
        raise ValueError(f"class_weight names {unknown[0]!r}, which is none of the classes.")
    weights = np.array(
        [real_number("class_weight", class_weight.get(name, 1.0)) for name in classes.tolist()]
    )
    if not ((weights >= 0) & (weights < np.inf)).all():
        raise ValueError("class_weight must hold finite numbers of at least 0.")
    if not weights.any():
        raise ValueError("class_weight must be above 0 for some class.")
    return weights / weights.max()


def one_label_a_row(y: Any, *, rows: int) -> NDArray[Any]:
    """Labels of shape (rows,), or a ValueError."""
    y = one_axis("y", y, warn=True)
    if len(y) != rows:
        raise ValueError(UNEQUAL)
    if y.dtype == object:
        if any(map(is_gap, y)):
            raise ValueError("y has missing labels. Fix: drop those records, or give them a class.")
        y = of_one_kind(y)
    # which would tell how many labels differ, or that one is NaN
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore", UserWarning)
        check_classification_targets(y)
    return y


def as_float(label: object) -> object:
    """A decimal number as a float, as all numbers are that programs know; others as they are."""
    return float(label) if isinstance(label, Decimal) else label


def of_one_kind(labels: NDArray[Any]) -> NDArray[Any]:
    """Labels held as objects: all texts, as they are, or numbers and truth values as numbers.

    Raises:
        ValueError: there are others, or several kinds.
    """
    if all(isinstance(label, str) for label in labels):
        return labels
    numbers = one_axis("y", [as_float(label) for label in labels.tolist()])
    if numbers.dtype.kind not in "biuf":
        raise ValueError(
            "Unknown label type: y has labels that are neither all texts nor all numbers. Fix: "
            "labels of one type, such as y.astype(str), and classes= alike."
        )
    return numbers


def class_numbers(
    classes: Sequence[Any] | NDArray[Any], labels: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The classes in order, and each label's number in them; a ValueError as `public_classes`."""
    found = np.unique(np.asarray(classes))
    if len(found) < 2:
        raise ValueError(
            f"the number of classes must be greater than one; got {len(found)} class. Fix: "
            "classes=, all that may occur, from public knowledge."
        )
    numbers = np.zeros(len(labels), dtype=np.int64)
    with suppress(TypeError):  # labels of another type than the classes
        numbers = np.searchsorted(found, labels).clip(0, len(found) - 1)
    if (found[numbers] != labels).any():
        if (found.dtype.kind == "U") != isinstance(labels[0], str):
            raise ValueError(
                "y has a label that is none of the declared classes. Fix: classes= of y's type, "
                "such as classes=[0, 1] for numbers and classes=['0', '1'] for texts, or y made "
                "of theirs: the ones are texts, the others numbers, so none are equal."
            )
        raise ValueError(
            "y has a label that is none of the declared classes. Fix: list every class in classes=."
        )
    return found, numbers.astype(np.int64)


def bounded_targets(y: Any, target_bound: Any, *, rows: int) -> tuple[Floats, TargetRange]:
    """Targets cut to the range that ``target_bound`` allows, and scaled to [-1, 1]; the range.

    Raises:
        ValueError: not one finite target for each row, or a bound that is none.
    """
    if target_bound is None:
        raise ValueError(
            "target_bound is missing: a public bound on |y|, or (lowest, highest), to which "
            "targets are clipped. Fix: "
            "what y can be in principle, which must not be read off the data."
        )
    targets = number_array("y", one_axis("y", y, warn=True))
    assert_all_finite(targets, input_name="y")
    if len(targets) != rows:
        raise ValueError(UNEQUAL)
    allowed = TargetRange.of(target_bound)
    return allowed.scaled(targets), allowed


def table(x: Any, *, reset: bool, estimator: Any) -> Any:
    """``x`` as floats, columns checked as in scikit-learn; `ParquetRows` as is.

    Returns:
        an array, or `SparseRows` of a sparse table.
    """
    if isinstance(x, ParquetRows):
        names = np.asarray(x.columns, dtype=object)
        if reset:
            estimator.n_features_in_, estimator.feature_names_in_ = len(names), names
        elif not np.array_equal(getattr(estimator, "feature_names_in_", names), names):
            raise ValueError("the columns must be those of fit, in the same order.")
        return x
    return checked_table(
        estimator,
        x,
        reset=reset,
        accept_sparse="csr",
        dtype=[np.float64, np.float32],
        ensure_min_samples=1,
    )


def data_set_of(
    x: Any, targets: Tensor, weights: NDArray[np.float64] | None, *, norm: float
) -> TensorDataset:
    """Rows, (n, features), targets, and weights of losses, (n,), if there are any; float32."""
    columns = [table_of_rows(x, norm), targets]
    if weights is not None:
        columns.append(torch.from_numpy(weights.astype(np.float32)))
    return TensorDataset(*columns)


def table_of_rows(x: Any, norm: float) -> Any:
    """The rows, clipped, as a tensor of float32; or what a `TensorDataset` takes for one."""
    if isinstance(x, SparseRows):
        return SparseTensor(ClippedRows(x, norm))
    return torch.from_numpy(clip_rows(x, norm).astype(np.float32))


class SparseTensor:
    """Clipped rows of a sparse table, float32: what `TensorDataset` and its readers ask a tensor.

    Rows are made dense as they are read.
    """

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, rows: ClippedRows) -> None:
        self._rows = rows
        self.shape = torch.Size(rows.shape)

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def dim(self) -> int:
        return len(self.shape)

    def data_ptr(self) -> int:
        """A number that no other table has; see `training.batches.repeated_records`."""
        return id(self._rows)

    def stride(self) -> tuple[int, ...]:
        return (self.shape[1], 1)

    def index_select(self, axis: int, index: Tensor) -> Tensor:
        """Rows, in the order of ``index``; dense. Args: axis: 0."""
        return torch.from_numpy(self._rows[index.cpu().numpy()].astype(np.float32))

    def __getitem__(self, index: Any) -> Tensor:
        return self.index_select(0, torch.as_tensor(index).reshape(-1)).view(
            *torch.as_tensor(index).shape, self.shape[1]
        )
