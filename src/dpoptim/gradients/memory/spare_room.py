"""Results with spare memory behind them, so that others may lie there after them.

A backward pass keeps the gradients of layers' outputs until norms are known, and frees the outputs
meanwhile, which are as large: they might lie where those lay. glibc's allocator does not let them.
For an aligned block it looks for a gap that is longer than the block, by `EXTRA` bytes, and gives
the rest back; once small things lie there, the gap that the block leaves is too short for another
one of its size. Blocks that are longer to begin with leave gaps that fit.

Blocks that glibc maps by themselves are mapped in huge pages instead (`huge_pages`).
"""

import torch
from torch import Tensor

from dpoptim.gradients.memory import huge_pages

EXTRA = 112  # bytes that torch's alignment, and the shortest block and its header, add up to
LEAST = 1 << 14  # entries of results that are worth it
# entries behind a result: of a product with gradients, and of a layer's output, where such a
# product, too, may lie afterwards
OF_GRADIENTS, OF_OUTPUTS = 1 << 8, 1 << 10


def result(rows: int, columns: int, spare: int) -> Tensor:
    """A float32 matrix on the CPU, not written yet; behind it so many zeros, if it is large.

    Zeros, since whoever stores the result in a file stores them. None behind one in huge pages.
    """
    entries = rows * columns
    if entries < LEAST:
        return torch.empty(rows, columns, dtype=torch.float32, device="cpu")
    if entries * torch.float32.itemsize > huge_pages.MAPPED:
        return huge_pages.vector(entries).resize_(rows, columns)
    room = torch.empty(entries + spare, dtype=torch.float32, device="cpu")
    room[entries:].zero_()
    return room.resize_(rows, columns)  # no view, which must not be changed in place
