"""Messages between a data loader and its workers: indices there, batches back.

Indices travel as an array, since a list of numbers is written down one by one. Small tensors travel
in the message itself: PyTorch sends each tensor's memory as an open file, over a socket of its own
whose two ends prove to each other who they are. For a batch of a few hundred records that takes
longer than to copy it.
"""

import functools
import io
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SMALL = 1 << 20  # bytes, up to which copying a tensor was measured to take less time


@dataclass(frozen=True, eq=False)
class IndexMessage:
    """Indices on their way, which arrive as the list that data sets expect."""

    indices: NDArray[np.int64]

    def __reduce__(
        self,
    ) -> tuple[Callable[[NDArray[np.int64]], list[int]], tuple[NDArray[np.int64]]]:
        return listed, (self.indices,)


def listed(indices: NDArray[np.int64]) -> list[int]:
    return indices.tolist()


@dataclass(frozen=True)
class Sending:
    """Collates in a worker, and writes the batch down.

    So what cannot be sent is an error there: in PyTorch the loop would wait for ever.

    **Guarantee.** None: private, as what is collated. What arrives is that.
    """

    collate: Callable[[list[Any]], Any]

    def __call__(self, items: list[Any]) -> "Message":
        leave_with_parent()
        return Message(written(self.collate(items)))


@functools.cache
def leave_with_parent() -> None:
    """Let this worker end, once its loop does, without handing over batches that nobody will take.

    Python would wait until what was sent has been read, for ever where the reader was killed: the
    other workers hold the same pipe open.
    """
    parent = os.getppid()

    def leave() -> None:
        if os.getppid() != parent:
            os._exit(1)

    Finalize(None, leave, exitpriority=0)  # before queues wait for their readers


@dataclass(frozen=True)
class Message:
    """A batch on its way, which arrives as the batch."""

    content: bytes

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self.content,)


def written(batch: Any) -> bytes:
    content = io.BytesIO()
    pickler = ForkingPickler(content, pickle.HIGHEST_PROTOCOL)
    as_file = pickler.dispatch_table[Tensor]

    def reduced(tensor: Tensor) -> Any:
        try:
            array = tensor.numpy()
        except (RuntimeError, TypeError):  # of a type or on a device that numpy lacks
            return as_file(tensor)
        small = array.flags.c_contiguous and array.nbytes <= SMALL
        return (torch.from_numpy, (array,)) if small else as_file(tensor)

    pickler.dispatch_table[Tensor] = reduced
    pickler.dump(batch)
    return content.getvalue()
