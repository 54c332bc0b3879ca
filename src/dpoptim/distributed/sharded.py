"""Models of which every rank holds a part.

Sums are formed for some parameters at a time, and each rank keeps those of its own parts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from dpoptim.clipping import Directions
from dpoptim.distributed.exchange import Arrive
from dpoptim.distributed.fsdp_internals import dtensor_of
from dpoptim.distributed.ranks import Ranks, part_sizes
from dpoptim.gradients.accumulation.boxes import Boxes
from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.accumulation.totals import Totals

TOGETHER = 1 << 19  # entries that travel together, or those of one parameter


@dataclass(frozen=True)
class Cut:
    """How a tensor is cut into one part for each rank.

    Attributes:
        shape: that it is seen in. axis: that is cut. sizes: of the parts on that axis.
    """

    shape: tuple[int, ...]
    axis: int
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, p: Tensor, ranks: int) -> "Cut":
        """As the parameter itself is cut; one that every rank holds whole: anywhere."""
        if isinstance(p, DTensor):
            (placement,) = p.placements
            assert isinstance(placement, Shard)
            shape, axis = tuple(p.shape), placement.dim
        else:
            shape, axis = (p.numel(),), 0
        return cls(shape, axis, tuple(part_sizes(shape[axis], ranks)))

    def part(self, rank: int, whole: Tensor) -> Tensor:
        """A view of a rank's part of a flat tensor."""
        start = sum(self.sizes[:rank])
        return whole.view(self.shape).narrow(self.axis, start, self.sizes[rank])

    def part_shape(self, rank: int) -> tuple[int, ...]:
        return (*self.shape[: self.axis], self.sizes[rank], *self.shape[self.axis + 1 :])

    def entries(self, rank: int) -> int:
        return torch.Size(self.part_shape(rank)).numel()

    def boxes(self, shape: tuple[int, ...], rank: int, part: Tensor) -> Boxes:
        """A rank's part, flat or not, as of a tensor of this shape."""
        start = sum(self.sizes[:rank])
        if self.shape != shape:  # cut anywhere
            return Boxes.of_stretch(shape, start, part.view(-1))
        return Boxes.of_part(shape, self.axis, start, part.view(self.part_shape(rank)))


class ShardedTotals(Totals):
    """Totals of which each rank keeps its own parts.

    A rank sums its own records, for a few parameters at a time; these sums over all ranks go to
    those that hold the parts.

    Args:
        ranks: that hold the parts.
        parameters, directions: as for `Totals`; DTensors with one shard a rank, or such as every
            rank holds whole.

    **Guarantee.** As `ReplicatedTotals`: every entry of the sum is in exactly one rank's part, and
    every rank's records in it once for each backward pass. No rank holds the sums of more
    parameters than `TOGETHER` says (or one), but for those of its parts; nothing between steps.
    """

    travels = True

    def __init__(
        self, ranks: Ranks, parameters: Sequence[nn.Parameter], directions: Directions
    ) -> None:
        self._ranks, self._parameters = ranks, parameters
        self._cuts = [Cut.of(p, ranks.size) for p in parameters]
        by_device: dict[torch.device, list[int]] = {}
        for place, p in enumerate(parameters):
            by_device.setdefault(p.device, []).append(place)
        self._places = list(by_device.items())
        self._count = len(directions[0])
        self._buffers: list[list[Tensor]] = []  # only while a step is open
        self._own: list[list[Tensor]] = []  # views of them: of each sum, one for each parameter
        self._written: set[int] = set()  # places of parameters whose views hold something
        self.sums = [Sums([p.numel()], p.device, directions) for p in parameters]
        self._last = {places[-1]: places for places in travel_together(parameters)}
        self._under_way: Arrive | None = None

    @property
    def entries(self) -> list[int]:
        return [sum(self._parameters[i].numel() for i in places) for _, places in self._places]

    @property
    def own_entries(self) -> list[int]:
        return [sum(self._own_sizes(places)) for _, places in self._places]

    def _own_sizes(self, places: Sequence[int]) -> list[int]:
        return self._entries_of(places, self._ranks.rank)

    def restart(self) -> None:
        super().restart()
        self._forget()

    def _forget(self) -> None:
        self._under_way = None
        self._buffers, self._own, self._written = [], [], set()

    def _begin(self) -> None:
        """Make room for this rank's parts of the sums, if there is none.

        Between steps, where activations are, they take no memory; and on the CPU only what is
        written does, while what sums are made of is freed.
        """
        if not self._buffers:
            self._buffers = [
                [
                    torch.empty(sum(self._own_sizes(places)), dtype=torch.float64, device=device)
                    for device, places in self._places
                ]
                for _ in range(self._count)
            ]
            self._own = [self.own_views(each) for each in self._buffers]

    def finish(self, place: int) -> None:
        if (places := self._last.get(place)) is not None:
            self._send(places)
        if place == len(self._parameters) - 1:
            self._await()

    def _send(self, places: Sequence[int]) -> None:
        """Let these parameters' sums go to those that hold their parts, and forget them here.

        The last of them are under way when this returns, while the next are formed.
        """
        self._begin()
        wholes = [self.sums[place].take() for place in places]
        for number in range(self._count):
            given = [whole[number] for whole in wholes]
            for stretch in self._stretches(places):
                self._await()  # before there is memory for another
                self._under_way = self._send_stretch(places, given, self._own[number], stretch)
        self._written.update(places)

    def _await(self) -> None:
        if (arrive := self._under_way) is not None:
            self._under_way = None
            arrive()

    def _stretches(self, places: Sequence[int]) -> Iterator[slice]:
        """Stretches of every rank's part of these parameters.

        One, or of a single large parameter several, so that no more than `TOGETHER` entries travel
        at a time.
        """
        sizes = [sum(self._entries_of(places, rank)) for rank in range(self._ranks.size)]
        each = max(TOGETHER // self._ranks.size, 1) if len(places) == 1 else max(sizes)
        yield from (slice(start, start + each) for start in range(0, max(sizes), max(each, 1)))

    def _entries_of(self, places: Sequence[int], rank: int) -> list[int]:
        return [self._cuts[place].entries(rank) for place in places]

    def _send_stretch(
        self,
        places: Sequence[int],
        wholes: Sequence[Tensor | None],
        own: Sequence[Tensor],
        stretch: slice,
    ) -> Arrive:
        """Begin to add up this stretch of every rank's part of one sum.

        Args:
            own: what this rank holds of its parts, to which its own records' are added at once.
        """
        mine = self._ranks.rank
        others = [rank for rank in range(self._ranks.size) if rank != mine]
        targets = [own[i][stretch] for i in places]
        for i, whole, target in zip(places, wholes, targets, strict=True):
            part = self._part(i, whole, mine, stretch)
            if i in self._written:
                target.add_(part)
            else:
                target.copy_(part)
        sizes = [0] * self._ranks.size
        parts = []
        for rank in others:
            for i, whole in zip(places, wholes, strict=True):
                parts.append(self._part(i, whole, rank, stretch))
                sizes[rank] += len(parts[-1])
        given = own[places[0]].new_empty(sum(sizes))
        for part, into in zip(parts, given.split([*map(len, parts)]), strict=True):
            into.copy_(part)
        lengths = [*map(len, targets)]
        received = self._ranks.trade(given, sizes, sum(lengths))

        def arrive() -> None:
            for theirs in received():
                for target, part in zip(targets, theirs.split(lengths), strict=True):
                    target.add_(part)

        return arrive

    def _part(self, place: int, whole: Tensor | None, rank: int, stretch: slice) -> Tensor:
        """A stretch of a rank's part of one parameter's sum, flat."""
        cut = self._cuts[place]
        if whole is None:
            zero = self._own[0][place].new_zeros(())
            return zero.expand(cut.entries(rank))[stretch]
        return cut.part(rank, whole).reshape(-1)[stretch]

    def take(self) -> list[list[Tensor]]:
        self._await()
        self._begin()
        for views in self._own:
            for place, view in enumerate(views):
                if place not in self._written:
                    view.zero_()
        taken = self._buffers
        self._forget()
        return taken

    def take_by_parameter(self) -> list[Tensor]:
        """This rank's parts, one vector a device."""
        return self.take()[0]

    def own_views(self, taken: list[Tensor]) -> list[Tensor]:
        views: dict[int, Tensor] = {}
        for (_, places), part in zip(self._places, taken, strict=True):
            views |= zip(places, part.split(self._own_sizes(places)), strict=True)
        return [views[place] for place in range(len(self._parameters))]

    def write_means(self, released: list[Tensor], divisor: float) -> None:
        """As `Totals.write_means`: of a parameter that is cut, into this rank's part alone."""
        with torch.no_grad():
            for p, cut, part in zip(
                self._parameters, self._cuts, self.own_views(released), strict=True
            ):
                mean = part.to(p.dtype, copy=True).div_(divisor)
                if isinstance(p, DTensor):
                    p.grad = dtensor_of(p, mean.view(cut.part_shape(self._ranks.rank)))
                else:
                    grad = torch.empty_like(p, memory_format=torch.contiguous_format)
                    self._ranks.join_parts(mean, [grad.view(-1)])
                    p.grad = grad

    def boxes(self, taken: list[Tensor]) -> list[Boxes]:
        return [
            cut.boxes(tuple(p.shape), self._ranks.rank, view)
            for p, cut, view in zip(
                self._parameters, self._cuts, self.own_views(taken), strict=True
            )
        ]


def travel_together(parameters: Sequence[nn.Parameter]) -> Iterator[list[int]]:
    """Places of consecutive parameters on one device."""
    places: list[int] = []
    size = 0
    for place, p in enumerate(parameters):
        other = places and parameters[places[0]].device != p.device
        if places and (other or size + p.numel() > TOGETHER):
            yield places
            places, size = [], 0
        places.append(place)
        size += p.numel()
    yield places
