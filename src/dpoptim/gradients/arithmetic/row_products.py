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

from dpoptim.gradients.memory import OF_GRADIENTS, empty_result
from dpoptim.runtime.compiled import WHOLE, function, library
from dpoptim.runtime.compiled_work import Piece, Task, floats, run_in_turn

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
        w = w if 1 in w.stride() else w.contiguous()
        self._outputs, self._inner = w.shape
        # they last as long as the address is used
        self._panels = panels_for(w)
        given, task = laying_out(w, self._panels)
        run_in_turn(given, [task])

    def multiply(self, x: Tensor, bias: Tensor | None = None, spare: int = OF_GRADIENTS) -> Tensor:
        """Multiply as `multiply` does."""
        x = x if x.stride(1) == 1 else x.contiguous()
        out = empty_result(x.shape[0], self._outputs, spare)
        given, task = multiplying(x, self._panels, bias, out)
        run_in_turn(given, [task])
        return out


def multiply(x: Tensor, w: Tensor, bias: Tensor | None, spare: int) -> Tensor:
    """``x @ w.T + bias`` in one call: (rows, k), `Panels`'s (n, k), dense (n,) -> (rows, n).

    Args:
        x: float32 on the CPU.
        spare: entries behind a large result; see `memory`.
    """
    w = w if 1 in w.stride() else w.contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    panels, out = panels_for(w), empty_result(x.shape[0], w.shape[0], spare)
    matrix, lay_out = laying_out(w, panels)
    given, task = multiplying(x, panels, bias, out)
    run_in_turn(matrix + given, [lay_out, task._replace(at=len(matrix))])
    return out


def panels_for(w: Tensor) -> Tensor:
    """Room for the panels of a matrix."""
    return floats(functions().panels_room(*w.shape))


def laying_out(w: Tensor, panels: Tensor) -> tuple[bytes, Task]:
    """Lay a matrix out: of w, rows or columns are dense."""
    outputs, inner = w.shape
    row, column = w.stride()
    found, each = functions(), COPIED if row == 1 else TURNED
    given = MATRIX.pack(outputs, inner, w.data_ptr(), row, column, panels.data_ptr(), found.level)
    return given, Task(found.lay_out, each * outputs * inner)


def multiplying(x: Tensor, panels: Tensor, bias: Tensor | None, out: Tensor) -> tuple[bytes, Task]:
    """Write products of dense rows with what is laid out into ``out``."""
    (rows, inner), outputs, found = x.shape, out.shape[1], functions()
    given = PRODUCT.pack(
        *(rows, inner, outputs, x.data_ptr(), x.stride(0), panels.data_ptr()),
        *(0 if bias is None else bias.data_ptr(), out.data_ptr(), found.level),
    )
    return given, Task(found.multiply, rows * inner * outputs)
