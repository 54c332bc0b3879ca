"""Files damaged anywhere end in one clear line, and unusual ones are read in time."""

import gzip
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dpoptim.data import load_arrays, load_table, schema_without_file
from dpoptim.data.idx import read_idx
from dpoptim.data.large_arrays import Rows
from dpoptim.data.table_files import read_columns


def small_npz(path: Path) -> None:
    np.savez_compressed(path, x=np.arange(24.0).reshape(6, 4), y=np.array([0, 1] * 3))


def small_csv(path: Path) -> None:
    text = "a,b,y\n" + "".join(f"{i},{i / 7:.3f},{'no' if i % 2 else 'yes'}\n" for i in range(20))
    path.write_bytes(
        gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode()
    )


def small_parquet(path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    table = pa.table({"a": np.arange(20.0), "b": np.arange(20), "y": ["no", "yes"] * 10})
    pyarrow.parquet.write_table(table, path)


def small_arrow(path: Path) -> None:
    """A file, or by its name a stream, of two batches."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.ipc

    table = pa.table({"a": np.arange(20.0), "b": np.arange(20), "y": ["no", "yes"] * 10})
    new = pyarrow.ipc.new_stream if path.suffix == ".arrows" else pyarrow.ipc.new_file
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)


def small_idx(path: Path) -> None:
    path.write_bytes(bytes([0, 0, 8, 2]) + struct.pack(">2I", 5, 4) + bytes(range(20)))


def read_table(path: Path) -> object:
    return load_table(path, schema_without_file(path, "y", classes=("no", "yes"), scaling="none"))


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], object]]] = {
    "t.npz": (small_npz, lambda path: load_arrays(path, None, public=True)),
    "t.csv": (small_csv, read_table),
    "t.csv.gz": (small_csv, read_table),
    "t.parquet": (small_parquet, read_table),
    "t.arrow": (small_arrow, read_table),
    "t.arrows": (small_arrow, read_table),
    "t-idx": (small_idx, lambda path: read_idx(path.parent, path.name, axes=2)),
}


@pytest.mark.parametrize("name", KINDS)
def test_flipped_and_cut_files_end_in_one_clear_line(tmp_path: Path, name: str) -> None:
    write, read = KINDS[name]
    path = tmp_path / name
    write(path)
    whole = path.read_bytes()
    read(path)
    rng = np.random.default_rng(0)
    refused = 0
    for trial in range(150):
        damaged = bytearray(whole)
        if trial % 3 == 0:
            del damaged[int(rng.integers(len(whole))) :]
        else:
            damaged[int(rng.integers(len(whole)))] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        said = None
        try:
            read(path)
        except ValueError as error:  # and nothing else
            said = str(error)
        if said is not None:
            assert "\n" not in said
            assert str(path) in said or str(path.parent) in said or "schema:" in said
            refused += 1
    assert refused > 20


def test_a_quote_left_open_and_other_ends_of_csv(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('a,y\n"1,no\n' + "2,yes\n" * 30_000)
    with pytest.raises(
        ValueError,
        match=r"near line .*more than 131,072 characters.*quotation "
        r"mark",
    ):
        read_table(path)
    path.write_bytes(b"a,y\n1,no\0\n2,yes\n")
    with pytest.raises(ValueError, match="line 2: a NUL character"):
        read_table(path)
    path.write_text("a,y\n1,no\n\n2,yes\n\n")  # blank lines say nothing
    assert len(read_table(path).x) == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "record", ['9,"says "",no', '9,5",no', '9,"5" long",no', '9, "x",no', '9,"open,no']
)
def test_a_stray_quotation_mark_takes_no_other_record_along(tmp_path: Path, record: str) -> None:
    """By the first one the record behind it was no more: one text decided of two records."""
    path, others = tmp_path / "t.csv", '1,"x",no\n2,",y",yes\n'
    path.write_text(f"a,b,y\n{record}\n{others}")
    with pytest.raises(ValueError, match=r"near line \d+: a quotation mark inside of a field, or"):
        list(read_columns(path))
    path.write_text(f'a,b,y\r\n9,"says ""x,\r\n""",no\r\n{others}')  # as it is to be written
    (chunk,) = read_columns(path)
    assert chunk.columns["b"] == ('says "x,\r\n"', "x", ",y")


def test_labels_with_a_nul_are_not_those_without(tmp_path: Path) -> None:
    """numpy's text arrays drop it at the end, and "no" would silently be another label."""
    np.savez(tmp_path / "t.npz", x=np.zeros((2, 1)), y=np.array(["no\0x", "yes"]))
    with pytest.raises(ValueError, match="record 1 has a label outside"):
        load_arrays(tmp_path / "t.npz", None, classes=("no", "yes"))


def test_the_time_of_wide_tables_grows_with_their_width(tmp_path: Path) -> None:
    seconds = []
    for columns in (2_000, 40_000):
        path = tmp_path / f"{columns}.csv"
        header = ",".join([*(f"c{i}" for i in range(columns)), "y"])
        path.write_text(
            header
            + "\n"
            + "\n".join(",".join(["1.5"] * columns + [label]) for label in ("no", "yes"))
        )
        start = time.process_time()
        data = read_table(path)
        seconds.append(time.process_time() - start)
        assert data.x.shape == (2, columns)  # type: ignore[attr-defined]
    assert seconds[1] < 100 * max(seconds[0], 0.01)  # it was 400 times: quadratic


def test_a_table_is_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpoptim.data.table_files.CHUNK", 7)
    for name in ("t.csv", "t.csv.gz", "t.parquet"):
        path = tmp_path / name
        KINDS[name][0](path)
        chunks = list(read_columns(path, ["y", "a"]))
        assert [(chunk.first, len(chunk)) for chunk in chunks] == [(1, 7), (8, 7), (15, 6)]
        assert [float(value) for chunk in chunks for value in chunk.columns["a"]] == list(range(20))


def test_a_stream_cut_off_between_two_batches_is_no_shorter_one(tmp_path: Path) -> None:
    path = tmp_path / "t.arrows"
    small_arrow(path)
    whole = path.read_bytes()
    for end in range(len(whole) - 1, 8, -8):  # messages begin at multiples of 8
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="is not a Parquet or Arrow file, or is damaged"):
            list(read_columns(path))


def test_arrow_files_say_the_same_as_csv(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.feather
    import pyarrow.ipc
    import pyarrow.parquet

    table = pa.table(
        {
            "a": pa.array([1.5, None, -2.0]),
            "n": pa.array([1, 2, None]),
            "c": pa.array(["u", None, "v"]).dictionary_encode(),
            "y": pa.array([True, False, True]),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    pyarrow.feather.write_feather(table, tmp_path / "t.arrow", compression="uncompressed")
    with pyarrow.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("t.parquet", "t.arrow", "stream.arrow"):
        (chunk,) = read_columns(tmp_path / name)
        assert np.array_equal(chunk.columns["a"], [1.5, np.nan, -2.0], equal_nan=True)
        assert chunk.columns["n"] == ["1", "2", ""]
        assert chunk.columns["c"] == ["u", "", "v"]
        assert chunk.columns["y"] == ["True", "False", "True"]


def test_rows_beyond_memory_go_to_a_file_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(50, 3)).astype(np.float32) for _ in range(4)]
    rows = Rows(3, most_in_memory=1000)
    for part in parts:
        rows.append(part)
    array = rows.array()
    assert isinstance(array, np.memmap)
    assert np.array_equal(array, np.concatenate(parts))
    assert not list(tmp_path.iterdir())
