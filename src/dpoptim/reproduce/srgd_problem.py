"""A made-up problem where both rates of Choquette-Choo et al. 2024, Theorem 4.2, are tight.

In units of L R the theorem's rate is ``1 / sqrt(n) + sqrt(p) / (epsilon n)``. There is one problem
for each loss and p, the same for all n, and its minimiser is known:

* Record: x = (c_0, +-c_1, ..., +-c_{p-1}) with independent fair signs, |x| = 1. Squared loss then
  has curvatures c_i^2, logistic loss a quarter of them at zero. Half of |x|^2 is in c_0, a
  constant feature whose weight is 0, so M does not depend on p; the rest is spread evenly on a
  logarithmic scale over `DECADES`. The minimiser has the same weight w = R / sqrt(p - 1) in every
  other direction, so that R does not depend on p either.
* Steps: T accelerated steps of 1 / M learn the directions of curvature l > M / T^2 and not the
  others, which cost l w^2 / 2 each. The directions are rho = p / ln(10^DECADES) to a factor e in
  curvature, so they add up to about ``rho w^2 M / T^2``: R^2 M / T^2 but for constants, the
  bound's own term, and 1 / sqrt(n) for T = 2 n^(1/4).
* Privacy: noise of standard deviation s, of order 1 / (epsilon n), in every entry of the gradient
  leaves ``min(l w^2, s^2 / l)`` in direction l. The largest are those near l = s / w, and the sum
  is about ``rho s w``: R sqrt(p) s but for constants, the bound's second term, as long as s / w is
      within the spectrum and above M / T^2.
  Below M / T^2 it is rho s^2 T^2 / M: there squares add, not the terms. (Their root of a sum of
  squares is within sqrt(2) of the sum, so the theorem cannot tell them apart; `exponents` fits
  either.)
* Sampling: a well-specified model adds its noise variance / 2n (1 / 2n for logistic loss) for
  every direction learnt: at most of order p / n, less than 1 / sqrt(n) for n > p^2. At fixed p no
      such problem has a sampling error that goes on
  falling like 1 / sqrt(n), so the first exponent is that of the error of n^(1/4) steps. For it to
  be the larger at n = 1000 and p = 100 too, M R must not be small against L: `SIZE`, chosen on
  pilot runs, as was `DECADES`.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpoptim.solvers.linear_model import LinearModel
from dpoptim.solvers.problem import LinearProblem

Floats = NDArray[np.float64]

DECADES = 4.0  # from the largest to the smallest curvature of the directions that carry signal
SIZE = 2.5  # M R, the smoothness times the norm of the minimiser


@dataclass(frozen=True)
class Task:
    """A made-up problem of the module's kind.

    Squared loss: y = x w* + uniform noise in [-1/2, 1/2]. Logistic: y of probability sigmoid(x w*).
    """

    kind: str
    p: int

    @property
    def scales(self) -> Floats:
        """c, what |x| is in each entry: shape (p,), of norm 1."""
        relative = np.logspace(0, -DECADES, self.p - 1)
        return np.sqrt(np.concatenate([[0.5], 0.5 * relative / relative.sum()]))

    @property
    def best(self) -> Tensor:
        """w*: float64, shape (p,)."""
        w = torch.full(
            (self.p,), SIZE / self.smoothness / math.sqrt(self.p - 1), dtype=torch.float64
        )
        w[0] = 0
        return w

    @property
    def smoothness(self) -> float:
        """M, the largest curvature of the population risk anywhere."""
        return 0.5 if self.kind == "squared" else 0.125

    def rows(self, n: int, rng: np.random.Generator) -> Tensor:
        """Features: float32, shape (n, p)."""
        signs = (
            torch.from_numpy(rng.integers(0, 2, (n, self.p), dtype=np.int8)).float().mul_(2).sub_(1)
        )
        signs[:, 0] = 1
        return signs.mul_(torch.from_numpy(self.scales).float())

    def sample(self, n: int, seed: int) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng([seed, n, self.p])
        x = self.rows(n, rng)
        scores = (x @ self.best.float()).double()
        coins = torch.from_numpy(rng.random(n))
        return x, (
            scores + coins - 0.5 if self.kind == "squared" else (coins < scores.sigmoid()).double()
        )

    def excess(self, w: Tensor) -> float:
        """F(w) - F(w*): exact for squared loss, else the mean divergence on 20,000 fresh rows."""
        if self.kind == "squared":
            return float((torch.from_numpy(self.scales) * (w - self.best)).square().sum() / 2)
        x = fresh_rows(self)
        true, found = x @ self.best, x @ w
        gap = torch.nn.functional.softplus(found) - torch.nn.functional.softplus(true)
        return float((gap - true.sigmoid() * (found - true)).mean())

    def problem(self, capacity: int) -> LinearProblem:
        return LinearProblem(LinearModel(self.kind, self.p, intercept=False), capacity=capacity)  # type: ignore[arg-type]


@cache
def fresh_rows(task: Task) -> Tensor:
    """For the excess risk of logistic loss: float64, shape (20,000, p)."""
    return task.rows(20_000, np.random.default_rng(12345)).double()
