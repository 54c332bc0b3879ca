"""Arrays of numbers from what users hand over, with errors that quote no value.

NumPy's and scikit-learn's own errors print the value, or the array, that they could not take.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import issparse

from dpoptim.data.sparse_rows import SparseRows, canonical

Floats = NDArray[np.float64]
# beginnings of scikit-learn's messages that name columns, types and counts, and no value
WITHOUT_VALUES = (
    "Found array with",
    "Input X contains infinity",
    "Sparse data",
    "The feature names",
    "X has ",
)
TWO_AXES = (
    "Expected 2D array: X must have one row a record and one column a feature. Reshape your data. "
    "Fix: X[:, None] for a single feature, X[None, :] for a single record."
)


def checked_table(estimator: Any, x: Any, **how: Any) -> Any:
    """scikit-learn's ``validate_data(estimator, x, **how)``; `SparseRows` of a sparse table.

    Raises:
        ValueError, TypeError: as there, without values; or a column holds dates or text.
    """
    from sklearn.utils.validation import validate_data

    refuse_dates(x)
    if issparse(x) and x.ndim != 2:
        raise ValueError(TWO_AXES)
    x = canonical(x) if issparse(x) else without_fill(x, sparse="accept_sparse" in how)
    try:
        found = validate_data(estimator, x, **how)
        return SparseRows(canonical(found)) if issparse(found) else found
    except (ValueError, TypeError) as error:
        kind, why = type(error), str(error)
    if why.startswith("Expected 2D array"):
        raise ValueError(TWO_AXES)
    if why.startswith("Input X contains NaN"):
        raise ValueError("Input X contains NaN. Fix: DPImputer before it, in a PrivatePipeline.")
    if why.startswith("Complex data"):
        raise ValueError("Complex data not supported. Fix: real and imaginary parts as columns.")
    if why.startswith(WITHOUT_VALUES):
        raise kind(why)
    what = why if why.startswith("float() argument must be") else "X holds what is not a number"
    raise kind(f"{what}{text_columns(x)}")


def without_fill(x: Any, *, sparse: bool) -> Any:
    """Make sparse columns of a pandas frame dense, unless all of them are filled with 0.

    Args:
        sparse: whether a table of such columns is read as a sparse one.
    """
    kinds: Any = getattr(x, "dtypes", None)
    if not hasattr(kinds, "items"):  # no frame of pandas
        return x
    filled = {name: kind for name, kind in kinds.items() if hasattr(kind, "fill_value")}
    zeros = all(kind.fill_value == 0 for kind in filled.values())
    if not filled or (sparse and zeros and len(filled) == len(kinds)):
        return x
    return x.astype({name: kind.subtype for name, kind in filled.items()})


def one_axis(name: str, values: Any, *, warn: bool = False) -> NDArray[Any]:
    """``values`` of shape (rows,), a single column included; a ValueError without their number."""
    from sklearn.utils.validation import column_or_1d

    try:
        found: NDArray[Any] = column_or_1d(values, warn=warn)
    except ValueError:
        pass
    else:
        return found
    raise ValueError(
        f"{name} should be a 1d array, one value for each record. Fix: one column "
        "of it; of several, fit one model each."
    )


def number_array(name: str, values: Any) -> Floats:
    """``values`` as float64, or a ValueError that names the argument."""
    refuse_dates(values, name)
    what = "what is not a number"
    try:
        if np.asarray(values).dtype.kind != "c":
            return np.asarray(values, dtype=np.float64)
        what = "complex numbers"  # which would lose their imaginary parts
    except (ValueError, TypeError):
        pass
    raise ValueError(f"{name} holds {what}. Fix: real numbers, one for each record.")


def refuse_dates(x: Any, name: str = "X") -> None:
    """A date becomes nanoseconds since 1970, beyond any bound on a row."""
    kinds: Any = getattr(x, "dtypes", getattr(x, "dtype", None))
    listed = list(kinds) if hasattr(kinds, "__iter__") else [kinds]
    if any(getattr(kind, "kind", None) in ("m", "M") for kind in listed):
        raise TypeError(
            f"{name} holds dates or times. Fix: a number with public bounds, such as years since a "
            "public date."
        )


def text_columns(x: Any) -> str:
    """Which columns are no numbers, by name or place, and what to do."""
    columns = getattr(x, "columns", None)
    array = np.asarray(x, dtype=object)
    if array.ndim != 2:
        return ". Fix: rows of numbers, of equal lengths."
    places = [place for place in range(array.shape[1]) if not is_numeric(array[:, place])]
    names = [repr(str(columns[place])) if columns is not None else str(place) for place in places]
    return (
        f", in column {', '.join(names[:3])}. Fix: DPOneHot for text, in a ColumnTransformer; or "
        "leave the column out."
    )


def is_numeric(column: NDArray[Any]) -> bool:
    try:
        column.astype(np.float64)
    except (ValueError, TypeError):
        return False
    return True
