"""The files that data come in. Any numbers are a table, so what is read may differ; how it is
refused may not.
"""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dpoptim.data import load_arrays, load_table, schema_without_file
from dpoptim.data.idx import read_idx
from dpoptim.data.schema import read_schema
from torture.mutations import Target, register

SCHEMA = """
[columns.age]
kind = "number"
bounds = [0, 120]
fill = 40

[columns.sex]
kind = "category"
categories = ["f", "m", "x"]

[columns.outcome]
kind = "target"
classes = ["no", "yes"]
"""


def file(name: str, write: Callable[[Path], None]) -> Callable[[Path], Path]:
    """A maker of a file with this name."""

    def make(folder: Path) -> Path:
        write(folder / name)
        return folder / name

    return make


def write_npz(path: Path) -> None:
    np.savez_compressed(path, x=np.arange(240.0).reshape(60, 4), y=np.array([0, 1] * 30))


def write_csv(path: Path) -> None:
    path.write_text(
        "a,b,y\n" + "".join(f"{i},{i / 7:.3f},{'no' if i % 2 else 'yes'}\n" for i in range(60))
    )


def write_idx(path: Path) -> None:
    path.write_bytes(bytes([0, 0, 8, 2]) + struct.pack(">2I", 30, 8) + bytes(range(240)))


def write_schema(path: Path) -> None:
    path.write_text(SCHEMA)


def write_parquet(path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"a": np.arange(60.0), "b": np.arange(60), "y": ["no", "yes"] * 30})
    pyarrow.parquet.write_table(table, path)


def read_table(path: Path) -> Any:
    data = load_table(path, schema_without_file(path, "y", classes=("no", "yes"), scaling="none"))
    return np.asarray(data.x).tobytes(), data.y.tobytes()


def read_arrays(path: Path) -> Any:
    data = load_arrays(path, None, public=True)
    return np.asarray(data.x).tobytes(), data.y.tobytes(), data.class_names


def read_pixels(path: Path) -> Any:
    return read_idx(path.parent, path.name, axes=2).tobytes()


register("npz file", Target(file("t.npz", write_npz), read_arrays, faithful=False))
register("CSV file", Target(file("t.csv", write_csv), read_table, faithful=False))
register(
    "IDX file",
    Target(
        file("t-idx", write_idx),
        lambda p: read_idx(p.parent, p.name, axes=2).tobytes(),
        faithful=False,
    ),
)
register("schema", Target(file("schema.toml", write_schema), read_schema, faithful=False))
try:
    import pyarrow  # noqa: F401
except ModuleNotFoundError:
    pass
else:
    register("Parquet file", Target(file("t.parquet", write_parquet), read_table, faithful=False))
