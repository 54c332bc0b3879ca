"""Layers whose gradients are formed for one record after the other: measured, weighted and summed
before the next one's.

Clipping needs the norm of a record's whole gradient before it can add the first number of it. To
form all gradients and keep them takes memory for every record, mostly fresh pages; to claim their
norms first (`positions`) takes arithmetic. The gradients of a single record take neither, and
mostly stay in cache; of small models, those of a few.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dpoptim.gradients.norms import squared_norm_of_parts
from dpoptim.gradients.parts import all_groups, parts_of
from dpoptim.gradients.per_sample_grads import OneByOne
from dpoptim.gradients.products import GROUP_ROWS, Groups
from dpoptim.gradients.sums import Sums

Weigh = Callable[[slice, Mapping[str, Tensor]], Mapping[str, Tensor]]


def add_record_by_record(
    layers: Mapping[int, OneByOne],
    units: Sequence[str],
    sums: Sequence[Sums],
    groups: Groups,
    block: int,
    weigh: Weigh,
) -> None:
    """Add the weighted sums of these layers' gradients to ``sums``.

    Args:
        layers: by the places of their parameters; float32, on one device.
        units, sums: of all parameters, by place: what they are clipped with, and what is added
            to.
        groups: as for all per_sample_grads: the records of one are added up in float32, in float64
            if there are too many.
        block: of `row_squared_norms`.
        weigh: maps some records and the squared norms of their gradients in each unit, float64 of
            shape (b,), to their weights in each unit, float64 of shape (k, b), one for each sum;
            zero where a record does not count.

    **Guarantee.** What is formed, measured and weighed of a record is a function of its own rows,
    to the last bit, whoever else is in the batch: conditions 2 to 4 of the theorem in `products`.
    Other layers that run in the pass without adding to the record change its norm by the rounding
    of float64 sums.
    """
    forms = {place: layer.one_by_one() for place, layer in layers.items()}
    entries = sum(len(sums[place].totals[0]) for place in layers)
    for group in all_groups(groups):
        if group.stop == group.start:
            continue
        dtype = torch.float64 if group.stop - group.start > GROUP_ROWS else torch.float32
        of_group = {place: room(sums[place], dtype) for place in layers}
        for part in parts_of(group, entries):
            add_part(of_group, forms, units, part, block, weigh)
        for place, layer in layers.items():
            sums[place].add(layer.in_order(of_group.pop(place)))


def add_part(
    of_group: Mapping[int, Tensor],
    forms: Mapping[int, Callable[[int], Tensor]],
    units: Sequence[str],
    part: slice,
    block: int,
    weigh: Weigh,
) -> None:
    """Form the gradients of a few records, and add them to those of the group."""
    formed = [
        {place: form(record) for place, form in forms.items()}
        for record in range(part.start, part.stop)
    ]
    weights = {
        unit: each.T.tolist() for unit, each in weigh(part, measured(formed, units, block)).items()
    }
    for i, gradients in enumerate(formed):
        for place, gradient in gradients.items():
            for total, weight in zip(of_group[place], weights[units[place]][i], strict=True):
                if weight != 0:  # what does not count may be anything
                    total.add_(gradient, alpha=weight)


def measured(
    formed: Sequence[Mapping[int, Tensor]], units: Sequence[str], block: int
) -> dict[str, Tensor]:
    """The squared norms of some records' gradients in each unit: float64, (b,)."""
    of_unit: dict[str, list[int]] = {}
    for place in formed[0]:
        of_unit.setdefault(units[place], []).append(place)
    return {
        unit: torch.cat(
            [
                squared_norm_of_parts([each[place] for place in places], block=block)
                for each in formed
            ]
        )
        for unit, places in of_unit.items()
    }


def room(sums: Sums, dtype: torch.dtype) -> Tensor:
    """Zeros to add up a term of each sum in, (k, entries)."""
    return torch.zeros(
        len(sums.totals), len(sums.totals[0]), dtype=dtype, device=sums.totals[0].device
    )
