"""Limits of the system and on memory, as tests set them."""

import signal
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A disk that is full: the system cuts writes off where a file would grow beyond so much."""
    import resource  # which Windows has not

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


@contextmanager
def numpy_holds_at_most(size: float) -> Iterator[None]:
    """What numpy holds meanwhile is below so many bytes."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size, peak / size
