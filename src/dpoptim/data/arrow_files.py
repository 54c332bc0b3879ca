"""Parquet and Arrow files, read by pyarrow, which the extra ``tables`` brings."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dpoptim.data.damaged_files import decoding

PARQUET = (".parquet", ".pq")
ARROW = (".arrow", ".feather", ".ipc")
ENDINGS = (*PARQUET, *ARROW)
FIX = "write it again, for example by pandas' to_parquet or to_feather"


def arrow() -> ModuleType:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"{missing}. Fix: pip install 'dpoptim[tables]', which reads Parquet and Arrow files."
        ) from missing
    return pyarrow


def names_and_kinds(path: Path) -> list[tuple[str, str | None]]:
    """The columns and whether each holds numbers, booleans or text, by the file's schema alone."""
    pa = arrow()
    with decoding(path, "a Parquet or Arrow file", FIX):
        if path.suffix.lower() in PARQUET:
            schema = pa.parquet.read_schema(path)
        else:
            with pa.ipc.open_file(path) as reader:
                schema = reader.schema
        return [(field.name, kind_of_type(pa, field.type)) for field in schema]


def kind_of_type(pa: ModuleType, kind: Any) -> str:
    if pa.types.is_boolean(kind):
        return "boolean"
    numeric = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    return "number" if any(test(kind) for test in numeric) else "text"


def chunks(path: Path, names: Sequence[str], rows: int) -> Iterator[dict[str, Any]]:
    """The named columns by chunks: numbers as float64 (NaN for nulls), the rest as text."""
    pa = arrow()
    source = batches(pa, path, list(names), rows)
    while True:
        with decoding(path, "a Parquet or Arrow file", FIX):
            batch = next(source, None)
            if batch is None:
                return
            columns = {name: values(pa, batch.column(name)) for name in names}
        if batch.num_rows:
            yield columns


def batches(pa: ModuleType, path: Path, names: list[str], rows: int) -> Iterator[Any]:
    if path.suffix.lower() in PARQUET:
        with pa.parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=rows, columns=names)
        return
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        for number in range(reader.num_record_batches):
            whole = reader.get_batch(number)
            for start in range(0, whole.num_rows, rows):
                yield whole.slice(start, rows)


def values(pa: ModuleType, column: Any) -> Any:
    """A column as numbers (NaN for nulls) or text (empty for nulls); whole numbers keep digits."""
    if pa.types.is_integer(column.type) and column.null_count == 0:
        return column.to_numpy(zero_copy_only=False)
    if pa.types.is_floating(column.type):
        return column.cast(pa.float64()).to_numpy(zero_copy_only=False).astype(np.float64)
    return ["" if value is None else str(value) for value in column.to_pylist()]
