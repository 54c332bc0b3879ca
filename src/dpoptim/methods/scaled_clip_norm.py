"""Gradients scaled tensor by tensor before they are clipped, by private second moments.

Clipping and noise treat all directions alike, but tensors of a model do not have gradients of one
size: noise that is small for one drowns another. Scaled by S first and unscaled when the noise is
in, tensor p has noise of C / s_p (Li et al. 2022, "Private adaptive optimization with side
information", AdaDPS; Li et al. 2023, DP2).

Each step releases gradients and their second moments together: the vector ``(sqrt(1 - a) S g / C,
sqrt(a) h)``, ``h_p = s_p^2 |g_p|^2 / C^2`` of a clipped gradient g, one number a tensor. As ``|h|
<= sum_p h_p = |S g|^2 / C^2 <= 1``, it has norm at most 1 for every S and C, so the run costs what
it costs with a fixed clip norm.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpoptim.arguments import positive_number, proportion, whole_number
from dpoptim.assumptions import Assumption, enforced
from dpoptim.clipping import Clipping, ClippingRule
from dpoptim.gradients.arithmetic.products import COMMON_FACTOR_ERROR
from dpoptim.methods.sensitive_state import AdaptiveClipNorm, Peers
from dpoptim.opacus_words import KnowsOpacus
from dpoptim.scaled_clipping import ScaledClipping

MOST = 16.0  # the largest scale over the smallest
# How fast h moves with the logarithms of norms, and of the taper: 4, and less than 1.
SLOPE = 5.0


@dataclass(frozen=True)
class ScaledClipNorm(KnowsOpacus):
    """A clip norm for gradients that are scaled tensor by tensor, by their second moments.

    The moments are released all along, in the run's budget. Every ``every`` steps, v_p becomes the
    mean square of the entries of tensor p in clipped gradients so far; scales ``v_p^-power`` then
    hold until the next time, all times one factor that leaves the length of a step's noise as it
    is. The noise is dealt out anew: less to tensors with small gradients. The optimizer sees
    gradients in their own units.

    Args:
        norm: C, the clip norm of the scaled gradients; > 0.
        every: steps from one choice of scales to the next; >= 1. The first ones have scale 1.
        power: > 0. 1/4 makes the noise shortest for given moments of clipped gradients, for SGD;
            1/2 makes it proportional to their roots, for optimizers that divide by them (Adam).
        share: of the run's budget (of the square of mu) that the moments take, in (0, 1).

    Examples:
        >>> import dpoptim
        >>> method = dpoptim.DPSGD(clip_norm=dpoptim.ScaledClipNorm(1.0))
    """

    norm: float
    every: int = 10
    power: float = 0.25
    share: float = 0.02

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", positive_number("norm", self.norm))
        object.__setattr__(self, "every", whole_number("every", self.every, least=1))
        object.__setattr__(self, "power", positive_number("power", self.power))
        object.__setattr__(self, "share", proportion("share", self.share))
        _ = Clipping(self.norm)  # validates

    @property
    def start(self) -> float:
        return self.norm

    def begin(
        self,
        rule_of: Callable[[float], ClippingRule],
        *,
        batch_size: int,
        steps: int,
        capacity: int,
    ) -> "PrivateScales":
        return PrivateScales(self, rule_of(self.norm), capacity)

    def refuse_if_drowned(self, *, batch_size: int, steps: int, deviation: float) -> None:
        if self.every >= steps:
            raise ValueError(
                f"every={self.every} leaves no step of the {steps} to scale: the first ones only "
                "measure. Fix: a smaller every, or a plain clip norm."
            )

    def assumption(self) -> Assumption:
        return enforced(
            "gradients are scaled before they are clipped, by noisy second moments that each step "
            "releases, which the guarantee covers"
        )


class PrivateScales(AdaptiveClipNorm):
    """One run's scales. Public, but for what it has observed since the last step.

    **Guarantee.** The scales of a step are functions of what was released before. What `query`
    returns moves by at most 1 with one record that moves the scaled sums by at most 1
    (`scaled_clipping`): the record's part is the vector above. Under a mean all norms are rounded
    together, see `products`; what the others' moments may move by that is taken off each.
    """

    def __init__(self, settings: ScaledClipNorm, rule: ClippingRule, capacity: int) -> None:
        self._settings, self._plain = settings, rule
        self._shrunk = 1 / (1 + SLOPE * capacity * COMMON_FACTOR_ERROR)
        self._total: Callable[[Tensor], Tensor] = lambda local: local
        self._known: Callable[[Tensor, Tensor], Tensor] = lambda released, like: released
        self.rule: ClippingRule = rule
        self.share_below = math.nan
        self._done = 0

    def meet(self, peers: Peers) -> None:
        self._total, self._known = peers.total, peers.known

    def see(
        self,
        entries: Sequence[int],
        views: Callable[[list[Tensor]], list[Tensor]],
        deviation: Callable[[int], float],
    ) -> None:
        if math.isnan(deviation(0)):
            raise ValueError(
                "ScaledClipNorm compares moments with their noise, which this noise does not tell. "
                "Fix: noise='best' or 'independent', or a plain clip norm."
            )
        self._entries, self._views, self._deviation = entries, views, deviation
        self._moments = [0.0] * len(entries)  # of clipped gradients over C, added up; noisy
        self._doubts = [0.0] * len(entries)  # their variances
        self._choose([1.0] * len(entries))
        self.forget()

    def _choose(self, scales: Sequence[float]) -> None:
        self._scales = tuple(scales)
        self.rule = ScaledClipping(self._plain, self._scales)

    @property
    def gain(self) -> float:
        return self.rule.norm / math.sqrt(1 - self._settings.share)

    @property
    def shares(self) -> Sequence[float]:
        return [1 / scale for scale in self._scales]

    def observe(
        self,
        squared_norms: Tensor,
        tapers: Tensor | None = None,
        of_units: Mapping[str, Tensor] | None = None,
    ) -> None:
        assert of_units is not None
        parts = torch.zeros(len(self._entries), len(squared_norms), dtype=torch.float64)
        for tensor, squared in of_units.items():
            parts[int(tensor)] = squared.to("cpu", torch.float64) * self._scales[int(tensor)] ** 2
        of_each = parts / parts.sum(0).clamp(min=self.rule.norm**2)
        if tapers is not None:  # what counts less in the sum counts less here
            of_each = of_each * tapers.to("cpu", torch.float64)
        # records that are not finite are in no sum
        counted = of_each.isfinite().all(0) & parts.isfinite().all(0)
        self._observed += torch.where(counted, of_each, 0.0).sum(1) * self._shrunk

    def forget(self) -> None:
        self._observed = torch.zeros(len(self._entries), dtype=torch.float64, device="cpu")

    def scaled(self, sums: list[list[Tensor]]) -> list[list[Tensor]]:
        for each in sums:
            for view, scale in zip(self._views(each), self._scales, strict=True):
                view.mul_(scale / self.rule.norm)
        return sums

    def query(self, sums: list[Tensor]) -> list[Tensor]:
        kept, spent = math.sqrt(1 - self._settings.share), math.sqrt(self._settings.share)
        return [*(total.mul_(kept) for total in sums), self._total(self._observed * spent)]

    def answer(self, released: list[Tensor]) -> list[Tensor]:
        *sums, moments = released
        spent = math.sqrt(self._settings.share)
        doubt = self._deviation(self._done) / spent
        found = (self._known(moments, self._observed) / (spent * self._shrunk)).tolist()
        for place, (moment, scale) in enumerate(zip(found, self._scales, strict=True)):
            self._moments[place] += moment / scale**2
            self._doubts[place] += (doubt / scale**2) ** 2
        for view, share in zip(self._views(sums), self.shares, strict=True):
            view.mul_(self.gain * share)
        self.forget()
        self._done += 1
        if self._done % self._settings.every == 0:
            self._choose(
                scales_of(self._moments, self._doubts, self._entries, self._settings.power)
            )
        return sums

    def state(self) -> dict[str, Any]:
        return {
            "done": self._done,
            "scales": list(self._scales),
            "moments": list(self._moments),
            "doubts": list(self._doubts),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._done, self._moments = state["done"], list(state["moments"])
        self._doubts = list(state["doubts"])
        self._choose(state["scales"])


def scales_of(
    moments: Sequence[float], doubts: Sequence[float], entries: Sequence[int], power: float
) -> list[float]:
    """Return the scale of each tensor; the length of a step's noise stays as with 1 for all.

    Args:
        moments: squared length of each tensor's gradients, up to one factor; noisy.
        doubts: their variances. entries: of each tensor.
        power: of the moments of single entries.
    """
    noise = [math.sqrt(doubt) for doubt in doubts]
    # What does not stand out of the noise counts for nothing, and noise for the same in each entry:
    # tensors of which nothing is known have the scale of one another.
    even = sum(noise) / sum(entries)
    seen = [
        max(moment - 2 * of_noise, 0.0) / d + even
        for moment, of_noise, d in zip(moments, noise, entries, strict=True)
    ]
    largest = max(seen)
    if not 0 < largest < math.inf:
        return [1.0] * len(entries)
    raw = [min((moment / largest) ** -power, MOST) if moment > 0 else MOST for moment in seen]
    length = math.sqrt(
        sum(d / scale**2 for d, scale in zip(entries, raw, strict=True)) / sum(entries)
    )
    return [scale * length for scale in raw]
