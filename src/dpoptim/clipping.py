"""From the norm of each record's gradient to the factor that bounds it.

Styles, all with the same bound C on what one record may add to the sum:

* ``flat``: g min(1, C / |g|) (Abadi et al. 2016; Das et al. Alg. 1, Fang et al. Alg. 1, Zhang et al. Alg. 1);
* ``automatic``: C g / (|g| + gamma), gamma = 0.01 (Bu et al. 2023).
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from dpoptim.gradients.contributions import Norms
from dpoptim.gradients.products import CANCELLATION_LIMIT

Style = Literal["flat", "automatic"]
AUTOMATIC_GAMMA = 0.01
SMALLEST_FACTOR = 1e-30  # below it a factor counts as zero: float32 could not hold it to full precision


@dataclass(frozen=True)
class Clipping:
    """How each record's gradient is bounded.

    Args:
        norm: C, the largest Euclidean norm that one record may add to the sum; > 0 (``inf``: no clipping, no privacy).
        style: ``"flat"`` or ``"automatic"``.
    """

    norm: float
    style: Style = "flat"

    def __post_init__(self) -> None:
        if isinstance(self.norm, bool) or not isinstance(self.norm, int | float) or not self.norm > 0:
            raise ValueError(f"clip_norm must be a number above 0, got {self.norm!r}; 1.0 is a common start.")
        if self.style not in get_args(Style):
            raise ValueError(f"clipping must be one of {', '.join(map(repr, get_args(Style)))}, got {self.style!r}.")
        if self.style == "automatic" and math.isinf(self.norm):
            raise ValueError("clipping='automatic' scales every gradient to clip_norm, so clip_norm must be finite.")

    def factors(self, norms: Norms, *, margin: float, inflation: float) -> Tensor:
        """The factor of each record: float64, shape (B,), zero for records whose norm is not finite.

        Args:
            norms: squared norms and squared masses, each a bound from above but for a relative ``inflation``.
            margin: share of C left to the rounding of the sum (`products.margin`).
            inflation: relative error of the squared norms themselves.

        **Guarantee.** For every record, ``factor * |g| <= C (1 - margin)`` and ``factor * mass <= 32 C``: the two
        conditions of the theorem in `products`. The factor depends on that record's norms alone.
        """
        norm = (norms.squared * (1 + inflation)).sqrt()
        mass = (norms.mass_squared * (1 + inflation)).sqrt()
        bound = self.norm * (1 - margin)
        factor = (bound / norm).clamp(max=1.0) if self.style == "flat" else bound / (norm + AUTOMATIC_GAMMA)
        factor = torch.minimum(factor, CANCELLATION_LIMIT * self.norm / mass)
        if math.isfinite(self.norm):
            factor = factor * (1 - 2.0**-22)  # rounding the factor to float32 must not raise it
        countable = torch.isfinite(norm) & torch.isfinite(mass) & (factor >= SMALLEST_FACTOR)
        return torch.where(countable, factor, torch.zeros_like(factor))
