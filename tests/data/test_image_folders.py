"""Folders of images as people have them, and pickles that run nothing."""

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from dpoptim.data import load_arrays
from dpoptim.data.image_folders import read_image_folder, read_pickle


def old_string(text: bytes) -> bytes:
    """A string as Python 2 pickled it, which Python 3 reads as bytes."""
    return b"T" + struct.pack("<i", len(text)) + text


def python_2_batch(images: np.ndarray, labels: list[int]) -> bytes:  # type: ignore[type-arg]
    """A batch of CIFAR-10 as it is handed round: written by Python 2 and an old numpy, protocol
    2.
    """
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85"
        + old_string(b"b")
        + b"\x87R"
        b"(K\x01(" + b"".join(b"M" + struct.pack("<H", size) for size in images.shape) + b"t"
        b"cnumpy\ndtype\n" + old_string(b"u1") + b"K\x00K\x01\x87R"
        b"(K\x03" + old_string(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89" + old_string(images.tobytes()) + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + old_string(b"data") + array + old_string(b"labels") + numbers + b"u."


def cifar(folder: Path) -> np.ndarray:  # type: ignore[type-arg]
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (6, 4, 3072), dtype=np.uint8)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for batch, name in zip(images, names, strict=True):
        (folder / name).write_bytes(python_2_batch(batch, [0, 1, 2, 1]))
    (folder / "batches.meta").write_bytes(
        pickle.dumps({"label_names": ["plane", "car", "bird"]}, protocol=2)
    )
    return images


def test_cifar_10(tmp_path: Path) -> None:
    images = cifar(tmp_path)
    data = load_arrays(tmp_path, public=True)
    assert data.x.shape == (20, 3, 32, 32)
    assert data.x_test is not None
    assert data.x_test.shape == (4, 3, 32, 32)
    assert data.class_names == ("bird", "car", "plane")
    assert [data.class_names[label] for label in data.y[:4]] == ["plane", "car", "bird", "car"]
    np.testing.assert_allclose(data.x[0].reshape(-1), images[0, 0] / 255, rtol=1e-6)
    (tmp_path / "data_batch_3").unlink()
    with pytest.raises(FileNotFoundError, match="data_batch_3 does not exist"):
        load_arrays(tmp_path, public=True)


class Command:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, ("touch /tmp/this-must-never-exist-dpoptim",))


def test_a_pickle_that_runs_something_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1"
    for hostile in (
        pickle.dumps(Command()),
        pickle.dumps({b"data": Command()}),
        b"cbuiltins\neval\n(V1+1\ntR.",
        b"cnumpy\nload\n(V/etc/passwd\ntR.",
        b"cnumpy\nndarray.tofile\n.",
        pickle.dumps({b"data": np.load}),
    ):
        path.write_bytes(hostile)
        with pytest.raises(ValueError, match="not a pickle of plain arrays"):
            read_pickle(path)
    assert not Path("/tmp/this-must-never-exist-dpoptim").exists()
    path.write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(ValueError, match="no dictionary"):
        read_pickle(path)
    path.write_bytes(pickle.dumps({b"data": np.zeros((2, 5), np.uint8), b"labels": [1, 2]}))
    with pytest.raises(ValueError, match="does not hold CIFAR's images"):
        read_image_folder(tmp_path)


def test_damaged_pickles_end_in_one_line(tmp_path: Path) -> None:
    cifar(tmp_path)
    path = tmp_path / "data_batch_1"
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[int(rng.integers(120))] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        said = None
        try:
            read_image_folder(tmp_path)
        except ValueError as error:
            said = str(error)
        if said is not None:
            assert str(path) in said
            assert "\n" not in said
            refused += 1
    assert refused > 50


def test_pictures_sorted_by_class(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs the extra 'images'")
    rng = np.random.default_rng(0)
    for part, count in (("train", 3), ("test", 1)):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (6, 5, 3), dtype=np.uint8)
                image.fromarray(pixels).save(tmp_path / part / name / f"{i}.png")
    data = load_arrays(tmp_path, classes=("dog", "cat"))
    assert data.x.shape == (6, 3, 6, 5)
    assert data.y.tolist() == [1, 1, 1, 0, 0, 0]
    assert data.x_test is not None
    image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / "train" / "cat" / "9.jpg")
    with pytest.raises(ValueError, match=r"9\.jpg has another size"):
        load_arrays(tmp_path, public=True)
    (tmp_path / "train" / "cat" / "9.jpg").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"9\.jpg is not a picture, or is damaged"):
        load_arrays(tmp_path, public=True)


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="train-images-idx3-ubyte"):
        load_arrays(tmp_path, public=True)
