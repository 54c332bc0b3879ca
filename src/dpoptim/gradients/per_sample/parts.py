"""Gradients that are formed a part at a time, measured or summed at once, and forgotten."""

from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor

from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic.products import GROUP_ROWS, Groups, slices
from dpoptim.gradients.choose_formula import MEMORY_CAP

CACHE_BLOCK = 1 << 20  # elements of temporaries that are made and used at once: they stay in cache


def flat_view(x: Tensor) -> Tensor:
    """(B, p, d) as (B, p d), in place: the records' strides stay."""
    return x.as_strided((len(x), x.shape[1] * x.shape[2]), (x.stride(0), 1), x.storage_offset())


def all_groups(groups: Groups) -> Iterator[slice]:
    return chain.from_iterable(slices(groups))


def records_at_once(elements_per_record: int, most: int = CACHE_BLOCK) -> int:
    """Records of a part, but for the last ones of a group."""
    return max(1, most // max(1, elements_per_record))


def most_at_once(device: torch.device) -> int:
    """Elements that are best formed at once: what stays in cache, or what an accelerator holds."""
    return CACHE_BLOCK if device.type == "cpu" else MEMORY_CAP


def parts_of(group: slice, elements_per_record: int, most: int = CACHE_BLOCK) -> Iterator[slice]:
    """Records of a group that are formed at once, one at least."""
    size = records_at_once(elements_per_record, most)
    for start in range(group.start, group.stop, size):
        yield slice(start, min(start + size, group.stop))


def add_group(
    sums: Sums,
    group: slice,
    parts: Iterator[slice],
    formed: Callable[[slice], tuple[Tensor, Tensor]],
) -> None:
    """Add one group's weighted sums: see `sum_of_group`."""
    of_group = sum_of_group(group, parts, formed)
    if of_group is not None:
        sums.add(of_group)


def sum_of_group(
    group: slice, parts: Iterator[slice], formed: Callable[[slice], tuple[Tensor, Tensor]]
) -> Tensor | None:
    """One group's weighted sums, part by part: in float32 (see `products`), or float64 if large.

    Args:
        formed: maps a slice of records to their gradients, shape (b, entries), and weights,
            float64 of shape (k, b).

    Returns:
        Shape (k, entries); None for a group of no records.
    """
    of_group: Tensor | None = None
    for part in parts:
        values, weights = formed(part)
        if group.stop - group.start > GROUP_ROWS:
            values = values.double()
        rows, factors = values.T, weights.to(values.dtype)
        first = of_group is None
        of_group = values.new_empty(len(weights), values.shape[1]) if of_group is None else of_group
        for each, out in zip(factors, of_group, strict=True):
            if first:
                torch.mv(rows, each, out=out)
            else:
                out.addmv_(rows, each)
    return of_group
