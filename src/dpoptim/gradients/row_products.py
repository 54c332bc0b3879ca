"""Products of rows with a matrix by compiled functions (`row_products.c`).

Batches have any number of rows, and texts any length. Libraries that compile a kernel for each
shape have to be given few of them, so that results are put together from blocks; these functions
have none to keep, write each number where it belongs, and share rows out to threads.

**Guarantee.** Each row of a result is a function of that row and the matrix, to the last bit,
beside any others, however they lie and on however many threads: each number is one chain of
multiplications and additions in the order of the inner length, which nothing divides.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from dpoptim.compiled import WHOLE, function, library
from dpoptim.compiled_work import Piece, floats
from dpoptim.gradients import spare_room

# `Matrix` and `Product` of `row_products.c`
MATRIX, PRODUCT = struct.Struct("=7q"), struct.Struct("=9q")
# multiplications that take as long as to lay out an entry of a matrix: row by row, which is turned
# on the way, or column by column
TURNED, COPIED = 48, 8


def serve() -> bool:
    """Whether they are there, for this processor."""
    return library() is not None


@dataclass(frozen=True)
class Functions:
    """The compiled functions.

    Attributes:
        panels_room: numbers that the panels of an (n, k) matrix take.
        level: of the vectors that they may use, which changes no bit.
    """

    lay_out: Piece
    multiply: Piece
    panels_room: Callable[[int, int], int]
    level: int


@cache
def functions() -> Functions:
    found, room = library(), function("dpoptim_panels_room", WHOLE, WHOLE, result=WHOLE)
    assert found is not None
    assert room is not None
    lay_out, multiply = Piece("dpoptim_lay_out"), Piece("dpoptim_multiply_rows")
    return Functions(lay_out, multiply, room, found.level)


class Panels:
    """A matrix laid out for products with rows, once for any number of them.

    Args:
        w: float32 on the CPU, (n, k), both at least 1.
    """

    def __init__(self, w: Tensor) -> None:
        if 1 not in w.stride():
            w = w.contiguous()
        self._outputs, self._inner = outputs, inner = w.shape
        # they last as long as the address is used
        self._panels = floats(functions().panels_room(outputs, inner))
        self._address = self._panels.data_ptr()
        level = functions().level
        given = MATRIX.pack(outputs, inner, w.data_ptr(), *w.stride(), self._address, level)
        each = COPIED if w.stride(0) == 1 else TURNED
        functions().lay_out.run(given, each * outputs * inner)

    def multiply(
        self, x: Tensor, bias: Tensor | None = None, spare: int = spare_room.OF_GRADIENTS
    ) -> Tensor:
        """``x @ w.T + bias``: x float32 on the CPU, (rows, k), bias dense, (n,) -> (rows, n).

        Args:
            spare: entries behind a large result; see `spare_room`.
        """
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, inner, outputs = x.shape[0], self._inner, self._outputs
        out = spare_room.result(rows, outputs, spare)
        given = PRODUCT.pack(
            *(rows, inner, outputs, x.data_ptr(), x.stride(0), self._address),
            *(0 if bias is None else bias.data_ptr(), out.data_ptr(), functions().level),
        )
        functions().multiply.run(given, rows * inner * outputs)
        return out
