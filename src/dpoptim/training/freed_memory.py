"""Memory that trials leave behind, given back to the system."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def freed_memory_given_back() -> Iterator[None]:
    """Give what is free afterwards back to the system, where the allocator is glibc's.

    It keeps freed memory below anything that is not free, and what a trial leaves there seldom
    fits what training asks for: so it would count on top of it. Elsewhere nothing is done.
    """
    try:
        yield
    finally:
        # no such library, or function: another system's
        with suppress(OSError, TypeError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
