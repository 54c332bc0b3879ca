"""Forked children of a test."""

import os
from collections.abc import Callable

import pytest

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


def in_forked_child(work: Callable[[], bytes]) -> bytes:
    """What ``work`` returns in a forked child, which ends without running anything of pytest's."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(write, work())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer
