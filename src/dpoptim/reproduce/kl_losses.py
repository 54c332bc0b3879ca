"""Losses whose KL parameters are known, for measuring rates. Data are made up, hence public."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.arithmetic.norms import row_squared_norms
from dpoptim.gradients.arithmetic.products import margin
from dpoptim.solvers import ModuleProblem, Objective
from dpoptim.solvers.problem import Terms


class TiltedProblem:
    """f(w; z) = phi(w) + <w, z>; of centred records the risk is phi, and all differ from it.

    Args:
        start: the starting point, shape (d,).
        value, gradient: phi and its gradient.
    """

    def __init__(
        self, start: Tensor, value: Callable[[Tensor], float], gradient: Callable[[Tensor], Tensor]
    ) -> None:
        self._start, self._value, self._gradient = start, value, gradient

    @property
    def dimension(self) -> int:
        return len(self._start)

    @property
    def capacity(self) -> int:
        return 1 << 20

    def initial(self) -> Tensor:
        return self._start.clone()

    def prepare(self, records: tuple[Any, ...]) -> Tensor:
        z: Tensor = records[0]
        return z

    def clipped_sum(self, batch: Tensor, terms: Terms, bound: float) -> Tensor:
        common = torch.stack([c * self._gradient(w) for c, w in terms]).sum(0)
        rows = common + sum(c for c, _ in terms) * batch
        scale = bound / 2  # Clipping's smallest bound is 1e-6
        factors = Clipping(2.0).factors(
            row_squared_norms(rows / scale),
            margin(torch.float64, self.capacity, common_factor=False),
        )
        return factors @ torch.where(factors[:, None] > 0, rows, 0.0)

    def total_loss(self, batch: Tensor, w: Tensor) -> float:
        return self._value(w) * len(batch) + float((batch @ w).sum())

    def penalty(self, w: Tensor) -> float:
        return 0.0

    def penalty_gradient(self, w: Tensor) -> Tensor:
        return torch.zeros_like(w)


def tilted(problem: TiltedProblem, n: int) -> Objective:
    """The problem over n records of norm 1/2, in opposite pairs, so that they are centred."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(n // 2, problem.dimension, generator=generator, dtype=torch.float64)
    half /= 2 * half.norm(dim=1, keepdim=True)
    return Objective(problem, (torch.cat([half, -half]),))


def power(kappa: float, dimension: int) -> TiltedProblem:
    """phi = |w|^tau / tau, tau = kappa / (kappa - 1): (tau^(-1/kappa), kappa)-KL; start: norm 1."""
    tau = kappa / (kappa - 1)
    start = torch.full((dimension,), dimension**-0.5, dtype=torch.float64)
    return TiltedProblem(
        start, lambda w: float(w.norm()) ** tau / tau, lambda w: w * float(w.norm()) ** (tau - 2)
    )


def sine(dimension: int) -> TiltedProblem:
    """phi = sum of w^2 + 3 sin^2 w: not convex, but PL (kappa = 2); start: w = 2.5."""
    start = torch.full((dimension,), 2.5, dtype=torch.float64)
    return TiltedProblem(
        start, lambda w: float((w**2 + 3 * w.sin() ** 2).sum()), lambda w: 2 * w + 3 * (2 * w).sin()
    )


def steep_valley(dimension: int) -> TiltedProblem:
    """phi = sqrt(1 + |w|^2) from a distance of a million: the gradient stays near 1."""
    start = torch.full((dimension,), 1e6 * dimension**-0.5, dtype=torch.float64)
    return TiltedProblem(
        start,
        lambda w: math.hypot(1.0, float(w.norm())),
        lambda w: w / math.hypot(1.0, float(w.norm())),
    )


def network() -> Objective:
    """Regression of 16 records by 64 hidden units: over-parameterised, so PL holds nearby."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 8, generator=generator, dtype=torch.float64)
    y = torch.randn(16, generator=generator, dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).double()
    problem = ModuleProblem(module, lambda s, t: (s[:, 0] - t).square() / 2, capacity=16)
    return Objective(problem, (x, y))
