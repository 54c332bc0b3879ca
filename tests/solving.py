"""Small private problems, and every solver with settings that fit them."""

from collections.abc import Callable

import torch
from torch import Tensor

from dpoptim.solvers import (
    Budget,
    LinearProblem,
    Objective,
    Result,
    adaptive_gd,
    kl_spider,
    noisy_gd,
    proximal_point,
    select_stationary,
)
from dpoptim.solvers.linear_model import LinearModel

N, FEATURES = 200, 4


def records(seed: int = 0, n: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, FEATURES, generator=generator, dtype=torch.float64)
    return x, (x.sum(1) + torch.randn(n, generator=generator) > 0).long()


def logistic(
    data: tuple[Tensor, Tensor] | None = None, *, neighboring: str = "zero-out", l2: float = 0.05
) -> Objective:
    data = records() if data is None else data
    problem = LinearProblem(
        LinearModel("logistic", features=FEATURES), capacity=len(data[0]), l2=l2
    )
    return Objective(problem, data, neighboring=neighboring)


Solver = Callable[..., Result]
COMMON = {"lipschitz": 2.0, "noise_seed": 3}
SOLVERS: dict[str, Solver] = {
    "noisy_gd": lambda o, b, **k: noisy_gd(o, None, b, steps=30, step_size=1.0, **COMMON | k),
    "algorithm_4": lambda o, b, **k: noisy_gd(
        o, None, b, steps=30, weak_convexity=0.05, smoothness=2.0, **COMMON | k
    ),
    "spider_pl": lambda o, b, **k: kl_spider(
        o, None, b, smoothness=1.0, kl_gamma=2, kl_exponent=2, risk_bound=0.7, **COMMON | k
    ),
    "spider": lambda o, b, **k: kl_spider(
        o, None, b, smoothness=1.0, kl_gamma=2, kl_exponent=1.5, risk_bound=0.7, **COMMON | k
    ),
    "proximal_point": lambda o, b, **k: proximal_point(
        o,
        None,
        b,
        weak_convexity=0.1,
        kl_gamma=2,
        kl_exponent=2,
        risk_bound=0.7,
        smoothness=2.0,
        inner_steps=5,
        **COMMON | k,
    ),
    "adaptive_gd": lambda o, b, **k: adaptive_gd(o, None, b, smoothness=1.0, **COMMON | k),
    "adaptive_gd_theorem": lambda o, b, **k: adaptive_gd(
        o, None, b, smoothness=1.0, constants="theorem", **COMMON | k
    ),
    "select_stationary": lambda o, b, **k: select_stationary(
        o, None, b, smoothness=1.0, **COMMON | k
    ),
}
BUDGET = Budget(delta=1e-5, epsilon=4)
