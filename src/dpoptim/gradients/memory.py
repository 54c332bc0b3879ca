"""Memory for large results: huge pages, room to spare, and memory that is used again.

Fresh pages cost more than what is written in them; huge pages cost a seventh of that.

A backward pass keeps the gradients of layers' outputs until norms are known, and frees the outputs
meanwhile, which are as large: they might lie where those lay. glibc's allocator does not let them.
For an aligned block it looks for a gap that is longer than the block, by `EXTRA` bytes, and gives
the rest back; once small things lie there, the gap that the block leaves is too short for another
one of its size. Blocks that are longer to begin with leave gaps that fit: results have spare room
behind them. Blocks that glibc maps by themselves are mapped in huge pages instead.
"""

import mmap
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpoptim.runtime import freed_memory
from dpoptim.runtime.torch_internals import pytree

# bytes of a huge page, which costs a seventh of what pages of 4 KiB cost afresh
PAGE = 1 << 21
# bytes above which glibc maps every block by itself, whatever was freed before
MAPPED = 1 << 25
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
EXTRA = 112  # bytes that torch's alignment, and the shortest block and its header, add up to
LEAST_SPARED = 1 << 14  # entries of results that are worth it
# entries behind a result: of a product with gradients, and of a layer's output, where such a
# product, too, may lie afterwards
OF_GRADIENTS, OF_OUTPUTS = 1 << 8, 1 << 10
ALONE = 2  # references that Python counts to what an attribute alone holds, its own among them


@cache
def huge_pages_are_there() -> bool:
    """Whether the system gives huge pages to whoever asks for them."""
    try:
        return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in HUGE_PAGES.read_text()
    except OSError:
        return False


def empty_vector(size: int) -> Tensor:
    """A flat float32 vector on the CPU, not written yet.

    A large one has a mapping of its own, which goes back to the system when it is freed, unless
    what is freed is to be kept.
    """
    length = size * torch.float32.itemsize
    if length > MAPPED and huge_pages_are_there() and not freed_memory.KEPT.is_set():
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


def in_huge_pages(x: Tensor) -> bool:
    """Whether a tensor is a block in huge pages: nobody else's begins where a page does."""
    return x.is_cpu and x.nbytes > MAPPED and x.data_ptr() % PAGE == 0


def give_back_before_loss(results: Any) -> None:
    """Give back what a forward pass left free, if it returned a block in huge pages.

    Its loss takes several blocks as large, which are mapped and would count on top of what is free
    in the heap. What is given back comes again as fresh pages, about as many as those are that the
    block would have taken in small ones.
    """
    for leaf in (results,) if isinstance(results, Tensor) else pytree.tree_leaves(results):
        if isinstance(leaf, Tensor) and in_huge_pages(leaf) and leaf.requires_grad:
            freed_memory.give_back()
            return


def empty_result(rows: int, columns: int, spare: int) -> Tensor:
    """A float32 matrix on the CPU, not written yet; behind it so many zeros, if it is large.

    Zeros, since whoever stores the result in a file stores them. None behind one in huge pages.
    """
    entries = rows * columns
    if entries < LEAST_SPARED:
        return torch.empty(rows, columns, dtype=torch.float32, device="cpu")
    if entries * torch.float32.itemsize > MAPPED:
        return empty_vector(entries).resize_(rows, columns)
    room = torch.empty(entries + spare, dtype=torch.float32, device="cpu")
    room[entries:].zero_()
    return room.resize_(rows, columns)  # no view, which must not be changed in place


class ReusedMemory:
    """Memory of one large vector on a processor, given out again when nobody has it any more.

    **Guarantee.** Nobody else has the memory that `take` returns, by any tensor or view of it:
    whoever keeps a gradient keeps its numbers.
    """

    def __init__(self) -> None:
        # An array: every tensor made of it, and every view of such a tensor, is one reference.
        self._array = torch.empty(0, device="cpu").numpy()
        self._dtype: torch.dtype = torch.float32

    def take(self, entries: int, dtype: torch.dtype, device: torch.device | None) -> Tensor:
        """A flat vector whose entries are not written yet."""
        if device is not None and device.type != "cpu":
            return torch.empty(entries, dtype=dtype, device=device)
        taken = sys.getrefcount(self._array) > ALONE
        if taken or len(self._array) != entries or self._dtype != dtype:
            self._array = torch.empty(entries, dtype=dtype, device="cpu").numpy()
            self._dtype = dtype
        return torch.from_numpy(self._array)
