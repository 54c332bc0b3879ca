"""Models that every rank holds whole.

Sums are added up part by part, and what is released of the parts is joined.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from dpoptim.clipping import Directions
from dpoptim.distributed.ranks import Ranks, part_sizes
from dpoptim.gradients.accumulation.boxes import Boxes
from dpoptim.gradients.accumulation.totals import Totals, mean_of


class ReplicatedTotals(Totals):
    """Each rank sums its own records; `take` returns this rank's part of the sum over all of them.

    Args:
        ranks: that hold the same parameters.
        parameters, directions: as for `Totals`.

    **Guarantee.** Every entry of the sum is in exactly one rank's part. Adding W vectors up errs
    by at most W times 2^-53 of the absolute values, which the theorem in `products`
    covers: its float64 additions are counted for as many terms as there are records, at least.
    """

    def __init__(
        self, ranks: Ranks, parameters: Sequence[nn.Parameter], directions: Directions
    ) -> None:
        super().__init__(parameters, directions)
        self._ranks = ranks

    def take(self) -> list[list[Tensor]]:
        return [[self._ranks.sum_parts(vector) for vector in each] for each in super().take()]

    def take_by_parameter(self) -> list[Tensor]:
        """This rank's part of each device's vector, which may cut through parameters."""
        return self.take()[0]

    @property
    def own_entries(self) -> list[int]:
        return [part_sizes(whole, self._ranks.size)[self._ranks.rank] for whole in self.entries]

    def boxes(self, taken: list[Tensor]) -> list[Boxes]:
        starts: dict[torch.device, Iterator[int]] = {}
        for device, sizes in self._layout:
            before = self._start(sum(sizes))
            firsts = [0, *accumulate(sizes)]
            starts[device] = iter([max(before - first, 0) for first in firsts])
        return [
            Boxes.of_stretch(tuple(p.shape), next(starts[p.device]), view)
            for p, view in zip(self._parameters, self.own_views(taken), strict=True)
        ]

    def _start(self, entries: int) -> int:
        """Where this rank's part of a vector begins."""
        return sum(part_sizes(entries, self._ranks.size)[: self._ranks.rank])

    def own_views(self, taken: list[Tensor]) -> list[Tensor]:
        """See `Totals.own_views`; empty where another rank has all of a parameter."""
        views: dict[torch.device, Iterator[Tensor]] = {}
        for (device, sizes), part in zip(self._layout, taken, strict=True):
            before = self._start(sum(sizes))
            ends = [min(max(end - before, 0), len(part)) for end in accumulate(sizes)]
            views[device] = iter([part[start:end] for start, end in pairwise([0, *ends])])
        return [next(views[p.device]) for p in self._parameters]

    def write_means(self, released: list[Tensor], divisor: float) -> None:
        """As `Totals.write_means`, from this rank's parts; every rank writes the same bits."""
        with torch.no_grad():
            means = [p.new_empty(p.shape) for p in self._parameters]
            for (device, _), part in zip(self._layout, released, strict=True):
                into = [mean.view(-1) for mean in means if mean.device == device]
                dtypes = {mean.dtype for mean in into}
                dtype = dtypes.pop() if len(dtypes) == 1 else torch.float64
                self._ranks.join_parts(part, into, partial(mean_of, divisor=divisor, dtype=dtype))
            for p, mean in zip(self._parameters, means, strict=True):
                p.grad = mean
