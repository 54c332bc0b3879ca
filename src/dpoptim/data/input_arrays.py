"""Arrays of numbers from what users hand over, with errors that quote no value.

NumPy's and scikit-learn's own errors print the value, or the array, that they could not take.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import issparse

from dpoptim.data.sparse_rows import TWO_AXES, SparseRows, canonical
from dpoptim.missing_values import is_gap

Floats = NDArray[np.float64]
NO_COLUMNS = (
    "Found array with 0 feature(s) (shape=(, 0)) while a minimum of 1 is required. Fix: a table "
    "with columns."
)
GAPS = "Input X contains NaN. Fix: DPImputer before it, in a PrivatePipeline."
COMPLEX = "Complex data not supported. Fix: real and imaginary parts as columns."
DATES = (
    "holds dates or times{}. Fix: a number with public bounds, such as days since a public date, "
    "{}; or leave the column out."
)
START = "pd.Timestamp('2020-01-01', tz='UTC')"
# names of the dtypes of pandas and Arrow that say so in no other way
OF_TIME = ("period", "date32", "date64", "time32", "time64", "timestamp", "duration")
# Beginnings of messages of scikit-learn and others, and what is said instead. Those without are
# passed on: they name columns and types, and no value, nor how many rows there are.
SAID = {
    "Found array with 0 feature": NO_COLUMNS,
    "Found array with": None,
    "Input X contains infinity": None,
    "Sparse data": None,
    "The feature names": None,
    "Feature names are only supported": None,
    "np.matrix is not supported": None,
    "X has ": None,
    "Expected 2D array": TWO_AXES,
    "Expected a 2-dimensional container": TWO_AXES,
    "Expected unique column names": "X has two columns of one name. Fix: a name for each.",
    "Input X contains NaN": GAPS,
    "Complex data": COMPLEX,
    "at least one array or dtype": NO_COLUMNS,
    "int too large": "X holds a whole number that is too large for float64. Fix: cut it before.",
}

SPREADING = (str, bytes, complex, np.complexfloating, np.datetime64, np.timedelta64, np.void)


def checked_table(estimator: Any, x: Any, **how: Any) -> Any:
    """scikit-learn's ``validate_data(estimator, x, **how)``; `SparseRows` of a sparse table.

    Raises:
        ValueError, TypeError: as there, without values; or a column holds dates or text.
    """
    from sklearn.utils.validation import validate_data

    refuse_dates(x)
    if issparse(x) and x.ndim != 2:
        raise ValueError(TWO_AXES)
    x = canonical(x) if issparse(x) else without_fill(as_held(x), sparse="accept_sparse" in how)
    x = with_plain_gaps(x)
    try:
        found = validate_data(estimator, x, **how)
        return SparseRows(canonical(found)) if issparse(found) else found
    except (ValueError, TypeError, OverflowError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        why = str(error)
    begins = next((start for start in SAID if why.startswith(start)), None)
    if begins is not None:
        raise kind(SAID[begins] or why)
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


def with_plain_gaps(x: Any) -> Any:
    """NaN for None, NaT and pandas' NA among the objects of an array, or of a frame's columns."""
    if isinstance(x, np.ndarray):
        if x.dtype != object:
            return x
        gaps = np.frompyfunc(is_gap, 1, 1)(x).astype(bool)
        return np.where(gaps, np.nan, x) if gaps.any() else x
    kinds: Any = getattr(x, "dtypes", None)
    of_objects = [str(kind) == "object" for kind in kinds] if hasattr(x, "isetitem") else []
    if not any(of_objects):
        return x
    x = x.copy(deep=False)
    for place in np.flatnonzero(of_objects):
        x.isetitem(place, with_plain_gaps(x.iloc[:, place].to_numpy()))
    return x


def one_axis(name: str, values: Any, *, warn: bool = False) -> NDArray[Any]:
    """``values`` of shape (rows,), a single column included; a ValueError without their number."""
    from sklearn.utils.validation import column_or_1d

    try:
        found: NDArray[Any] = column_or_1d(as_held(values), warn=warn)
    except ValueError:
        pass
    else:
        return found
    raise ValueError(
        f"{name} should be a 1d array, one value for each record. Fix: one column "
        "of it; of several, fit one model each."
    )


def as_held(values: Any) -> Any:
    """A list as an array of its own values, and one that is masked with gaps; else ``values``.

    NumPy would make text, bytes or complex numbers of all values of a list for the sake of one.
    """
    if isinstance(values, list | tuple) and len(set(map(spreading_kind, values))) > 1:
        return np.array(values, dtype=object)
    if isinstance(values, np.ma.MaskedArray):
        kind = values.dtype if values.dtype.kind == "f" else np.dtype(object)
        return np.ma.filled(values.astype(kind), np.nan)
    return values


def spreading_kind(value: Any) -> type | None:
    """The type that NumPy would give to all values of a list for the sake of this one, if any."""
    return next((kind for kind in SPREADING if isinstance(value, kind)), None)


def number_array(name: str, values: Any) -> Floats:
    """``values`` as float64, or a ValueError that names the argument."""
    refuse_dates(values, name)
    values, what = as_held(values), "what is not a number"
    try:
        if np.asarray(values).dtype.kind != "c":
            return np.asarray(with_plain_gaps(np.asarray(values)), dtype=np.float64)
        what = "complex numbers"  # which would lose their imaginary parts
    except (ValueError, TypeError, OverflowError):
        pass
    raise ValueError(f"{name} holds {what}. Fix: real numbers, one for each record.")


def refuse_dates(x: Any, name: str = "X") -> None:
    """A date becomes nanoseconds since 1970, beyond any bound on a row.

    Args:
        x: an array, or a frame or column of pandas, polars or Arrow.
    """
    refuse_queries(x, name)
    kinds: Any = getattr(x, "dtypes", getattr(x, "dtype", None))
    kinds = getattr(getattr(x, "schema", None), "types", kinds)  # of Arrow's tables
    held = [is_date(kind) for kind in (kinds if hasattr(kinds, "__iter__") else [kinds])]
    if any(held):
        names = getattr(x, "column_names", getattr(x, "columns", ()))
        places = np.flatnonzero(held)
        found = [quoted(names[place]) for place in places] if len(names) else []
        kind = kinds[places[0]] if isinstance(kinds, list) else [*np.atleast_1d(kinds)][places[0]]
        raise TypeError(f"{name} {DATES.format(in_columns(found), in_days(kind))}")


def refuse_queries(x: Any, name: str = "X") -> None:
    if not hasattr(x, "__len__") and hasattr(x, "collect"):
        raise TypeError(f"{name} is a query that has not run. Fix: {name}.collect().")


def quoted(name: Any) -> str:
    return repr(str(name))


def in_columns(names: list[str]) -> str:
    """The first of these columns' names, for a message; "" of none."""
    return f", in column {', '.join(names[:3])}" if names else ""


def in_days(kind: Any = None, start: str = START) -> str:
    """The call that makes days of dates or times of a dtype, for a message; None: any dates."""
    if getattr(kind, "kind", None) == "m" or dtype_word(kind) == "duration":
        return "pd.Series(durations) / pd.Timedelta(days=1)"
    dates = "pd.PeriodIndex(dates).to_timestamp()" if dtype_word(kind) == "period" else "dates"
    return f"(pd.Series(pd.to_datetime({dates}, utc=True)) - {start}).dt.days"


def dtype_word(kind: Any) -> str:
    """The name of a dtype of pandas or Arrow, without what it is of."""
    return str(getattr(kind, "pyarrow_dtype", kind)).split("[")[0]


def is_date(kind: Any) -> bool:
    """Whether values of a dtype of numpy, pandas, polars or Arrow are dates or times."""
    if getattr(kind, "kind", None) in ("m", "M"):
        return True
    temporal = getattr(kind, "is_temporal", None)  # polars
    return temporal() if callable(temporal) else dtype_word(kind) in OF_TIME


def text_columns(x: Any) -> str:
    """Which columns are no numbers, by name or place, and what to do."""
    columns = getattr(x, "columns", None)
    array = np.asarray(x, dtype=object)
    if array.ndim != 2:
        return ". Fix: rows of numbers, of equal lengths."
    places = [place for place in range(array.shape[1]) if not is_numeric(array[:, place])]
    names = [str(place) if columns is None else quoted(columns[place]) for place in places]
    named = in_columns(names)
    if any(hasattr(value, "isoformat") for value in array[:, places].ravel()):
        return f", but {DATES.format(named, in_days())}"
    return f"{named}. Fix: DPOneHot for text, in a ColumnTransformer; or leave the column out."


def is_numeric(column: NDArray[Any]) -> bool:
    try:
        column.astype(np.float64)
    except (ValueError, TypeError, OverflowError):
        return False
    return True
