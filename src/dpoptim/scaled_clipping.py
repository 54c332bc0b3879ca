"""Clipping by the norm of scaled gradients: a public scale for each parameter tensor.

The record's gradient g is clipped as S g, S a diagonal matrix with one entry s_p > 0 for all of
tensor p: its factor c bounds ``c |S g|``. The engine adds up c g; whoever takes the sum multiplies
tensor p by s_p, so that a record moves what is released by at most the bound, and divides it by s_p
once the noise is in it: little noise where s_p is large.

**Guarantee.** Multiplied so, the sums of the theorem in `products` differ by at most the
rule's norm, rounding included, for every S that does not depend on the step's records. *Proof.* The
theorem bounds the rounding of each entry of a group's sum by gamma times the sum of the absolute
values of its terms, c_i G_i. Multiplied by S, entry by entry, both are those of c_i S G_i, of norm
at most ``C (1 - margin)``, so every bound of the proof holds for them; multiplying a float64 sum
rounds to 2^-53, as dividing it by a clip norm does.

Scales of single entries would do as well, but norms of products of activations and output gradients
(ghost norms) are not known entry by entry; those of tensors are, by every layer rule.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from dpoptim.clipping import ClippingRule, Directions, Units
from dpoptim.errors import PrivacyError


@dataclass(frozen=True)
class ScaledUnits(Units):
    """Tensors measured apart, and clipped together by the norm of the scaled gradient.

    Attributes:
        inside: what is clipped together, by which rule.
        scales: of each tensor; public.
    """

    inside: Units
    scales: Sequence[float]

    def factors(self, squared_norms: Mapping[str, Tensor], margin: float) -> dict[str, Tensor]:
        scaled: dict[str, list[Tensor]] = {}
        for tensor, each in squared_norms.items():
            place = int(tensor)
            scaled.setdefault(self.inside.of[place], []).append(each * self.scales[place] ** 2)
        of_unit = self.inside.factors(
            {unit: torch.stack(parts).sum(0) for unit, parts in scaled.items()}, margin
        )
        return {tensor: of_unit[self.inside.of[int(tensor)]] for tensor in squared_norms}


@dataclass(frozen=True)
class ScaledClipping:
    """Another rule, on gradients scaled tensor by tensor.

    Args:
        rule: of one sum.
        scales: of each tensor, in the order of the engine's parameters; > 0, public.
    """

    rule: ClippingRule
    scales: tuple[float, ...]

    @property
    def norm(self) -> float:
        return self.rule.norm

    @property
    def directions(self) -> Directions:
        return self.rule.directions

    def units(self, layers: Sequence[str]) -> Units:
        """Each tensor in a unit of its own, whose factors are those of what it is clipped with."""
        inside = self.rule.units(layers)
        tensors = [str(place) for place in range(len(layers))]
        rules = {tensor: inside.rules[of] for tensor, of in zip(tensors, inside.of, strict=True)}
        return ScaledUnits(rules, tensors, inside, self.scales)

    def factors(self, squared_norms: Tensor, margin: float) -> NoReturn:
        raise PrivacyError(
            "norms of whole gradients do not say those of scaled ones. Fix: a fixed clip_norm."
        )
