"""Totals of a step: by parameter while they are added up, and then together, as one vector."""

import struct
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from dpoptim.clipping import Directions, Units
from dpoptim.gradients.accumulation.boxes import Boxes
from dpoptim.gradients.accumulation.sums import AS_IT_CAME, Sums
from dpoptim.gradients.per_sample.per_sample_grads import PerSampleGrad
from dpoptim.noise.few_rows import Vector
from dpoptim.runtime.compiled import PLACE, REAL, WHOLE, function
from dpoptim.runtime.torch_internals import divide_all

MEAN = struct.Struct("=QqqQ")  # as in `totals.c`
MEAN_BLOCK = 1 << 17  # entries that are rounded and divided at a time: they stay in cache


class Totals:
    """The sums of all parameters, whole and in this process.

    Args:
        parameters: shapes and devices; ``.grad`` is written at the end.
        directions: of the clipping rule; see `clipping.Directions`.

    Attributes:
        sums: of each parameter, for a backward pass to add to.
        travels: whether sums leave this process at the end of each backward pass, before `take`.
    """

    travels = False
    sums: Sequence[Sums]

    def __init__(self, parameters: Sequence[nn.Parameter], directions: Directions) -> None:
        self._parameters = parameters
        by_device: dict[torch.device, list[int]] = {}
        for p in parameters:
            by_device.setdefault(p.device, []).append(p.numel())
        self._layout = list(by_device.items())
        self.sums = [Sums([p.numel()], p.device, directions, reuse=True) for p in parameters]
        self._vectors: list[list[Tensor]] = []  # once `take` was asked for them

    @property
    def entries(self) -> list[int]:
        """Entries of the whole vectors of a sum, in the order of `take`."""
        return [sum(sizes) for _, sizes in self._layout]

    @property
    def own_entries(self) -> list[int]:
        """Those of them that `take` returns in this process."""
        return self.entries

    def boxes(self, taken: list[Tensor]) -> list[Boxes]:
        """Views of one of `take`'s sums: the boxes of each parameter's that are in this process."""
        return [Boxes.whole(view if view.dim() else view[None]) for view in self.split(taken)]

    def look(
        self, place: int, rows: PerSampleGrad, present: Tensor | None, per_record: int
    ) -> None:
        """Look at the gradients of a pass's rows for a parameter, before they are measured.

        Args:
            present: which of them are there, see `RowsOfRecords.of_records`. per_record: K.
        """

    def finish(self, place: int) -> None:
        """A backward pass has added all it has for the parameter at this place."""

    def restart(self) -> None:
        """Forget what was added."""
        for sums in self.sums:
            sums.restart()

    def take(self) -> list[list[Tensor]]:
        """All sums, a flat float64 vector a device each, and a fresh start. See `Engine.take`."""
        if not self._vectors:
            self._vectors = [
                [
                    torch.empty(sum(sizes), dtype=torch.float64, device=device)
                    for device, sizes in self._layout
                ]
                for _ in range(self.sums[0].count)
            ]
        views = [*zip(*map(self.split, self._vectors), strict=True)]
        for sums, of_each in zip(self.sums, views, strict=True):
            for view, held in zip(of_each, sums.take(), strict=True):
                if held is None:
                    view.zero_()
                else:
                    view.view(-1).copy_(held)
        return self._vectors

    def take_by_parameter(self) -> Sequence[Vector]:
        """The first sum, flat, one vector a parameter, and a fresh start.

        It is float32 where that is what was summed and what the parameter is stored in, else
        float64; of a large table that was looked up, the rows that were, for noise to write out.
        """
        taken: list[Vector] = []
        for p, sums in zip(self._parameters, self.sums, strict=True):
            if (rows := sums.take_few_rows(p.dtype)) is not None:
                taken.append(rows)
                continue
            held = sums.take()[0]
            if held is None:
                held = torch.zeros(p.numel(), dtype=p.dtype, device=p.device)
            taken.append(held if held.dtype == p.dtype else held.double())
        return taken

    def write_means(self, released: list[Tensor], divisor: float) -> None:
        """Write one released sum into ``.grad``, divided and rounded to its dtype.

        Args:
            released: as `take` or `take_by_parameter` returned it, written out; memory in that
                dtype is given away.
        """
        each = released if len(released) == len(self._parameters) else self.split(released)
        for p, mean in zip(
            self._parameters, means_of(each, divisor, self._parameters), strict=True
        ):
            p.grad = mean

    def split(self, buffers: list[Tensor]) -> list[Tensor]:
        """Views of one whole vector a device, or of one a parameter, in the parameters' shapes."""
        if len(buffers) == len(self._parameters):  # if they are as many as devices, it is the same
            return [each.view(p.shape) for p, each in zip(self._parameters, buffers, strict=True)]
        places = {
            device: buffer.split(sizes)
            for (device, sizes), buffer in zip(self._layout, buffers, strict=True)
        }
        views = {device: iter(pieces) for device, pieces in places.items()}
        return [next(views[p.device]).view(p.shape) for p in self._parameters]

    def own_views(self, taken: list[Tensor]) -> list[Tensor]:
        """Flat views of one of `take`'s sums, one a parameter: its entries in this process."""
        return [view.view(-1) for view in self.split(taken)]

    def by_unit(self, units: Units, taken: list[Tensor]) -> list[list[Tensor]]:
        """Flat views of one of `take`'s sums: what is in this process of each unit."""
        if len(set(units.of)) == 1:
            return [taken]
        views: dict[str, list[Tensor]] = {}
        for unit, view in zip(units.of, self.own_views(taken), strict=True):
            views.setdefault(unit, []).append(view)
        return list(views.values())


@cache
def compiled_means() -> Callable[..., None] | None:
    """The function of `totals.c`; None where there are no compiled functions."""
    return function("dpoptim_means", WHOLE, PLACE, REAL)


def means_of(totals: Sequence[Tensor], divisor: float, likes: Sequence[Tensor]) -> list[Tensor]:
    """`mean_of` each, to the same bits; of those that are small by one compiled call.

    Args:
        likes: tensors that have the shapes and dtypes of the means; totals may be flat.
    """
    if totals and not totals[0].is_cpu:
        return means_there(totals, divisor, likes)
    divide, given, means = compiled_means(), list[bytes](), list[Tensor]()
    for total, like in zip(totals, likes, strict=True):
        dtype, of, entries = like.dtype, total.dtype, total.numel()
        usual = dtype == torch.float32 and of in AS_IT_CAME and entries <= MEAN_BLOCK
        if divide is None or not usual or not total.is_cpu or not total.is_contiguous():
            means.append(mean_of(total.view(like.shape), divisor, dtype))
            continue
        means.append(mean := torch.empty(like.shape, dtype=dtype, device="cpu"))
        given.append(MEAN.pack(total.data_ptr(), entries, of == torch.float64, mean.data_ptr()))
    if divide is not None and given:
        divide(len(given), b"".join(given), divisor)
    return means


def means_there(totals: Sequence[Tensor], divisor: float, likes: Sequence[Tensor]) -> list[Tensor]:
    """`means_of` on accelerators: in few calls, which take longer than to divide."""
    means = [
        (total if given_away(total, like.dtype) else total.to(like.dtype, copy=True)).view(
            like.shape
        )
        for total, like in zip(totals, likes, strict=True)
    ]
    divide_all(means, divisor)
    return [mean.data for mean in means]


def given_away(total: Tensor, dtype: torch.dtype) -> bool:
    """Whether a mean in this dtype may have the memory of ``total``.

    Not where anything else lies there: sums of other parameters, and what noise was never added to,
    would be a gradient's storage, which is saved with it. float64 is used again by who made it.
    """
    alone = total.untyped_storage().nbytes() == total.nbytes
    return alone and total.dtype == dtype and dtype != torch.float64


def mean_of(total: Tensor, divisor: float, dtype: torch.dtype) -> Tensor:
    """Round ``total`` to ``dtype``, then divide.

    In its own memory where it has that dtype and nothing else lies there; float64 is used again by
    who made it. On a processor it goes block by block, which stay in cache from one operation to
    the next.
    """
    if given_away(total, dtype):
        # the same memory, but no view: whoever zeroes gradients in place may detach them
        return total.div_(divisor).data
    if total.numel() <= MEAN_BLOCK:
        return total.to(dtype, copy=True).div_(divisor)
    mean = torch.empty_like(total, dtype=dtype)
    size = MEAN_BLOCK if total.is_cpu else max(1, total.numel())
    for part, of_total in zip(mean.view(-1).split(size), total.view(-1).split(size), strict=True):
        part.copy_(of_total).div_(divisor)
    return mean


MakeTotals = Callable[[Sequence[nn.Parameter], Directions], Totals]
