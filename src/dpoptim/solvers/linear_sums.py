"""Clipped sums of linear models by a compiled function (`linear_sums.c`).

Where it is not there (see `runtime.compiled`), PyTorch's operations do the same, more slowly, in
the dtype of the rows.

**Guarantee.** That of `LinearModel.clipped_sum`, for which it computes in float64 whatever the rows
are kept in: so the margin is that of float64, by the theorem of `products`, whose products of
`WIDE_ROWS` rows are here sums of as many, each row added to them after the one before. What is
computed of a row is a function of its own numbers, to the last bit, whoever else is there. Squares
that float64 cannot hold are lost from norms below 2^-400, which is nothing beside the least bound,
`clipping.SMALLEST_NORM`.
"""

import struct
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from dpoptim.clipping import InC
from dpoptim.runtime.compiled import PLACE, WHOLE, function, library

LOSSES = ("softmax", "logistic", "squared", "huber")  # in the order of `linear_sums.c`
SUMS = struct.Struct("=10q7Q7d2Q")  # `Sums` there
MOST_OUTPUTS = 16  # of more, PyTorch's products are faster
MOST_COLUMNS = 1 << 12  # so that some rows stay in cache


def serve(x: Tensor | None, outputs: int, columns: int) -> bool:
    """Whether sums over rows like these can be formed here; None: over float32 or float64 ones."""
    return (
        (x is None or (x.is_cpu and x.dtype in (torch.float32, torch.float64)))
        and outputs <= MOST_OUTPUTS
        and columns <= MOST_COLUMNS
        and library() is not None
    )


@cache
def functions() -> tuple[Callable[..., None], Callable[..., int], int]:
    """The compiled function, that which says how much room it needs, and the level of vectors."""
    found, run = library(), function("dpoptim_linear_sum", PLACE)
    room = function("dpoptim_linear_room", WHOLE, WHOLE, WHOLE, result=WHOLE)
    assert found is not None
    assert run is not None
    assert room is not None
    return run, room, found.level


def clipped_sum(
    x: Tensor,
    y: Tensor,
    points: Sequence[Tensor],
    coefficients: Sequence[float],
    rule: InC,
    *,
    loss: str,
    shape: tuple[int, int],
    huber_delta: float,
    longest: float,
    squared_row_norms: Tensor,
    shares: Tensor | None,
    weights: Tensor | None,
) -> Tensor:
    """The sum that `LinearModel.clipped_sum` defines: float64, of ``shape``.

    Args:
        x: what `serve` takes, (B, features).
        y: any dtype, (B,), or (B, p) of a regression.
        points, coefficients: c_j w_j, as there.
        rule: see `Clipping.in_c`; with a bound of at least `clipping.SMALLEST_NORM`.
        shape: outputs, and columns: one more than features where there is an intercept.
        longest: rows or residuals whose squared norm is larger count as not finite.
        squared_row_norms, shares, weights: as there, (B,).
    """
    run, room_for, level = functions()
    outputs, columns = shape
    x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
    known = [None if each is None else numbers(each) for each in (shares, weights)]
    targets, norms = numbers(y), numbers(squared_row_norms)
    w = torch.stack([numbers(point) for point in points])
    c = torch.tensor(list(coefficients), dtype=torch.float64, device="cpu")
    out = torch.zeros(outputs, columns, dtype=torch.float64, device="cpu")
    room = torch.empty(room_for(columns, outputs, len(points)), dtype=torch.float64, device="cpu")
    given = SUMS.pack(
        *(len(x), x.shape[1], columns, outputs, len(points), LOSSES.index(loss)),
        *(1 if y.dim() == 1 else outputs, x.stride(0), x.dtype == torch.float64, level),
        *(x.data_ptr(), targets.data_ptr(), norms.data_ptr()),
        *(0 if each is None else each.data_ptr() for each in known),
        *(w.data_ptr(), c.data_ptr(), *rule, longest, huber_delta),
        *(out.data_ptr(), room.data_ptr()),
    )
    run(given)
    return out


def numbers(values: Tensor) -> Tensor:
    """As dense float64."""
    return values.to(torch.float64).contiguous()
