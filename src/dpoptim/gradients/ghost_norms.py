"""Ghost norms: squared norms of sums of outer products by the Gram form, which may err."""

import torch
from torch import Tensor

from dpoptim.gradients.batch_invariant import aligned_records, gram
from dpoptim.gradients.products import UNIT_ROUNDOFF

# positions; a public constant, so that no record's ghost norm depends on how long the others are
GHOST_BLOCK = 32


def shortening(ghost: Tensor, squared: Tensor) -> Tensor:
    """Factors that shorten gradients of these squared norms to their ghost norms."""
    return (ghost / squared).sqrt().clamp(max=1.0).nan_to_num(nan=0.0)  # 0 / 0


def ghost_squared_norms(g: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Ghost norms: ``|sum_t outer(g[i, t], a[i, t])|^2`` by the Gram form.

    Raised by about its rounding: float64, (B,). And the squared norm of the longest ``g[i, t]`` of
    each record, float64, (B,).

    The form is symmetric, so each block of positions meets only those up to its own end; what lies
    before counts twice.
    """
    records = len(g)
    g, a = map(aligned_records, (g, a))  # ghost norms, too, must not depend on the place
    squared = lengths = longest = torch.zeros(len(g), dtype=torch.float64, device=g.device)
    for start in range(0, g.shape[1], GHOST_BLOCK):
        block, upto = slice(start, start + GHOST_BLOCK), slice(0, start + GHOST_BLOCK)
        left, right = (gram(x[:, block], x[:, upto]) for x in (g, a))
        squares = left[:, :, start:].diagonal(dim1=1, dim2=2)
        longest = torch.maximum(longest, squares.amax(1).double())
        own = squares * right[:, :, start:].diagonal(dim1=1, dim2=2)
        lengths = lengths + own.sqrt().sum(1, dtype=torch.float64)
        products = left.mul_(right)
        both = products.sum((1, 2)).double()
        squared = squared + (
            both if start == 0 else 2 * both - products[:, :, start:].sum((1, 2)).double()
        )
    ghost = squared.clamp_(min=0) + 4 * UNIT_ROUNDOFF[g.dtype] * lengths.square()
    return ghost[:records], longest[:records]
