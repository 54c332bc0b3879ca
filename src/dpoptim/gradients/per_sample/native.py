"""Compiled functions for gradients of single records, where the package was built with them.

`record_gradients.c` forms a record's weight gradient, measures it while it is in cache, and adds
several weighted ones to a sum in one pass. Where it is not there (see `compiled`), PyTorch's
operations do the same within the same bounds, but with other last bits, as between two processors.
`kind` says which of the two.

**Guarantee.** What is formed and measured of a record is a function of its own rows, to the last
bit, whoever else is in the batch and on however many threads: each number is one chain of
operations in an order that the layer's geometry alone decides, records are computed one after the
other, and nothing is divided among threads in here. A norm is measured on the very numbers that
are added; each block's squares are added in float32, which `norms.most_lost` covers in any order.
Records are added in their order: a product of rows as in the theorem of `products`.
"""

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from dpoptim.runtime import compiled
from dpoptim.runtime.compiled import Library
from dpoptim.runtime.compiled_work import floats

LEVELS = ("none", "vectors of 8", "vectors of 16")  # by `dpoptim_level`; of 4-byte numbers
MOST_OF_PRODUCTS = 2  # level of vectors in `outer`; benchmarks lower it to that of others' products
VECTOR = 16  # outputs that are computed side by side
PANEL = 12  # rows of an outer product that are formed side by side


class Geometry(ctypes.Structure):
    """As in `record_gradients.c`."""

    _fields_ = (
        ("channels", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("size", ctypes.c_int64 * 3),
        ("padding", ctypes.c_int64 * 3),
        ("kernel", ctypes.c_int64 * 3),
        ("stride", ctypes.c_int64 * 3),
        ("dilation", ctypes.c_int64 * 3),
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("block", ctypes.c_int64),
    )


@cache
def library() -> Library | None:
    """The compiled functions, declared; None where there are none."""
    found = compiled.library()
    if found is None:
        return None
    functions = found.functions
    whole, some = ctypes.c_int64, ctypes.c_void_p
    functions.dpoptim_room.argtypes, functions.dpoptim_room.restype = [some], whole
    functions.dpoptim_outer_room.argtypes = [whole, whole]
    functions.dpoptim_outer_room.restype = whole
    functions.dpoptim_outer.restype = None
    functions.dpoptim_outer.argtypes = [
        *(whole, whole, whole, whole, some, whole, whole, some, whole, whole),
        *(some, whole, some, whole, whole, some, ctypes.c_int),
    ]
    functions.dpoptim_add_outer.restype = None
    functions.dpoptim_add_outer.argtypes = [
        *(whole, whole, whole, whole, some, whole, whole, some, whole, whole),
        *(some, some, whole, some, some, some, ctypes.c_int),
    ]
    functions.dpoptim_ghost_norms.restype = None
    functions.dpoptim_ghost_norms.argtypes = [
        *(whole, whole, whole, whole, some, whole, whole, some, whole, whole, some, ctypes.c_int)
    ]
    functions.dpoptim_form.restype = functions.dpoptim_add.restype = None
    functions.dpoptim_form.argtypes = [
        *(some, whole, whole, some, some, whole, some, whole),
        *(some, whole, some, whole, some, ctypes.c_int),
    ]
    functions.dpoptim_add.argtypes = [some, whole, some, whole, some, whole, ctypes.c_int]
    for layer in ("lstm", "gru"):
        for way in ("forward", "backward"):
            run = getattr(functions, f"dpoptim_{layer}_{way}")
            run.argtypes, run.restype = [some], None
    return found


def loaded() -> Library:
    """The compiled functions, where `serves` says that they are there."""
    found = library()
    assert found is not None
    return found


def kind() -> str:
    """Name of what forms gradients of single records: public, the same in every run here."""
    found = library()
    return "PyTorch's operations" if found is None else f"compiled, {LEVELS[found.level]}"


def serves(x: Tensor) -> bool:
    """Whether gradients of a dtype and device like those of ``x`` can be formed in here."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and library() is not None


def room_for(geometry: Geometry) -> int:
    """Float32 numbers of room that `form` needs beside its results."""
    found = loaded()
    return int(found.functions.dpoptim_room(ctypes.addressof(geometry)))


def form(
    geometry: Geometry,
    x: Tensor,
    g: Tensor,
    out: Tensor,
    norms: Tensor,
    there: Tensor | None = None,
) -> None:
    """Form some records' gradients, and the norms of their blocks: see `norms.read_part`.

    Args:
        x: inputs, (b K, channels, space...), and g: output gradients, (b K, outputs,
            positions...), float32 on the CPU, each row dense; a record's gradient is the sum over
            its K rows, which come one after the other.
        there: which rows count, bool, dense, (b, K); others may hold anything. None: all.
        out: for gradients, (b, entries), with strides (any, 1): of the kernel's places, and of
            each the outputs.
        norms: for norms of blocks of ``geometry.block`` entries, float32, (b, blocks).
    """
    found = loaded()
    room = torch.empty(room_for(geometry), dtype=torch.float32, device="cpu")
    found.functions.dpoptim_form(
        *(ctypes.addressof(geometry), len(out), len(x) // max(1, len(out))),
        *(None if there is None else there.data_ptr(), x.data_ptr()),
        *(x.stride(0), g.data_ptr(), g.stride(0)),
        *(out.data_ptr(), out.stride(0), norms.data_ptr(), norms.stride(0)),
        *(room.data_ptr(), found.level),
    )


def outer(g: Tensor, a: Tensor, out: Tensor, norms: Tensor, block: int) -> None:
    """Form ``sum_t outer(g[i, t], a[i, t])`` of some records, and the norms of their blocks.

    Args:
        g, a: float32 on the CPU, (b, T, p) and (b, T, d), with strides (any, any, 1).
        out: for gradients, (b, p d), with strides (any, 1).
        norms: as for `form`, of blocks of ``block`` entries.
    """
    found = loaded()
    (records, positions, rows), columns = g.shape, a.shape[2]
    room = floats(outer_room(positions, rows))
    found.functions.dpoptim_outer(
        *(records, positions, rows, columns),
        *(g.data_ptr(), g.stride(0), g.stride(1), a.data_ptr(), a.stride(0), a.stride(1)),
        *(out.data_ptr(), out.stride(0), norms.data_ptr(), norms.stride(0), block),
        *(room.data_ptr(), min(found.level, MOST_OF_PRODUCTS)),
    )


def outer_room(positions: int, rows: int) -> int:
    """Float32 numbers of room that `outer` and `add_outer` need."""
    return int(loaded().functions.dpoptim_outer_room(positions, rows))


def add_outer(g: Tensor, a: Tensor, total: Tensor, weights: Sequence[float], piece: int) -> Tensor:
    """Add what `outer` forms to a total, each record's times its weight, and measure it.

    What is added is measured, and weighted, where it is formed: it is never written. Each entry
    has the bits that `outer` gives it.

    Args:
        g, a: as for `outer`, of `choose_formula.CLAIMED_POSITIONS` positions at most.
        total: float32, (p d,), dense.
        weights: of records; zero: what is there may be anything, and is not looked at.
        piece: rows, of p, that are measured together, a multiple of `PANEL`.

    Returns:
        Sums of the squares of each piece of what was formed, float64, (pieces, b), of which
        12 at most are added in float32 each; zero where the weight is.
    """
    found = loaded()
    (records, positions, rows), columns = g.shape, a.shape[2]
    room = floats(outer_room(positions, rows))
    factors = (ctypes.c_float * len(weights))(*weights)
    pieces = -(-rows // piece)
    squares = torch.empty(pieces, records, dtype=torch.float64, device="cpu")
    of_columns = torch.empty(pieces, 2 * VECTOR, dtype=torch.float64, device="cpu")
    found.functions.dpoptim_add_outer(
        *(records, positions, rows, columns),
        *(g.data_ptr(), g.stride(0), g.stride(1), a.data_ptr(), a.stride(0), a.stride(1)),
        *(total.data_ptr(), ctypes.addressof(factors), piece, squares.data_ptr()),
        *(of_columns.data_ptr(), room.data_ptr(), min(found.level, MOST_OF_PRODUCTS)),
    )
    return squares


def ghost_norms(g: Tensor, a: Tensor, out: Tensor) -> None:
    """Measure ``sum_t outer(g[i, t], a[i, t])`` of some records by the Gram form, which may err.

    Args:
        g, a: as for `outer`.
        out: for the squared norm, the sum of ``|g[i, t]| |a[i, t]|`` and the squared norm of the
            longest ``g[i, t]``: float64, dense, (b, 3).
    """
    found = loaded()
    (records, positions, rows), columns = g.shape, a.shape[2]
    found.functions.dpoptim_ghost_norms(
        *(records, positions, rows, columns),
        *(g.data_ptr(), g.stride(0), g.stride(1), a.data_ptr(), a.stride(0), a.stride(1)),
        *(out.data_ptr(), min(found.level, MOST_OF_PRODUCTS)),
    )


def adds(total: Tensor, gradients: Tensor) -> bool:
    """Whether `add` can, where the entries of each lie side by side."""
    return total.dtype == gradients.dtype and serves(total)


def add(total: Tensor, gradients: Tensor, weights: Sequence[float]) -> None:
    """Add some records' weighted gradients, (b, entries), in their order; weight zero: not at all.

    Args:
        total: float32, (entries,).
    """
    found = loaded()
    factors = (ctypes.c_float * len(weights))(*weights)
    found.functions.dpoptim_add(
        *(total.data_ptr(), total.shape[0], gradients.data_ptr(), gradients.stride(0)),
        *(ctypes.addressof(factors), len(weights), found.level),
    )
