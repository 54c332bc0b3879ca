"""Work of compiled functions that is cut into parts, each of which is one thread's.

No Python runs on the threads. A function that serves here takes what it is to do as one piece of
memory, the number of its part, how many there are, and room of its own; what it computes must be
the same bits for any number of parts.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from dpoptim.runtime.compiled import PLACE, WHOLE, function
from dpoptim.runtime.worker_threads import parallel_region, worker_threads

WORTH_A_THREAD = 1 << 19  # multiplications that take longer than to wake a thread for them
A_NUMBER = 8  # multiplications that take as long as to read a number that is used once


STEP = struct.Struct("=Qqqq")  # `Step` of `parts.c`


@cache
def on_threads() -> Callable[..., None]:
    """The compiled function that does all parts of some steps."""
    found = function("dpoptim_do_steps", PLACE, PLACE, WHOLE, PLACE, PLACE)
    assert found is not None
    return found


class Piece:
    """A compiled function that does a part of some work.

    Args:
        name: of the function.
    """

    def __init__(self, name: str) -> None:
        alone = function(name, PLACE, WHOLE, WHOLE, PLACE)
        assert alone is not None
        self.function, self.address = alone, address(alone)

    def run(self, given: bytes, work: int, threads: int | None = None) -> int:
        """Do all parts, and return how many there were; see `run_in_turn`.

        Args:
            threads: the most to use; None: as many as torch does.
        """
        return run_in_turn(given, [Task(self, work)], threads)


class Task(NamedTuple):
    """Work for a piece.

    Attributes:
        work: multiplications, by which it is seen how many threads are worth while.
        room: float32 numbers that each part needs.
        at: the first byte of what it is given.
    """

    piece: Piece
    work: int
    room: int = 0
    at: int = 0


def run_in_turn(given: bytes, tasks: Sequence[Task], threads: int | None = None) -> int:
    """Do all parts of some tasks in one call, each when the one before is done.

    Args:
        given: what the functions are to do, as they read it.
        threads: as for `Piece.run`.

    Returns:
        How many parts the last one had.
    """
    most = torch.get_num_threads() if threads is None else threads
    shares = [1 if most == 1 else max(1, min(most, task.work // WORTH_A_THREAD)) for task in tasks]
    entries = max([task.room * parts for task, parts in zip(tasks, shares, strict=True)])
    room = floats(entries) if entries else None
    start = 0 if room is None else room.data_ptr()
    region = None if max(shares) == 1 else region_address()
    if region is None and max(shares) > 1:
        for task, parts in zip(tasks, shares, strict=True):
            _by_threads_of_python(task, address(given) + task.at, parts, start)
        return shares[-1]
    steps = [
        STEP.pack(task.piece.address, task.at, parts, task.room)
        for task, parts in zip(tasks, shares, strict=True)
    ]
    on_threads()(region, b"".join(steps), len(steps), given, start)
    return shares[-1]


def _by_threads_of_python(task: Task, given: int, parts: int, room: int) -> None:
    size = torch.float32.itemsize * task.room
    do = task.piece.function
    with worker_threads(parts) as run:
        run([partial(do, given, part, parts, room + part * size) for part in range(parts)])


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
