"""Ghost norms: squared norms of sums of outer products by the Gram form, which may err."""

from functools import partial

import torch
from torch import Tensor

from dpoptim.gradients.arithmetic.batch_invariant import aligned_records, gram, row_by_row
from dpoptim.gradients.arithmetic.multiplication import plain
from dpoptim.gradients.arithmetic.products import UNIT_ROUNDOFF
from dpoptim.gradients.per_sample import native
from dpoptim.runtime.worker_threads import worker_threads

# positions; a public constant, so that no record's ghost norm depends on how long the others are
GHOST_BLOCK = 32


def shortening(ghost: Tensor, squared: Tensor) -> Tensor:
    """Factors that shorten gradients of these squared norms to their ghost norms."""
    return (ghost / squared).sqrt().clamp(max=1.0).nan_to_num(nan=0.0)  # 0 / 0


def ghost_squared_norms(g: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Ghost norms: ``|sum_t outer(g[i, t], a[i, t])|^2`` by the Gram form.

    Raised by about its rounding: float64, (B,). And the squared norm of the longest ``g[i, t]`` of
    each record, float64, (B,).

    **Guarantee.** Both are functions of the record's own rows, to the last bit, whoever else is in
    the batch and on however many threads; positions of zeros after a record's last change nothing.
    They may err: what is added is measured, and shortened where it is longer than was claimed.
    """
    if native.serves(g) and native.serves(a) and plain(g) and plain(a):
        squared, lengths, longest = _compiled(g, a).unbind(1)
    else:
        squared, lengths, longest = _by_blocks(g, a)
    ghost = squared.clamp(min=0) + 4 * UNIT_ROUNDOFF[g.dtype] * lengths.square()
    return ghost, longest


def _compiled(g: Tensor, a: Tensor) -> Tensor:
    """Squared norms, sums of ``|g[i, t]| |a[i, t]|``, and longest ``|g[i, t]|^2``: (B, 3)."""
    left, right = (x if x.stride(2) == 1 else row_by_row(x).contiguous() for x in (g, a))
    found = torch.empty(len(g), 3, dtype=torch.float64, device="cpu")
    hands = torch.get_num_threads()
    each = max(1, -(-len(g) // hands))
    with worker_threads(hands) as run:
        run(
            [
                partial(native.ghost_norms, *parts)
                for parts in zip(*(x.split(each) for x in (left, right, found)), strict=True)
            ]
        )
    return found


def _by_blocks(g: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same three, (B,) each, by PyTorch's operations.

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
    return squared[:records], lengths[:records], longest[:records]
