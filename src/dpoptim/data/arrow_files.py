"""Parquet and Arrow files, read by pyarrow, which the extra ``tables`` brings."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dpoptim.data.column_names import refuse_one_name
from dpoptim.data.opened_files import decoding

PARQUET = (".parquet", ".pq")
ARROW = (".arrow", ".arrows", ".feather", ".ipc")
ENDINGS = (*PARQUET, *ARROW)
FIX = "write it again, for example by pandas' to_parquet or to_feather"
OF_FILE, END_OF_STREAM = b"ARROW1", b"\xff\xff\xff\xff\0\0\0\0"


def import_arrow() -> ModuleType:
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
    """The columns, each as number, boolean, date or text, by the file's schema alone.

    Raises:
        ValueError: the file is damaged, or two columns have one name.
    """
    pa = import_arrow()
    with decoding(path, "a Parquet or Arrow file", FIX):
        if path.suffix.lower() in PARQUET:
            schema = pa.parquet.read_schema(path)
        else:
            with open_arrow(pa, path) as (schema, _):
                pass
        found: list[tuple[str, str | None]] = [
            (field.name, kind_of_type(pa, field.type)) for field in schema
        ]
    refuse_one_name(path, [name for name, _ in found])
    return found


def kind_of_type(pa: ModuleType, kind: Any) -> str:
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return "date"
    numeric = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    return "number" if any(test(kind) for test in numeric) else "text"


def column_chunks(path: Path, names: Sequence[str], rows: int) -> Iterator[dict[str, Any]]:
    """The named columns by chunks: numbers as float64 (NaN for nulls), the rest as text."""
    pa = import_arrow()
    source = record_batches(pa, path, list(names), rows)
    while True:
        with decoding(path, "a Parquet or Arrow file", FIX):
            batch = next(source, None)
            if batch is None:
                return
            columns = {name: column_values(pa, batch.column(name)) for name in names}
        if batch.num_rows:
            yield columns


def record_batches(pa: ModuleType, path: Path, names: list[str], rows: int) -> Iterator[Any]:
    if path.suffix.lower() in PARQUET:
        with pa.parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=rows, columns=names)
        return
    with open_arrow(pa, path) as (_, parts):
        for whole in parts:
            whole.validate(full=True)  # offsets of a damaged file lead out of memory
            for start in range(0, whole.num_rows, rows):
                yield whole.slice(start, rows)


@contextmanager
def open_arrow(pa: ModuleType, path: Path) -> Iterator[tuple[Any, Iterator[Any]]]:
    """Schema and record batches of an Arrow file or stream (what Hugging Face's `datasets` keeps).

    Raises:
        ValueError: a stream has no mark at its end. Cut off between two batches, it would read as
            a shorter one.
    """
    with pa.memory_map(str(path)) as source:
        size, begins = source.size(), source.read(len(OF_FILE))
        if begins == OF_FILE:
            with pa.ipc.open_file(source) as reader:
                yield reader.schema, map(reader.get_batch, range(reader.num_record_batches))
            return
        source.seek(max(0, size - len(END_OF_STREAM)))
        if source.read() != END_OF_STREAM:
            raise ValueError("the stream was cut off")
        source.seek(0)
        with pa.ipc.open_stream(source) as reader:
            yield reader.schema, iter(reader)


def column_values(pa: ModuleType, column: Any) -> Any:
    """A column as numbers (NaN, or None of decimals, for nulls), or text (empty for nulls).

    Whole numbers and decimals keep their digits.
    """
    if pa.types.is_integer(column.type) and column.null_count == 0:
        return column.to_numpy(zero_copy_only=False)
    if pa.types.is_floating(column.type):
        return column.cast(pa.float64()).to_numpy(zero_copy_only=False).astype(np.float64)
    if pa.types.is_timestamp(column.type):  # what is below is lost, and no error
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
    found = column.to_pylist()
    if pa.types.is_decimal(column.type):  # numbers that keep their digits
        return np.array(found, dtype=object)
    return ["" if value is None else str(value) for value in found]
