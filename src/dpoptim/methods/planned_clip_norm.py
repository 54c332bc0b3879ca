"""A clip norm that follows a plan: public numbers, decided before the run."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpoptim.arguments import positive_number
from dpoptim.assumptions import Assumption, enforced
from dpoptim.clipping import Clipping, ClippingRule
from dpoptim.methods.sensitive_state import AdaptiveClipNorm
from dpoptim.opacus_words import KnowsOpacus


@dataclass(frozen=True)
class PlannedClipNorm(KnowsOpacus):
    """Clip norms for equal stretches of the run: (1, 0.5) halves it in the second half.

    What a step releases is divided by its clip norm first, so the run costs what it costs with one.

    Args:
        norms: > 0, at least one.

    Examples:
        >>> import dpoptim
        >>> method = dpoptim.DPSGD(clip_norm=dpoptim.PlannedClipNorm((1.0, 0.5)))
    """

    norms: tuple[float, ...]

    def __post_init__(self) -> None:
        norms = tuple(positive_number("norms", norm) for norm in self.norms)
        if not norms:
            raise ValueError("norms is empty; give a clip norm for each stretch of the run.")
        for norm in norms:
            _ = Clipping(norm)  # validates
        object.__setattr__(self, "norms", norms)

    @property
    def start(self) -> float:
        return self.norms[0]

    def begin(
        self,
        rule_of: Callable[[float], ClippingRule],
        *,
        batch_size: int,
        steps: int,
        capacity: int,
    ) -> "PlannedNorms":
        return PlannedNorms(self, rule_of, steps)

    def refuse_if_drowned(self, *, batch_size: int, steps: int, deviation: float) -> None:
        if len(self.norms) > steps:
            raise ValueError(
                f"clip_norm plans more norms than the {steps} steps of the run; give at most one a "
                "step."
            )

    def assumption(self) -> Assumption:
        return enforced(
            f"the clip norm follows a plan: {', '.join(f'{norm:g}' for norm in self.norms)}"
        )


class PlannedNorms(AdaptiveClipNorm):
    """One run's way through its planned clip norms. Public.

    **Guarantee.** What `query` returns moves by at most 1 with one record that moves the scaled
    sums by at most 1.
    """

    def __init__(
        self, planned: PlannedClipNorm, rule_of: Callable[[float], ClippingRule], steps: int
    ) -> None:
        self._planned, self._rule_of, self._steps = planned, rule_of, steps
        self._done = 0
        self.rule = rule_of(planned.start)
        self.share_below = math.nan

    def answer(self, released: list[Tensor]) -> list[Tensor]:
        norm = self.rule.norm
        self._done += 1
        self._choose()
        return [total.mul_(norm) for total in released]

    def _choose(self) -> None:
        place = min(self._done, self._steps - 1) * len(self._planned.norms) // self._steps
        self.rule = self._rule_of(self._planned.norms[place])

    def state(self) -> dict[str, Any]:
        return {"done": self._done}

    def restore(self, state: dict[str, Any]) -> None:
        self._done = state["done"]
        self._choose()
