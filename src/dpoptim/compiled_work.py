"""Work of compiled functions that is cut into parts, each of which is one thread's.

No Python runs on the threads. A function that serves here takes what it is to do as one piece of
memory, the number of its part, how many there are, and room of its own; what it computes must be
the same bits for any number of parts.
"""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpoptim.compiled import PLACE, WHOLE, function
from dpoptim.worker_threads import parallel_region, worker_threads

WORTH_A_THREAD = 1 << 19  # multiplications that take longer than to wake a thread for them
A_NUMBER = 8  # multiplications that take as long as to read a number that is used once


def on_threads() -> Callable[..., Any] | None:
    """The compiled function that does all parts; None where there are none."""
    return function("dpoptim_do_parts", PLACE, PLACE, PLACE, WHOLE, PLACE, WHOLE)


class Piece:
    """A compiled function that does a part of some work.

    Args:
        name: of the function.
    """

    def __init__(self, name: str) -> None:
        alone, together = function(name, PLACE, WHOLE, WHOLE, PLACE), on_threads()
        assert alone is not None
        assert together is not None
        self._function, self._do_parts = alone, together
        self._address = address(alone)

    def run(self, given: bytes, work: int, room: int = 0, threads: int | None = None) -> int:
        """Do all parts, and return how many there were.

        Args:
            given: what the function is to do, as it reads it.
            work: multiplications, by which it is seen how many threads are worth while.
            room: float32 numbers that each part needs.
            threads: the most to use; None: as many as torch does.
        """
        most = torch.get_num_threads() if threads is None else threads
        parts = max(1, min(most, work // WORTH_A_THREAD))
        memory = floats(room * parts) if room else None
        start = 0 if memory is None else memory.data_ptr()
        region = None if parts == 1 else region_address()
        if parts == 1 or region is not None:
            self._do_parts(region, self._address, given, parts, start, room)
            return parts
        size = torch.float32.itemsize * room
        with worker_threads(parts) as run:
            run([partial(self._function, given, i, parts, start + i * size) for i in range(parts)])
        return parts


def address(of: object) -> int:
    """Where a function lies, or bytes, for as long as they are kept."""
    found = ctypes.cast(of, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert found is not None
    return found


def region_address() -> int | None:
    """Where PyTorch's OpenMP starts threads; None where it cannot be asked."""
    region = parallel_region()
    return None if region is None else address(region)


def floats(entries: int) -> Tensor:
    """Room for so many numbers."""
    return torch.empty(entries, dtype=torch.float32, device="cpu")
