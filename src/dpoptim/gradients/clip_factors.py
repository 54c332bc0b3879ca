"""From all norms of a pass to the factors that its records are weighted with."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dpoptim.clipping import ClippingRule
from dpoptim.gradients.norms import taper


def clip_factors(
    rule: ClippingRule,
    layers: int,
    margin: float,
    squared: Mapping[str, Tensor],
    longest: Tensor | None,
) -> tuple[dict[str, Tensor], Tensor | None]:
    """The factors for each part of the model that is clipped by itself: shape (number of sums, B).
    And what they were multiplied with so that huge gradients fade out, float64 of shape (B,), if
    anything: see `taper`.

    A record's factors are zero for all parts or for none.

    Args:
        layers: of the model, among which "per-layer" shares the bound out.
        margin: share of the bound that is left to rounding.
        squared: the squared norms of each part's gradients, (B,).
        longest: the squared length of each record's longest factor, (B,), where huge gradients
            fade.
    """
    if rule.per_layer:
        rule = rule.of_one_layer(layers)
    factors = {
        part: rule.factors(each, margin).view(-1, len(each)) for part, each in squared.items()
    }
    if len(factors) > 1:
        countable = torch.stack([each[0] > 0 for each in factors.values()]).all(0)
        factors = {part: torch.where(countable, each, 0.0) for part, each in factors.items()}
    if longest is None:
        return factors, None
    whole = torch.stack(list(squared.values())).sum(0)
    tapers = taper(torch.maximum(whole, longest)).nan_to_num(nan=0.0)
    return {part: each * tapers for part, each in factors.items()}, tapers
