"""From the norm of each record's gradient to the factor that bounds it.

Styles, all with the same bound C on what one record may add to the sum:

* ``flat``: g min(1, C / |g|) (Abadi et al. 2016; Das et al. Alg. 1, Fang et al. Alg. 1, Zhang et
  al. Alg. 1);
* ``automatic``: C g / (|g| + gamma), gamma = 0.01 (Bu et al. 2023);
* ``per-layer``: the part of each of the L layers by itself, flat, to C / sqrt(L) (McMahan et al.
  2018);
* groups, {"encoder": 1, "": 3}: the layers below the module "encoder" together, and all others
  together, flat, to bounds in this proportion whose squares add up to C^2.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from dpoptim.arguments import one_of, positive_number
from dpoptim.runtime import compiled

Style = Literal["flat", "automatic", "per-layer"]
# modules, by name, "" for the whole model, and the proportion of the bounds on their layers
Groups = tuple[tuple[str, float], ...]
AUTOMATIC_GAMMA = 0.01
# below it a factor counts as zero: float32 could not hold it to full precision
SMALLEST_FACTOR = 1e-30
# below it the scaled gradients come near float32's subnormal numbers, which round coarsely
SMALLEST_NORM = 1e-6
# relative error of a squared norm: a float64 sum of up to 2^29 non-negative terms
NORM_INFLATION = 2.0**-24
ROUNDED_DOWN = 1 - 2.0**-40  # of shares, so that their squares add up to no more than 1


# Proportions (c_1, ..., c_k) of a record's factors for k sums, at least one of them; c_1 is 1.
# Public. One product serves all records of a direction, so what many have is worth naming.
Directions = tuple[tuple[float, ...], ...]


# A rule as compiled functions read it: what squared norms are raised by, the bound, gamma, the
# largest factor, and that up to which factors are zero.
InC = tuple[float, float, float, float, float]


class ClippingRule(Protocol):
    """The engine's treatment of each record's gradient."""

    @property
    def norm(self) -> float:
        """The largest norm that one record may add to the (first) sum."""
        ...

    @property
    def directions(self) -> "Directions":
        """How many sums a record adds to, and in which proportions many records do."""
        ...

    def units(self, layers: Sequence[str]) -> "Units":
        """Parameters that are clipped together, by which rule, all within this one's bounds.

        Args:
            layers: that the parameters belong to, one for each of them.
        """
        ...

    def factors(self, squared_norms: Tensor, margin: float) -> Tensor:
        """The factors of each record: float64, (B,), or (k, B) for k sums; zero: not counted."""
        ...


@dataclass(frozen=True)
class Units:
    """Parameters that are clipped together.

    Attributes:
        rules: of the part of a record's gradient in each unit.
        of: the unit of each parameter.
    """

    rules: Mapping[str, ClippingRule]
    of: Sequence[str]

    def factors(self, squared_norms: Mapping[str, Tensor], margin: float) -> dict[str, Tensor]:
        """Return the factors of each record in each unit, (k, B), by the unit's own norm.

        Args:
            squared_norms: of what each unit has of the records' gradients, float64, (B,).
            margin: see `ClippingRule.factors`.
        """
        return {
            unit: self.rules[unit].factors(each, margin).view(-1, each.shape[0])
            for unit, each in squared_norms.items()
        }

    def in_c(self, margin: float) -> dict[str, InC] | None:
        """The rules as compiled functions read them; None where one clips in a way of its own.

        A class that is derived from `Clipping` or from this one may do so.

        Args:
            margin: see `ClippingRule.factors`.
        """
        if type(self) is not Units:
            return None
        usual = {unit: rule for unit, rule in self.rules.items() if type(rule) is Clipping}
        if len(usual) < len(self.rules):
            return None
        return {unit: rule.in_c(margin) for unit, rule in usual.items()}

    @classmethod
    def one(cls, rule: ClippingRule, layers: Sequence[str]) -> "Units":
        """Return all parameters in one unit."""
        return cls({"": rule}, ("",) * len(layers))

    @classmethod
    def same_rule(cls, rule: ClippingRule, layers: Sequence[str]) -> "Units":
        """Return each layer in a unit of its own, all by this rule."""
        return cls(dict.fromkeys(layers, rule), layers)


@dataclass(frozen=True)
class Clipping:
    """How each record's gradient is bounded.

    Args:
        norm: C, the largest Euclidean norm that one record may add to the sum; at least 1e-6
            (``inf``: no clipping, no privacy).
        style: ``"flat"``, ``"automatic"``, ``"per-layer"`` or groups.
    """

    norm: float
    style: Style | Groups = "flat"

    def __post_init__(self) -> None:
        given: object = self.norm
        if isinstance(given, bool) or not isinstance(given, Real) or not float(given) > 0:
            raise ValueError(
                f"clip_norm must be a number above 0, got {self.norm!r}; 1.0 is a common start."
            )
        if self.norm < SMALLEST_NORM:
            raise ValueError(
                f"clip_norm must be at least {SMALLEST_NORM:g}, got {self.norm!r}; scale the loss "
                "instead."
            )
        object.__setattr__(self, "style", style_of(self.style))
        if self.style == "automatic" and math.isinf(self.norm):
            raise ValueError(
                "clipping='automatic' scales every gradient to clip_norm, so clip_norm must be "
                "finite."
            )

    @property
    def directions(self) -> Directions:
        return ((1.0,),)

    def units(self, layers: Sequence[str]) -> Units:
        """All parameters; or layers, or groups of layers, whose squared bounds add up to C^2.

        Raises:
            ValueError: groups that leave a layer out, or have none.
        """
        if self.style == "per-layer":
            return Units.same_rule(Clipping(self.norm * share_of_layer(layers)), layers)
        if isinstance(self.style, str):
            return Units.one(self, layers)
        of = [group_of(layer, self.style) for layer in layers]
        if idle := [name for name, _ in self.style if name not in of]:
            raise ValueError(
                f"clipping names {idle[0]!r}, below which no layer is trained that no other group "
                "names. Fix: names as in model.named_modules()."
            )
        whole = math.hypot(*(weight for _, weight in self.style)) / ROUNDED_DOWN
        return Units({name: Clipping(self.norm * (w / whole)) for name, w in self.style}, of)

    def factors(self, squared_norms: Tensor, margin: float) -> Tensor:
        """The factor of each record: float64, (B,), zero where the norm is not finite.

        Args:
            squared_norms: float64, shape (B,).
            margin: share of C left to the rounding of the sum (`products.margin`).

        **Guarantee.** For every record, ``factor * norm <= C (1 - margin)``, also after the factor
        is rounded to float32. The factor depends on that record's norm alone.
        """
        in_c = self.in_c(margin)
        if (factors := compiled_factors(squared_norms, in_c)) is not None:
            return factors
        _, bound, _, most, _ = in_c
        if self.style == "automatic":
            norm = (squared_norms * (1 + NORM_INFLATION)).sqrt_().add_(AUTOMATIC_GAMMA)
            factor = norm.reciprocal_().mul_(bound)
        else:
            inflated = squared_norms * ((1 + NORM_INFLATION) / (bound * bound))
            factor = inflated.rsqrt_().clamp_(max=most)
        # NaN where the norm is
        return torch.threshold_(factor.nan_to_num_(nan=0.0), SMALLEST_FACTOR, 0.0)

    def in_c(self, margin: float) -> InC:
        """Return what compiled functions find the factors from; see `factors`."""
        # rounding a factor to float32 must not raise it
        most = 1 - 2.0**-22 if math.isfinite(self.norm) else 1.0
        bound = self.norm * (1 - margin) * most
        if self.style == "automatic":  # and without a largest factor: gamma bounds it
            return 1 + NORM_INFLATION, bound, AUTOMATIC_GAMMA, math.inf, SMALLEST_FACTOR
        return 1 + NORM_INFLATION, bound, 0.0, most, SMALLEST_FACTOR


@cache
def compiled_function() -> Callable[..., None] | None:
    """The function of `clipping.c`; None without a library of compiled functions."""
    return compiled.function(
        "dpoptim_clip_factors", compiled.WHOLE, compiled.PLACE, *[compiled.REAL] * 5, compiled.PLACE
    )


def compiled_factors(squared_norms: Tensor, rule: InC) -> Tensor | None:
    """`Clipping.factors` by a compiled function, to rounding; None where none serves."""
    usual = squared_norms.is_cpu and squared_norms.dtype == torch.float64
    run = compiled_function()
    if run is None or not usual or not squared_norms.is_contiguous():
        return None
    factors = torch.empty_like(squared_norms)
    run(squared_norms.numel(), squared_norms.data_ptr(), *rule, factors.data_ptr())
    return factors


def share_of_layer(layers: Sequence[str]) -> float:
    """Return each layer's share of a bound: their squares add up to 1, rounding included."""
    return ROUNDED_DOWN / math.sqrt(len(set(layers)))


def style_of(given: object) -> Style | Groups:
    """Return how a bound is kept, as `Clipping` has it: groups may be a mapping or JSON's lists.

    Raises:
        ValueError, TypeError: neither a style nor groups of positive numbers.
    """
    if isinstance(given, str) or not isinstance(given, Mapping | Sequence) or not given:
        one_of("clipping", given, get_args(Style))
        return given  # type: ignore[return-value]
    groups: dict[str, float] = dict(given)
    return tuple((str(name), positive_number("clipping", w)) for name, w in groups.items())


def group_of(layer: str, groups: Groups) -> str:
    """Return the group of a layer: of those that hold it, the one with the longest name.

    Raises:
        ValueError: there is none.
    """
    holding = [name for name, _ in groups if name == "" or f"{layer}.".startswith(f"{name}.")]
    if not holding:
        raise ValueError(
            f"clipping has no group for the layer {layer!r}. Fix: name it, or add '' for all other "
            "layers."
        )
    return max(holding, key=len)


# times the margin of one sum, at least the square root of 2: see `SplitClipping.factors`
SPLIT_MARGIN = 1.415


@dataclass(frozen=True)
class SplitClipping:
    """A record in two sums: clipped to C1, and what that takes off it when clipped to R.

    Args:
        norm: C1.
        residual_clip: R, equal to C1 or at least a thousandth above it; ``inf`` leaves the
            gradient as it is, and bounds nothing.
        style: ``"flat"``; ``"automatic"``: the gradient is first scaled to R g / (|g| + gamma); or
            ``"per-layer"``: the part of each of the L layers by itself, flat, to C1 / sqrt(L) and
            R / sqrt(L).
    """

    norm: float
    residual_clip: float
    style: Style = "flat"

    def __post_init__(self) -> None:
        one_of("clipping", self.style, get_args(Style))
        _ = Clipping(self.norm), Clipping(self.residual_clip, self.style)
        if self.residual_clip < self.norm:
            raise ValueError(
                f"residual_clip={self.residual_clip!r} must be at least clip_norm={self.norm!r}."
            )
        rest = self.residual_clip - self.norm
        # the difference of two factors would be mostly rounding
        if 0 < rest < max(self.norm / 1000, SMALLEST_NORM):
            raise ValueError(
                f"residual_clip={self.residual_clip!r} is too close to clip_norm={self.norm!r}; "
                "make them equal (nothing is fed back), or residual_clip larger, such as "
                f"{2 * self.norm:g}."
            )

    def units(self, layers: Sequence[str]) -> Units:
        """All parameters; by ``"per-layer"`` each layer, with its share of both bounds."""
        if self.style != "per-layer":
            return Units.one(self, layers)
        share = share_of_layer(layers)
        return Units.same_rule(SplitClipping(self.norm * share, self.residual_clip * share), layers)

    @property
    def directions(self) -> Directions:
        """Directions: no residual if unclipped; a fixed proportion if clipped to R."""
        rest = self.residual_clip - self.norm
        return ((1.0, 0.0), (1.0, rest / self.norm)) if 0 < rest < math.inf else ((1.0, 0.0),)

    def factors(self, squared_norms: Tensor, margin: float) -> Tensor:
        """The factors of each record for two sums: float64, (2, B), zero for norms not finite.

        **Guarantee.** For every record, the first factor times its norm is at most ``C1 (1 - s)``,
        the second at most ``(R - C1) (1 - s)``, s = 1.415 margin, also after rounding to float32.
        They depend on that record's norm alone. So by the theorem of `products` one record moves
        the two sums by p and q with ``|p| <= C1`` and ``|q| <= R - C1``, rounding included. And
        ``<p, u> + <q, v> <= max(C1, R - C1) |u + v|`` for all vectors with ``<u, v> >= 0``: but
        for rounding because the two parts are parallel; rounding adds at most ``margin (C1 |u| +
        (R - C1) |v|)``, which is why s is that much larger.
        """
        margin *= SPLIT_MARGIN
        whole = Clipping(self.residual_clip, self.style).factors(squared_norms, margin)
        if self.residual_clip == self.norm:
            return torch.stack([whole, torch.zeros_like(whole)])  # not rounding: nothing bounds it
        norm = (squared_norms * (1 + NORM_INFLATION)).sqrt()
        # What is clipped to C1 is the scaled gradient: a short one was made longer by "automatic".
        kept = torch.minimum(whole, self.norm * (1 - margin) * (1 - 2.0**-22) / norm)
        kept = torch.where(kept >= SMALLEST_FACTOR, kept, 0.0)
        return torch.stack([kept, torch.where(kept > 0, whole - kept, 0.0)])
