"""Arrays too large for memory, or too dear to make twice, in files only their owner can read."""

import contextlib
import hashlib
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from dpoptim.files import begin_beside

MOST_IN_MEMORY = 2**31  # bytes


class Rows:
    """Collects float32 rows of one width.

    Args:
        most_in_memory: bytes, beyond which all rows go to a temporary file. It has no name, so
            nobody else can open it and nothing is left of it when the process ends, however it
            ends.
    """

    def __init__(self, width: int, *, most_in_memory: int = MOST_IN_MEMORY) -> None:
        self._width, self._most = width, most_in_memory
        self._parts: list[NDArray[np.float32]] = []
        self._file: IO[bytes] | None = None
        self._rows = 0

    def append(self, rows: NDArray[np.float32]) -> None:
        self._rows += len(rows)
        if self._file is None and self._rows * self._width * 4 > self._most:
            self._file = tempfile.TemporaryFile(prefix="dpoptim-")  # noqa: SIM115, it lives as long as the array
            for part in self._parts:
                self._file.write(part.tobytes())
            self._parts = []
        if self._file is not None:
            self._file.write(np.ascontiguousarray(rows, dtype=np.float32).tobytes())
        else:
            self._parts.append(rows)

    def array(self) -> NDArray[np.float32]:
        """All rows, once: float32 of shape (rows, width). Nothing can be appended afterwards."""
        if self._file is None:
            empty: NDArray[np.float32] = np.zeros((0, self._width), dtype=np.float32)
            return np.concatenate([empty, *self._parts])
        with self._file as file:  # the map outlives it
            file.flush()
            return np.memmap(file, np.float32, "r+", shape=(self._rows, self._width))


Floats = NDArray[np.float32]


def room_for(shape: tuple[int, ...]) -> Floats:
    """An array to be filled: in memory or, beyond 2 GiB, in a temporary file without a name."""
    if math.prod(shape) * 4 <= MOST_IN_MEMORY:
        return np.empty(shape, dtype=np.float32)
    with tempfile.TemporaryFile(prefix="dpoptim-") as file:  # the map outlives it
        return np.memmap(file, np.float32, "w+", shape=shape)


def cached_features(
    folder: Path,
    settings: str,
    x: Floats,
    shape: tuple[int, ...],
    fill: Callable[[Floats, Floats], Floats],
) -> Floats:
    """The features that ``fill(features, x)`` writes: from ``folder`` if there, else kept there.

    The file is found by the records themselves and the settings; it is as private as the records,
    and has mode 0600 from its first byte. It is mapped into memory, not read.

    **Guarantee.** None is needed: features are a function of each record. A cache is found or not
    by all records together; that shows in the running time alone.
    """
    digest = hashlib.sha256(f"{settings}, {x.shape}, {shape}, ".encode())
    digest.update(np.ascontiguousarray(x).data)
    path = folder / f"features-{digest.hexdigest()[:32]}.npy"
    with contextlib.suppress(ValueError, OSError):  # absent, or damaged: made anew
        known = map_array(path)
        if known.shape == shape and known.dtype == np.float32:
            return known
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary, handle = begin_beside(path, private=True)
    try:
        made = np.lib.format.open_memmap(temporary, "w+", np.float32, shape)
        fill(made, x)
        made.flush()
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        os.close(handle)
    return map_array(path)


def map_array(path: Path) -> Floats:
    """The array in a file; whoever writes into it leaves the file as it is."""
    array: Floats = np.load(path, mmap_mode="c", allow_pickle=False)
    return array
