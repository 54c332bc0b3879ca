"""Ghost norms: squared norms by the Gram form, which may err, and sums that are held to them.

They are claimed before any gradient is formed, and each is measured when it is.

**Guarantee.** What is added of a record is at most as long as was claimed, whatever made the claim
too short: it is measured, never low, where it is formed, and what turns out longer is formed again,
in the same way, and shortened. (tests/gradients/test_ways_of_measuring.py tries to falsify it.)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic.batch_invariant import aligned_records, gram, row_by_row
from dpoptim.gradients.arithmetic.multiplication import plain
from dpoptim.gradients.arithmetic.norms import in_blocks, raised, row_squared_norms
from dpoptim.gradients.arithmetic.products import GROUP_ROWS, UNIT_ROUNDOFF
from dpoptim.gradients.per_sample import native
from dpoptim.gradients.per_sample.parts import add_group, most_at_once, parts_of, sum_of_group
from dpoptim.gradients.per_sample.per_sample_grads import Chunk, OneByOne
from dpoptim.gradients.record_by_record import sum_in_turn, zero_terms
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
    return with_rounding(squared, lengths, g.dtype), longest


def with_rounding(squared: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """Squared norms by the Gram form, raised by about its rounding in that dtype.

    Args:
        lengths: sums of ``|g[i, t]| |a[i, t]|``.
    """
    return squared.clamp(min=0) + 4 * UNIT_ROUNDOFF[dtype] * lengths.square()


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


@dataclass(frozen=True)
class Claims:
    """Squared norms that were claimed.

    Attributes:
        squared: float64, (B,).
        entries: of each gradient.
        block: of `row_squared_norms`.
        at_once: whether all are added before it is known which are longer; elsewhere, asking would
            wait for the device.
    """

    squared: Tensor
    entries: int
    block: int
    at_once: bool


def add_claimed(
    form: Callable[[slice], Tensor], sums: Sums, group: slice, weights: Tensor, claims: Claims
) -> None:
    """Add a group's gradients, and shorten those that are longer than was claimed.

    Mostly none is: so they are measured while they are summed, and only where one is longer all are
    formed again. That changes nothing for the others, whose gradients, weights and places in the
    sum are the same both times.

    Args:
        form: forms the gradients of some records, (b, entries).
        weights: float64, (k, B); zero where a record does not count.
    """
    claimed, entries, block = claims.squared, claims.entries, claims.block
    most = most_at_once(claimed.device)
    held = torch.zeros_like(claimed, dtype=torch.bool)
    measured = torch.empty_like(claimed)

    def measuring(part: slice) -> tuple[Tensor, Tensor]:
        values = form(part)
        measured[part] = in_blocks(values, block)
        return values, weights[:, part]

    def shortened(part: slice) -> tuple[Tensor, Tensor]:
        values = form(part)
        factors = shortening(claimed[part], row_squared_norms(values, block=block))
        return values, weights[:, part] * torch.where(held[part], 1.0, factors)

    if claims.at_once:
        of_group = sum_of_group(group, parts_of(group, entries, most), measuring)
        held[group] = raised(measured[group], entries, block) <= claimed[group]  # no if NaN
        if of_group is not None and bool((held[group] | (weights[:, group] == 0).all(0)).all()):
            sums.add(of_group)
            return
    add_group(sums, group, parts_of(group, entries, most), shortened)


def add_claimed_in_turn(
    layer: OneByOne, sums: Sums, group: slice, weights: Tensor, claims: Claims
) -> None:
    """`add_claimed` where gradients are formed record by record: the same way again."""
    of_group, squared = _sum_measured(layer, sums, group, weights, claims.block)
    if of_group is None:
        return
    claimed = claims.squared[group]
    counts = (weights[:, group] != 0).any(0)
    squared = raised(squared, claims.entries, claims.block)
    if not bool((squared <= claimed)[counts].all()):  # nor if NaN
        shorter = weights.clone()
        shorter[:, group] *= torch.where(counts, shortening(claimed, squared), 0.0)
        of_group, _ = _sum_measured(layer, sums, group, shorter, claims.block)
    if of_group is not None:
        sums.add(of_group)


def _sum_measured(
    layer: OneByOne, sums: Sums, group: slice, weights: Tensor, block: int
) -> tuple[Tensor | None, Tensor]:
    """`sum_in_turn`, where compiled functions can by adding what they form where they form it.

    Pieces of a layer are dealt to threads, each record's in a row, which read it while it is in
    cache. What is measured of the pieces is added in their order, to whomever they were dealt.
    """
    chunks, records = layer.one_by_one(), group.stop - group.start
    added = all(chunk.form_added is not None for chunk in chunks)
    if not added or not records or sums.count > 1 or records > GROUP_ROWS:
        return sum_in_turn(layer, sums, group, weights, block)
    total, known = zero_terms(sums, torch.float32), weights[0, group].tolist()
    hands = torch.get_num_threads()
    tasks = [(chunk, some) for chunk in chunks for some in _ranges(chunk, hands, len(chunks))]
    squared: list[Tensor] = [weights] * len(tasks)

    def add(place: int, chunk: Chunk, pieces: slice) -> None:
        assert chunk.form_added is not None
        into = total[0, chunk.start : chunk.start + chunk.entries]
        squared[place] = chunk.form_added(group, into, known, pieces)

    with worker_threads(hands) as run:
        run([partial(add, place, *task) for place, task in enumerate(tasks)])
    return layer.in_order(total), torch.cat(squared).sum(0)


def _ranges(chunk: Chunk, hands: int, chunks: int) -> Iterator[slice]:
    """Pieces of one of so many chunks, that all hands may take part."""
    each = max(1, chunk.pieces * chunks // hands)
    for start in range(0, chunk.pieces, each):
        yield slice(start, min(start + each, chunk.pieces))
