"""Large blocks of memory in huge pages, which cost a seventh of what pages of 4 KiB cost afresh."""

import mmap
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpoptim.runtime import freed_memory
from dpoptim.runtime.torch_internals import pytree

PAGE = 1 << 21
# bytes above which glibc maps every block by itself, whatever was freed before
MAPPED = 1 << 25
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@cache
def there_are() -> bool:
    """Whether the system gives huge pages to whoever asks for them."""
    try:
        return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in SETTING.read_text()
    except OSError:
        return False


def vector(size: int) -> Tensor:
    """A flat float32 vector on the CPU, not written yet.

    A large one has a mapping of its own, which goes back to the system when it is freed, unless
    what is freed is to be kept.
    """
    length = size * torch.float32.itemsize
    if length > MAPPED and there_are() and not freed_memory.KEPT.is_set():
        try:
            found = mmap.mmap(-1, length + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            found.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # the system has none, or allows no more
            return torch.empty(size, dtype=torch.float32, device="cpu")
        first = -torch.frombuffer(found, dtype=torch.uint8).data_ptr() % PAGE
        there = torch.frombuffer(found, dtype=torch.float32, count=size, offset=first)
        # an operation's result: whoever counts these counts it
        empty = torch.empty(0, dtype=torch.float32, device="cpu")
        return empty.set_(there.untyped_storage(), 0, (size,), (1,))
    return torch.empty(size, dtype=torch.float32, device="cpu")


def holds(x: Tensor) -> bool:
    """Whether a tensor is a block in huge pages: nobody else's begins where a page does."""
    return x.is_cpu and x.nbytes > MAPPED and x.data_ptr() % PAGE == 0


def give_back_before_loss(results: Any) -> None:
    """Give back what a forward pass left free, if it returned a block in huge pages.

    Its loss takes several blocks as large, which are mapped and would count on top of what is free
    in the heap. What is given back comes again as fresh pages, about as many as those are that the
    block would have taken in small ones.
    """
    for leaf in (results,) if isinstance(results, Tensor) else pytree.tree_leaves(results):
        if isinstance(leaf, Tensor) and holds(leaf) and leaf.requires_grad:
            freed_memory.give_back()
            return
