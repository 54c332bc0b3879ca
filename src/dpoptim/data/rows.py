"""Rows of numbers that grow by chunks, in memory or, beyond it, in this process's file."""

import tempfile
from typing import IO

import numpy as np
from numpy.typing import NDArray

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
