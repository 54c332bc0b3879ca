"""Products of rows with a matrix by compiled functions (`row_products.c`).

Batches have any number of rows, and texts any length. Libraries that compile a kernel for each
shape have to be given few of them, so that results are put together from blocks; these functions
have none to keep, write each number where it belongs, and share rows out to threads.

**Guarantee.** Each row of a result is a function of that row and the matrix, to the last bit,
beside any others, however they lie and on however many threads: each number is one chain of
multiplications and additions in the order of the inner length, which nothing divides.
"""

import ctypes
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from dpoptim.compiled import Library
from dpoptim.gradients import native, spare_room
from dpoptim.gradients.worker_threads import worker_threads

WIDE = 2  # level of vectors, of `native.LEVELS`, that they are written for
WORTH_A_THREAD = 1 << 21  # multiplications that take longer than to wake a thread for them


def serve() -> bool:
    """Whether they are there, for this processor."""
    found = native.library()
    return found is not None and found.level >= WIDE


@cache
def declared(found: Library) -> ctypes.CDLL:
    """The compiled functions, with their types."""
    functions = found.functions
    whole, some = ctypes.c_int64, ctypes.c_void_p
    functions.dpoptim_panels_room.argtypes = [whole, whole]
    functions.dpoptim_panels_room.restype = functions.dpoptim_rows_room.restype = whole
    functions.dpoptim_lay_out.restype = functions.dpoptim_multiply_rows.restype = None
    functions.dpoptim_lay_out.argtypes = [whole, whole, some, whole, whole, some, whole, whole]
    functions.dpoptim_multiply_rows.argtypes = [
        *(whole, whole, whole, some, whole, some, some, some, whole, whole, some)
    ]
    return functions


class Panels:
    """A matrix laid out for products with rows, once for any number of them.

    Args:
        w: float32 on the CPU, (n, k), both at least 1.
    """

    def __init__(self, w: Tensor) -> None:
        found = native.library()
        assert found is not None
        self._functions = declared(found)
        if 1 not in w.stride():
            w = w.contiguous()
        self._outputs, self._inner = w.shape
        self._panels = vector(self._functions.dpoptim_panels_room(*w.shape))
        given = (*w.shape, w.data_ptr(), *w.stride(), self._panels.data_ptr())
        divided(partial(self._functions.dpoptim_lay_out, *given), w.numel())

    def multiply(
        self, x: Tensor, bias: Tensor | None = None, spare: int = spare_room.OF_GRADIENTS
    ) -> Tensor:
        """``x @ w.T + bias``: x float32 on the CPU, (rows, k), bias dense, (n,) -> (rows, n).

        Args:
            spare: entries behind a large result; see `spare_room`.
        """
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        out = spare_room.result(rows, self._outputs, spare)
        given = (
            *(rows, self._inner, self._outputs, x.data_ptr(), x.stride(0)),
            *(self._panels.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr()),
        )
        room = self._functions.dpoptim_rows_room()

        def part(number: int, parts: int) -> None:
            own = vector(room)
            self._functions.dpoptim_multiply_rows(*given, number, parts, own.data_ptr())

        divided(part, rows * self._inner * self._outputs)
        return out


def divided(part: Callable[[int, int], None], work: int) -> None:
    """Call for all parts of some work, so many multiplications, each on one thread."""
    hands = min(torch.get_num_threads(), work // WORTH_A_THREAD)
    if hands <= 1:
        part(0, 1)
        return
    with worker_threads(hands) as run:
        run([partial(part, number, hands) for number in range(hands)])


def vector(entries: int) -> Tensor:
    return torch.empty(entries, dtype=torch.float32, device="cpu")
