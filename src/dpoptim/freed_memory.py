"""Freed memory, given back to the system or kept: glibc's allocator is told, no other one."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor

from dpoptim import huge_pages
from dpoptim.torch_internals import pytree

# of glibc's mallopt: free memory at the end above which that goes back, and the shortest block that
# is mapped by itself and goes back when it is freed
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
MOST = 2**31 - 1
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
    """Give what is free now back to the system."""
    with suppress(*UNKNOWN):
        ctypes.CDLL(None).malloc_trim(0)


def give_back_before_loss(results: Any) -> None:
    """Give back what a forward pass left free, if it returned a block in huge pages.

    Its loss takes several blocks as large, which are mapped and would count on top of what is free
    in the heap. What is given back comes again as fresh pages, about as many as those are that the
    block would have taken in small ones.
    """
    for leaf in (results,) if isinstance(results, Tensor) else pytree.tree_leaves(results):
        if isinstance(leaf, Tensor) and huge_pages.holds(leaf) and leaf.requires_grad:
            give_back()
            return


def keep_freed_memory() -> None:
    """Keep what this process frees, for its next step, to its end.

    A step asks for as much as the one before, and pages that went back to the system are filled
    with zeros before they are had again. For programs of one's own: it is one setting a process.
    """
    with suppress(*UNKNOWN):
        allocator = ctypes.CDLL(None)
        allocator.mallopt(MMAP_THRESHOLD, MOST)
        allocator.mallopt(TRIM_THRESHOLD, MOST)
