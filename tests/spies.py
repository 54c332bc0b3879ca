"""What reaches the gate, with an answer in its place that is the same in every world.

Then later steps can be compared, too: they depend on the data by their sums alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from dpoptim.estimators import network_fit
from dpoptim.gate import FilteredGate, Gate
from dpoptim.plan import Plan


@contextmanager
def sums_seen() -> Iterator[list[tuple[Tensor, float]]]:
    """Sums that a filter's gate is to release, each with its bound."""
    seen: list[tuple[Tensor, float]] = []

    def spy(self: FilteredGate, total: Tensor, *, norm_bound: float, mu: float) -> Tensor:
        seen.append((total.clone(), norm_bound))
        return torch.ones_like(total)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FilteredGate, "release_sum", spy)
        yield seen


def worlds_of_queries(patch: pytest.MonkeyPatch, answer: float = 3.0) -> list[list[Tensor]]:
    """Queries of planned runs: a list of steps for each world, the last of which is added to."""
    worlds: list[list[Tensor]] = []

    def spy(self: Gate, sums: list[Tensor]) -> list[Tensor]:
        worlds[-1].append(torch.cat([total.clone() for total in sums]))
        self.released += 1
        return [torch.full_like(total, answer) for total in sums]

    patch.setattr(Gate, "release_sum", spy)
    return worlds


def plans_attached(patch: pytest.MonkeyPatch) -> list[Plan]:
    """Plans of networks that estimators fit."""
    plans: list[Plan] = []
    honest = network_fit.attach_own

    def spy(plan: Plan, *rest: Any, **more: Any) -> Any:
        plans.append(plan)
        return honest(plan, *rest, **more)

    patch.setattr(network_fit, "attach_own", spy)
    return plans
