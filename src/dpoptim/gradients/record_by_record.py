"""Layers whose gradients are formed for one record after the other: measured, weighted and summed before the next one's.

Clipping needs the norm of a record's whole gradient before it can add the first number of it. To form all gradients and
keep them takes memory for every record, mostly fresh pages; to claim their norms first (`positions`) takes arithmetic. The
gradients of a single record take neither, and mostly stay in cache.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dpoptim.gradients.contributions import all_groups
from dpoptim.gradients.norms import LONG_BLOCK, row_squared_norms
from dpoptim.gradients.products import GROUP_ROWS, Groups, Sums


class Alone(Protocol):
    """Gradients that can be formed for one record after the other."""

    @property
    def entries(self) -> int:
        """Of the parameter."""
        ...

    def one_by_one(self, out: Tensor) -> Callable[[int], None]:
        """Returns what forms the gradient of one record in ``out``, (1, entries), float32, on a 64-byte boundary."""
        ...


Weigh = Callable[[int, Mapping[str, Tensor]], Mapping[str, Tensor]]


def add_record_by_record(
    layers: Mapping[int, Alone],
    units: Mapping[int, str],
    sums: Sequence[Sums],
    groups: Groups,
    block: int,
    weigh: Weigh,
) -> None:
    """Add the weighted sums of these layers' gradients to ``sums``.

    Args:
        layers: by the places of their parameters; float32, on one device.
        units: what each parameter is clipped with, by the same places.
        sums: of all parameters, by place.
        groups: as for all contributions: the records of one are added up in float32, in float64 if there are too many.
        block: of `row_squared_norms`.
        weigh: maps a record and the squared norms of its gradients in each unit, float64 of shape (1,), to its weights in
            each unit, float64 of shape (k, 1), one for each sum; zero where it does not count.

    **Guarantee.** What is formed, measured and weighed of a record is a function of its own rows, to the last bit, whoever
    else is in the batch and whatever other layers run in the pass: conditions 2 to 4 of the theorem in `products`.
    """
    parameters, wholes, entries = side_by_side(layers, units)
    first = next(iter(layers))
    row = torch.zeros(1, entries, dtype=torch.float32, device=sums[first].totals[0].device)  # also between the layers
    formed = [layer.one_by_one(row[:, parameters[place]]) for place, layer in layers.items()]
    for group in all_groups(groups):
        if group.stop == group.start:
            continue
        dtype = torch.float64 if group.stop - group.start > GROUP_ROWS else row.dtype
        of_group = row.new_zeros(len(sums[first].totals), entries, dtype=dtype)
        for record in range(group.start, group.stop):
            for form in formed:
                form(record)
            squared = {unit: row_squared_norms(row[:, span], block=block) for unit, span in wholes.items()}
            weights = weigh(record, squared)
            for unit, span in wholes.items():
                for total, weight in zip(of_group, weights[unit][:, 0].tolist(), strict=True):
                    if weight != 0:  # what does not count may be anything
                        total[span].add_(row[0, span], alpha=weight)
        for place, span in parameters.items():
            sums[place].add(of_group[:, span])


def side_by_side(layers: Mapping[int, Alone], units: Mapping[int, str]) -> tuple[dict[int, slice], dict[str, slice], int]:
    """Where each parameter and each unit lies in a row of float32, and how long the row is.

    Those of a unit lie one after the other. Each starts with a block of `row_squared_norms`, for whatever other layers run
    in a pass, perhaps for the sake of one record: what others measure must not change.
    """
    step = LONG_BLOCK
    parameters: dict[int, slice] = {}
    wholes: dict[str, slice] = {}
    end = 0
    for place in sorted(layers, key=lambda place: units[place]):
        start = wholes[units[place]].start if units[place] in wholes else end
        parameters[place] = slice(end, end + layers[place].entries)
        end += -(-layers[place].entries // step) * step
        wholes[units[place]] = slice(start, end)
    return parameters, wholes, end
