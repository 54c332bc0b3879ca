"""From all norms of a pass to the factors that its records are weighted with."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dpoptim.clipping import Units
from dpoptim.gradients.norms import taper


def clip_factors(
    units: Units,
    margin: float,
    squared: Mapping[str, Tensor],
    longest: Tensor | None,
) -> tuple[dict[str, Tensor], Tensor | None]:
    """The factors for each unit: shape (number of sums, B). And what they were multiplied with so
    that huge gradients fade out, float64 of shape (B,), if anything: see `taper`.

    A record's factors are zero for all units or for none.

    Args:
        margin: share of the bound that is left to rounding.
        squared: the squared norms of the records' gradients in each unit, (B,).
        longest: the squared length of each record's longest factor, (B,), where huge gradients
            fade.
    """
    factors = {
        unit: units.rules[unit].factors(each, margin).view(-1, each.shape[0])
        for unit, each in squared.items()
    }
    if len(factors) > 1:
        countable = torch.stack([each[0] > 0 for each in factors.values()]).all(0)
        factors = {unit: torch.where(countable, each, 0.0) for unit, each in factors.items()}
    if longest is None:
        return factors, None
    whole = torch.stack(list(squared.values())).sum(0)
    tapers = taper(torch.maximum(whole, longest)).nan_to_num(nan=0.0)
    return {unit: each * tapers for unit, each in factors.items()}, tapers
