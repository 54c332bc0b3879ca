"""The IDX format, in which MNIST and its kin are handed round."""

import gzip
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

IDX_UNSIGNED_BYTE = 0x08


def read_idx(folder: Path, stem: str, axes: int) -> NDArray[np.uint8]:
    """One IDX file of unsigned bytes: magic number, big-endian sizes, entries."""
    candidates = [folder / f"{stem}.gz", folder / stem]
    path = next((p for p in candidates if p.is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"{candidates[0]} does not exist (nor without .gz). Fix: point --data-dir at the folder of Fashion-MNIST's "
            "four IDX files; on Debian, install the package dataset-fashion-mnist."
        )
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            content = stream.read()
    except (OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be read ({error}); fetch it again.") from None
    header = 4 + 4 * axes
    if len(content) < header or content[:4] != bytes([0, 0, IDX_UNSIGNED_BYTE, axes]):
        raise ValueError(f"{path} is not an IDX file of unsigned bytes with {axes} axes; fetch it again.")
    sizes = struct.unpack(f">{axes}I", content[4:header])
    if len(content) - header != int(np.prod(sizes)):
        raise ValueError(f"{path} should hold {sizes} entries but is cut short; fetch it again.")
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes)
