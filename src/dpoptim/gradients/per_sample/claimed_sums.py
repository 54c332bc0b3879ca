"""Sums of gradients whose norms were claimed before any was formed, which hold them to that.

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
from dpoptim.gradients.arithmetic.norms import in_blocks, raised, row_squared_norms
from dpoptim.gradients.arithmetic.products import GROUP_ROWS
from dpoptim.gradients.per_sample.ghost_norms import shortening
from dpoptim.gradients.per_sample.parts import add_group, most_at_once, parts_of, sum_of_group
from dpoptim.gradients.per_sample.per_sample_grads import Chunk, OneByOne
from dpoptim.gradients.record_by_record import room, sum_in_turn
from dpoptim.runtime.worker_threads import worker_threads


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
    total, known = room(sums, torch.float32), weights[0, group].tolist()
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
