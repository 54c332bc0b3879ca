"""Vectors that ranks add up and hand out, stretch by stretch.

The next stretch travels while one is worked on, and no memory of the size of a model is needed
beside the vectors: on the CPU, fresh pages for it cost more time than the messages.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from dpoptim.distributed.c10d_internals import all_gather_single

STRETCH = 1 << 21  # entries, of all ranks' parts together, that travel at a time
LEAST = 1 << 17  # of one rank's part: shorter messages cost more for their number than their bytes
Arrive = Callable[[], None]
Change = Callable[[Tensor], Tensor]


def stretches(entries: int, ranks: int) -> list[slice]:
    """Cut a rank's part of a vector into what travels at a time; the longest part has so many."""
    each = max(STRETCH // ranks, LEAST)
    return [slice(start, min(start + each, entries)) for start in range(0, entries, each)]


def one_ahead(begun: Iterator[Arrive]) -> None:
    """Begin each exchange before the one before it is awaited, and await all."""
    before: Arrive | None = None
    for arrive in begun:
        if before is not None:
            before()
        before = arrive
    if before is not None:
        before()


def trade(
    given: Tensor, sizes: Sequence[int], entries: int, rank: int, group: dist.ProcessGroup
) -> Callable[[], Tensor]:
    """Begin to send every other rank its own vector.

    Args:
        given: the vectors, in the order of the ranks.
        sizes: of them, for each rank; 0 for this one.
        entries: that each other rank sends to this one.

    Returns:
        what waits for theirs, (others, entries). ``given`` is in use until then.
    """
    taken = [entries] * len(sizes)
    taken[rank] = 0
    received = given.new_empty(sum(taken))
    work = dist.all_to_all_single(received, given, taken, [*sizes], group=group, async_op=True)

    def arrive() -> Tensor:
        work.wait()
        return received.view(len(sizes) - 1, entries)

    return arrive


def swap(given: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Send every rank its own tensor, and return theirs to this one, in the order of the ranks.

    Args:
        given: for each rank, this one too; they differ in their first lengths alone.
    """
    sizes = torch.tensor([*map(len, given)], device=given[0].device)
    theirs = torch.empty_like(sizes)
    dist.all_to_all_single(theirs, sizes, group=group)
    taken = theirs.tolist()
    received = given[0].new_empty(sum(taken), *given[0].shape[1:])
    dist.all_to_all_single(received, torch.cat([*given]), taken, sizes.tolist(), group=group)
    return [*received.split(taken)]


def add_parts(parts: Sequence[Tensor], rank: int, group: dist.ProcessGroup) -> None:
    """Add all ranks' vectors up: the sum of this rank's part is written over it.

    Each rank sends every other one its part of the vector, and adds what it gets to its own, in the
    order of the ranks. (On gloo this takes two fifths of the time of its reduce-scatter, and the
    order of additions is known.)

    Args:
        parts: of this rank's vector, one for each rank; flat.
        rank: this one. group: of all.
    """
    others = [*range(rank), *range(rank + 1, len(parts))]

    def begin(cut: slice) -> Arrive:
        mine = parts[rank][cut]
        sizes = [len(part[cut]) for part in parts]
        sizes[rank] = 0
        sent = [parts[other][cut] for other in others]
        given = sent[0] if len(sent) == 1 else torch.cat(sent)
        theirs = trade(given, sizes, len(mine), rank, group)

        def arrive() -> None:
            for part in theirs():
                mine.add_(part)

        return arrive

    if others:
        one_ahead(map(begin, stretches(max(map(len, parts)), len(parts))))


def join_parts(
    part: Tensor,
    sizes: Sequence[int],
    into: Sequence[Tensor],
    group: dist.ProcessGroup,
    sent: Change,
) -> None:
    """Write all ranks' parts of a vector, in order, into flat tensors that follow each other.

    Args:
        part: this rank's.
        sizes: of all ranks' parts: equally many, but for what the last ones lack.
        into: as many entries as there are; of any dtypes.
        group: of all ranks.
        sent: from a stretch of the part to what is handed out of it, entry by entry.
    """
    starts = [0, *accumulate(sizes)]

    def begin(cut: slice) -> Arrive:
        length = cut.stop - cut.start
        mine = sent(part[cut])
        if len(mine) < length:
            mine = torch.cat([mine, mine.new_zeros(length - len(mine))])
        everyone = mine.new_empty(len(sizes) * length)
        work = all_gather_single(everyone, mine, group=group, async_op=True)

        def arrive() -> None:
            work.wait()
            for start, size, theirs in zip(starts, sizes, everyone.split(length), strict=False):
                write(into, start + cut.start, theirs[: max(0, size - cut.start)])

        return arrive

    one_ahead(map(begin, stretches(sizes[0], len(sizes))))


def write(into: Sequence[Tensor], start: int, values: Tensor) -> None:
    """Copy into flat tensors that follow each other, from this entry on."""
    before = 0
    for each in into:
        first, last = max(start - before, 0), min(start + len(values) - before, len(each))
        if first < last:
            from_here = before + first - start
            each[first:last].copy_(values[from_here : from_here + last - first])
        before += len(each)
