"""Many runs side by side: each coordinate of a long vector is a run in one dimension.

A method adds noise to every coordinate independently and decides everything else (steps, step
sizes) for all of them together, from what was released. If nobody has a gradient but a canary,
whose clipped gradient is the norm bound in every coordinate, then each coordinate is a two-world
experiment at the method's own noise. (All together the canary is longer than the bound, by the
root of their number; no coordinate knows of the others.)

**The statistic** is linear in everything a run releases: ``K^-1 m``, K the covariance of the noise
and m the canary's shift, both measured on runs that certify nothing. For Gaussian releases that is
the likelihood ratio. The threshold lies halfway between the means of those runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpoptim.audit.bounds import Errors, Floats, gdp_lower_bound
from dpoptim.gate import FilteredGate, Gate

RUNS = 20_000
# (what the canary holds, seed) -> releases, shape (steps, runs)
World = Callable[[float, int], Floats]


class CanaryProblem:
    """A solvers' problem: records are numbers, their clipped gradients so many bounds.

    Args:
        runs, capacity: coordinates, and records at most.
        slope: the gradient of the public penalty, one number or one for each coordinate. By
            default some noise deviations long in all, which keeps methods going that stop at small
            gradients.
    """

    def __init__(self, runs: int, capacity: int, slope: float | Tensor = 0.1) -> None:
        self.dimension, self.capacity, self.slope = runs, capacity, slope

    def initial(self) -> Tensor:
        return torch.zeros(self.dimension, dtype=torch.float64)

    def prepare(self, records: tuple[Any, ...]) -> Tensor:
        return torch.as_tensor(records[0])

    def clipped_sum(self, batch: Tensor, terms: object, bound: float) -> Tensor:
        return torch.full((self.dimension,), float(batch.sum()) * bound, dtype=torch.float64)

    def total_loss(self, batch: Tensor, w: Tensor) -> float:
        return 0.0

    def penalty(self, w: Tensor) -> float:
        return 0.0

    def penalty_gradient(self, w: Tensor) -> Tensor:
        return torch.zeros_like(w) + self.slope


@contextmanager
def releases_kept(runs: int) -> Iterator[list[Tensor]]:
    """Keep what the gates release meanwhile, of ``runs`` entries each."""
    kept: list[Tensor] = []
    planned, filtered = Gate.release_sum, FilteredGate.release_sum

    def keep_planned(gate: Gate, sums: Any) -> list[Tensor]:
        released = planned(gate, sums)
        kept.append(released[0].detach().clone())
        return released

    def keep_filtered(gate: FilteredGate, total: Tensor, **arguments: Any) -> Tensor:
        released = filtered(gate, total, **arguments)
        if released.numel() == runs:
            kept.append(released.clone())
        return released

    Gate.release_sum = keep_planned  # type: ignore[method-assign,assignment]
    FilteredGate.release_sum = keep_filtered  # type: ignore[method-assign,assignment]
    try:
        yield kept
    finally:
        Gate.release_sum = planned  # type: ignore[method-assign]
        FilteredGate.release_sum = filtered  # type: ignore[method-assign]


@dataclass(frozen=True)
class Separation:
    """The certified mu, and the counts behind it."""

    mu: float
    errors: Errors


def without_canary(neighboring: str) -> float:
    """The world without the canary, in norm bounds: nothing, or its value turned round."""
    return -1.0 if neighboring == "replace-one" else 0.0


def separate(
    world: World, *, low: float = 0.0, confidence: float = 0.95, seed: int = 0
) -> Separation:
    """Attack: two runs of the world choose statistic and threshold, two others certify.

    Args:
        low: what the canary holds in the first world; see `without_canary`.
    """
    chosen = [world(presence, seed + 1 + i) for i, presence in enumerate((low, 1.0))]
    steps = min(len(each) for each in chosen)
    shift = chosen[1][:steps].mean(1) - chosen[0][:steps].mean(1)
    covariance = np.atleast_2d(np.cov(chosen[0][:steps]))
    direction = np.linalg.solve(covariance, shift)
    threshold = float(np.mean([(direction @ each[:steps]).mean() for each in chosen]))
    absent, present = (
        direction @ padded(world(presence, seed + 3 + i), steps)
        for i, presence in enumerate((low, 1.0))
    )
    errors = Errors(
        int((absent > threshold).sum()),
        absent.size,
        int((present <= threshold).sum()),
        present.size,
    )
    return Separation(gdp_lower_bound(errors, confidence), errors)


def padded(releases: Floats, steps: int) -> Floats:
    """The first ``steps`` releases; zeros where a run stopped before."""
    missing = steps - len(releases)
    return (
        releases[:steps]
        if missing <= 0
        else np.vstack([releases, np.zeros((missing, releases.shape[1]))])
    )
