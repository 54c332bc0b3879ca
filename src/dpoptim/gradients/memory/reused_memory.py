"""Memory for one gradient after the other: fresh pages cost more than what is written in them."""

import sys

import torch
from torch import Tensor

ALONE = 2  # references that Python counts to what an attribute alone holds, its own among them


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
