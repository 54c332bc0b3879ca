"""Files that cannot be used are refused by name, before any training."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import random_array, save_npz

from dpoptim.data import (
    FASHION_MNIST_DIRECTORY,
    Data,
    load_arrays,
    load_digits,
    load_fashion_mnist,
    load_table,
    schema_without_file,
)
from dpoptim.data.table_files import column_names, read_columns


def plain(
    path: Path, target: str | None, classes: tuple[str, ...] | None = None, public: bool = False
) -> Data:
    """A table of numbers as they are in the file."""
    schema = schema_without_file(path, target, classes=classes, public=public, scaling="none")
    return load_table(path, schema, public=public)


def write_csv(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_sparse_table_is_named_as_one(tmp_path: Path) -> None:
    save_npz(tmp_path / "t.npz", random_array((5, 4), density=0.5))
    with pytest.raises(ValueError, match="a sparse table of SciPy.*Fix: dpoptim.estimators"):
        load_arrays(tmp_path / "t.npz", None)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_two_columns_of_one_name(tmp_path: Path, ending: str) -> None:
    """Such a file was called damaged, as pyarrow finds neither of them by name."""
    pa, path = pytest.importorskip("pyarrow"), tmp_path / f"t.{ending}"
    table = pa.table([[1.0, 2.0], [3.0, 4.0], [0, 1]], names=["a", "a", "y"])
    if ending == "parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(ValueError, match="has two columns of one name: a. Fix: rename one"):
        list(read_columns(path, ["y"]))


def test_digits() -> None:
    data = load_digits(seed=3)
    assert data.x.shape[1:] == (1, 8, 8)
    assert data.x_test is not None
    assert len(data.x) + len(data.x_test) == 1797
    assert data.x.min() == 0
    assert data.x.max() == 1
    assert set(data.y.tolist()) == set(range(10))
    assert not np.array_equal(load_digits(seed=4).y, data.y)  # another split


@pytest.mark.skipif(
    not Path(FASHION_MNIST_DIRECTORY).is_dir(), reason="needs Debian's dataset-fashion-mnist"
)
def test_fashion_mnist() -> None:
    data = load_fashion_mnist()
    assert data.x.shape == (60_000, 1, 28, 28)
    assert data.x_test is not None
    assert data.x_test.shape == (10_000, 1, 28, 28)
    assert np.bincount(data.y).tolist() == [6000] * 10


def idx(folder: Path, stem: str, array: np.ndarray, *, zipped: bool = False, cut: int = 0) -> None:  # type: ignore[type-arg]
    content = (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )
    content = content[: len(content) - cut]
    if zipped:
        (folder / f"{stem}.gz").write_bytes(gzip.compress(content))
    else:
        (folder / stem).write_bytes(content)


def small_fashion(folder: Path, labels: list[int]) -> None:
    images = np.zeros((len(labels), 28, 28), np.uint8)
    for stem in ("train", "t10k"):
        idx(folder, f"{stem}-images-idx3-ubyte", images, zipped=True)
        idx(folder, f"{stem}-labels-idx1-ubyte", np.array(labels, np.uint8))


def test_idx_files_zipped_or_not(tmp_path: Path) -> None:
    small_fashion(tmp_path, [0, 9])
    data = load_fashion_mnist(tmp_path)
    assert data.y.tolist() == [0, 9]


def test_bad_idx_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="train-images-idx3-ubyte.*--data-dir"):
        load_fashion_mnist(tmp_path)
    small_fashion(tmp_path, [0, 10])
    with pytest.raises(ValueError, match=r"labels are not 0\.\.9"):
        load_fashion_mnist(tmp_path)
    small_fashion(tmp_path, [0, 1])
    idx(tmp_path, "train-labels-idx1-ubyte", np.array([1], np.uint8))
    with pytest.raises(ValueError, match="2 train images but 1 labels"):
        load_fashion_mnist(tmp_path)
    idx(tmp_path, "train-labels-idx1-ubyte", np.array([1, 2], np.uint8), cut=1)
    with pytest.raises(ValueError, match="holds others"):
        load_fashion_mnist(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"not gzip")
    with pytest.raises(ValueError, match="a file that can be read, or is damaged"):
        load_fashion_mnist(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"not idx"))
    with pytest.raises(ValueError, match="not an IDX file"):
        load_fashion_mnist(tmp_path)


def test_csv(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", "a,label,b\n1,yes,2\n3,no,4\n-1e3,yes,0.5\n")
    data = plain(path, "label", public=True)
    assert data.x.tolist() == [[1, 2], [3, 4], [-1000, 0.5]]
    assert data.class_names == ("no", "yes")
    assert data.y.tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match="--classes is missing"):
        plain(path, "label")  # the labels of private data may not be copied into the model
    declared = plain(path, "label", classes=("yes", "no", "unknown"))
    assert declared.y.tolist() == [0, 1, 0]
    assert declared.classes == 3


@pytest.mark.parametrize(
    ("text", "target", "said"),
    [
        ("", "y", "is empty"),
        ("a,y\n", "y", "no records"),
        ("a,y\n1,0\n2,1\n", None, "--target is missing.*a, y"),
        ("a,y\n1,0\n2,1\n", "z", "no column 'z'.*a, y"),
        ("a,y\n1,0\n2\n", "y", "record 2: 1 columns"),
        ("a,b,y\n1,x,0\n2,3,1\n", "y", "record 1: column 'b' is not a number"),
        ("a,y\n1,0\nnan,1\n", "y", "record 2 .*NaN or infinite"),
        ("a,y\n1,0\ninf,1\n", "y", "record 2 .*NaN or infinite"),
        ("a,y\n1,0\n2,0\n", "y", "fewer than two values"),
        ("a,a,y\n1,2,0\n", "y", "two columns of one name: a"),
        ("y\n1\n0\n", "y", "no column beside the label"),
        ("a,y\n1e39,0\n2,1\n", "y", "record 1 .*NaN or infinite"),
    ],
)
def test_bad_csv_files(tmp_path: Path, text: str, target: str | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plain(write_csv(tmp_path / "t.csv", text), target, public=True)


@pytest.mark.parametrize("text", ["71.5,no\n18.25,yes\n", "71.5;no\n", "71.5,71.5\n", "71.5\tno\n"])
@pytest.mark.parametrize("target", [None, "y"])
def test_a_first_line_that_may_be_a_record_is_not_quoted(
    tmp_path: Path, text: str, target: str | None
) -> None:
    path = write_csv(tmp_path / "t.csv", text)
    reads = [lambda: plain(path, target), lambda: list(read_columns(path, ["age", "y"]))]
    for read in reads:
        with pytest.raises(ValueError, match="t.csv") as caught:
            read()
        assert "71.5" not in str(caught.value)


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_other_separators_are_told_by_the_first_line_alone(tmp_path: Path, separator: str) -> None:
    path = write_csv(tmp_path / "t.csv", f"age{separator}note\n1{separator}a,b\n")
    (chunk,) = read_columns(path, ["note", "age"])
    assert chunk.columns == {"note": ("a,b",), "age": ("1",)}
    comma = write_csv(tmp_path / "c.csv", f'age,note\n1,"a{separator}b{separator}c"\n')
    (chunk,) = read_columns(comma, ["note"])
    assert chunk.columns["note"] == (f"a{separator}b{separator}c",)
    with pytest.raises(ValueError, match="record 2: 3 columns where the header has 2"):
        list(read_columns(write_csv(path, path.read_text() + separator * 2 + "\n"), ["age"]))


def test_encodings(tmp_path: Path) -> None:
    marked = tmp_path / "excel.csv"
    marked.write_bytes("\ufeffy,a\n0,1\n1,2\n".encode())
    assert plain(marked, "y", public=True).y.tolist() == [0, 1]
    latin = tmp_path / "latin.csv"
    latin.write_bytes("y,größe\n0,1\n".encode("latin-1"))
    with pytest.raises(ValueError, match="not UTF-8"):
        plain(latin, "y", public=True)


def test_labels_outside_the_declared_classes(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", "a,y\n1,0\n2,7\n")
    with pytest.raises(ValueError, match="record 2 has a label outside the declared classes 0, 1"):
        plain(path, "y", classes=("0", "1"))


def test_npz(tmp_path: Path) -> None:
    x, y = np.arange(12.0).reshape(3, 2, 2), np.array([10, 2, 10])
    np.savez(tmp_path / "t.npz", X=x, label=y)
    data = load_arrays(tmp_path / "t.npz", "label", public=True)
    assert data.x.shape == (3, 2, 2)
    assert data.class_names == ("2", "10")  # by value, not by spelling
    with pytest.raises(ValueError, match="holds the arrays X, label"):
        load_arrays(tmp_path / "t.npz", None, public=True)
    np.savez(tmp_path / "short.npz", x=x, y=y[:2])
    with pytest.raises(ValueError, match="'y' must hold one label for each record of 'x'"):
        load_arrays(tmp_path / "short.npz", None, public=True)
    np.savez(tmp_path / "flat.npz", x=np.arange(3), y=y)
    with pytest.raises(ValueError, match="array of real numbers"):
        load_arrays(tmp_path / "flat.npz", None, public=True)
    np.savez(tmp_path / "objects.npz", x=np.array([{}, {}], dtype=object), y=y[:2])
    with pytest.raises(ValueError, match="not a .npz archive of plain arrays"):
        load_arrays(tmp_path / "objects.npz", None, public=True)
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(ValueError, match="not a .npz archive"):
        load_arrays(tmp_path / "text.npz", None, public=True)


def test_other_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist; --data takes digits"):
        plain(tmp_path / "t.csv", "y")
    (tmp_path / "t.xlsx").write_text("")
    with pytest.raises(ValueError, match="cannot read .xlsx"):
        plain(tmp_path / "t.xlsx", "y")


@pytest.mark.parametrize("name", ["visits.csv", "visits.csv.gz", "visits.CSV.GZ"])
def test_a_table_has_one_name_gzipped_or_not(tmp_path: Path, name: str) -> None:
    """Its ledger goes by it: the same records are charged to one."""
    text = b"a,y\n0,no\n1,yes\n"
    path = tmp_path / name
    path.write_bytes(text if name.endswith("csv") else gzip.compress(text))
    data = load_table(path, schema_without_file(path, "y", public=True))
    assert data.name == "visits"


@pytest.mark.parametrize(
    "text",
    [
        '"pay, EUR";age;"y"\n1,5;30;a\n',
        'sep=;\n"pay, EUR";age;y\n1,5;30;a\n',
        '\ufeffsep=\t\r\n"pay, EUR"\tage\ty\r\n1,5\t30\ta\r\n',
        '"pay, EUR",age,y\n"1,5",30,a\n',
    ],
)
def test_what_is_between_columns(text: str, tmp_path: Path) -> None:
    """Not what a quoted name has in it; Excel's first line may say it, and is no names."""
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode())
    assert [name for name, _ in column_names(path)] == ["pay, EUR", "age", "y"]
    (chunk,) = read_columns(path)
    assert [list(values) for values in chunk.columns.values()] == [["1,5"], ["30"], ["a"]]
