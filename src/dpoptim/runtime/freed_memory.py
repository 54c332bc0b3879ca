"""Freed memory, given back to the system or kept: glibc's allocator is told, no other one."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event

# of glibc's mallopt: free memory at the end above which that goes back, and the shortest block that
# is mapped by itself and goes back when it is freed
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
MOST = 2**31 - 1
KEPT = Event()  # whether this process was told to keep what it frees
UNKNOWN = (OSError, TypeError, AttributeError)  # no such library, or function: another system's


@contextmanager
def freed_memory_given_back() -> Iterator[None]:
    """Give what is free afterwards back to the system.

    The allocator keeps freed memory below anything that is not free, and what a trial leaves there
    seldom fits what training asks for: so it would count on top of it.
    """
    try:
        yield
    finally:
        give_back()


def give_back() -> None:
    """Give what is free now back to the system, unless it is to be kept."""
    with suppress(*UNKNOWN):
        if not KEPT.is_set():
            ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Keep what this process frees, for its next step, to its end.

    A step asks for as much as the one before, and pages that went back to the system are filled
    with zeros before they are had again. Call it once, before anything is trained, where time is
    dearer than memory: the process stays as large as it has been. `dpoptim train` does. Without
    glibc it does nothing.

    Examples:
        >>> import dpoptim
        >>> dpoptim.keep_freed_memory()  # doctest: +SKIP
    """
    KEPT.set()
    with suppress(*UNKNOWN):
        allocator = ctypes.CDLL(None)
        allocator.mallopt(MMAP_THRESHOLD, MOST)
        allocator.mallopt(TRIM_THRESHOLD, MOST)
