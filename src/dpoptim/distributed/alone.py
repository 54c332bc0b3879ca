"""Work that one rank does by itself, as if there were no others."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_alone: ContextVar[bool] = ContextVar("alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Make everything in this ``with`` what one process does, whatever others there are.

    What it releases is this rank's own: whoever hands it on, or chooses among ranks', charges for
    all of it.
    """
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def is_alone() -> bool:
    """Whether the others are left out."""
    return _alone.get()
