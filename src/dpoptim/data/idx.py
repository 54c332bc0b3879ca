"""The IDX format, in which MNIST and its kin are handed round."""

import math
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpoptim.data.npz_files import Arrays, as_text
from dpoptim.data.opened_files import decoding, open_decompressed

IDX_UNSIGNED_BYTE = 0x08


def read_idx(folder: Path, stem: str, axes: int) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes, gzipped or not: magic number, big-endian sizes, entries.

    Raises:
        FileNotFoundError: it is neither there with ``.gz`` nor without.
        ValueError: it is damaged, or holds something else.
    """
    candidates = [folder / f"{stem}.gz", folder / stem]
    path = next((p for p in candidates if p.is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"{candidates[0]} does not exist (nor without .gz). Fix: point --data-dir at the "
            "folder of the four IDX files; for Fashion-MNIST on Debian, install the package "
            "dataset-fashion-mnist."
        )
    with (
        decoding(path, "a file that can be read", "fetch it again"),
        open_decompressed(path) as stream,
    ):
        content = stream.read()
    header = 4 + 4 * axes
    if len(content) < header or content[:4] != bytes([0, 0, IDX_UNSIGNED_BYTE, axes]):
        raise ValueError(
            f"{path} is not an IDX file of unsigned bytes with {axes} axes; fetch it again."
        )
    sizes = struct.unpack(f">{axes}I", content[4:header])
    if len(content) - header != math.prod(sizes):  # of Python's integers, which do not overflow
        raise ValueError(f"{path} should hold {sizes} entries but holds others; fetch it again.")
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes)


def read_idx_folder(folder: Path, train: str = "train", test: str = "t10k") -> Arrays:
    """Read the four IDX files of MNIST or its kin: images and labels, to train and to test.

    Args:
        train, test: what the names of the two parts' files begin with.

    Raises:
        FileNotFoundError, ValueError: naming the file and the fix.
    """
    images, labels = {}, {}
    for part, stem in (("train", train), ("test", test)):
        images[part] = read_idx(folder, f"{stem}-images-idx3-ubyte", axes=3)
        labels[part] = read_idx(folder, f"{stem}-labels-idx1-ubyte", axes=1)
        if len(images[part]) != len(labels[part]):
            raise ValueError(
                f"{folder}: {len(images[part])} {part} images but {len(labels[part])} labels; "
                "fetch the files again."
            )
    return Arrays(
        images["train"], as_text(labels["train"]), images["test"], as_text(labels["test"])
    )
