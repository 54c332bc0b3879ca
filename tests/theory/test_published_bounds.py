"""Zhang et al.'s convergence, and Menart et al.'s lower bounds against what is possible."""

import math

import pytest
import torch

from dpoptim.accounting.gaussian import gdp_delta, gdp_epsilon
from dpoptim.methods.error_feedback import squared_shifts
from dpoptim.theory.error_feedback import (
    Smooth,
    proven_stationarity,
    published_rates,
    sampled_delta,
    stationarity_bound,
)
from dpoptim.theory.kl_condition import (
    KLSetting,
    convex_lower_bound,
    growth_lower_bound,
    kl_from_growth,
    lower_bound_rate,
    proximal_rate,
    steep_lower_bound,
)


@pytest.mark.figures
def test_error_feedback_converges_as_theorem_3_6_says() -> None:
    """With noise, on records where clipping alone ends 0.95 away: one is 20 clip norms long."""
    centres = torch.tensor([[-1.0, 0.0]] * 20 + [[20.0, 0.0]], dtype=torch.float64)
    start = torch.tensor([4.0, -3.0], dtype=torch.float64)
    clip, feedback, steps, noise = 1.0, 4.0, 10_000, 0.5
    loss = Smooth(gap=float(start.square().sum()) / 2, smoothness=1.0, dimension=2)
    bound, step_size = stationarity_bound(
        loss, steps=steps, clip_norm=clip, feedback_clip=feedback, noise=noise
    )
    generator = torch.Generator().manual_seed(0)
    found = []
    for fed in (0.0, feedback):
        x, e, total = start.clone(), torch.zeros(2, dtype=torch.float64), 0.0
        for _ in range(steps):
            gradients = x - centres
            mean = gradients.mean(0)
            clipped = (gradients * (clip / gradients.norm(dim=1).clamp(min=clip))[:, None]).mean(0)
            v = clipped + e * min(1.0, fed / max(float(e.norm()), 1e-300))
            total += float(mean.square().sum()) / steps
            e = e + mean - v
            w = noise * torch.randn(2, generator=generator, dtype=torch.float64)
            x = x - step_size * (v + w)
        found.append(total)
    assert found[1] <= bound < found[0]


def test_more_passes_end_by_doing_harm() -> None:
    loss = Smooth(gap=1.0, smoothness=1.0, dimension=1000)

    def bound(passes: int) -> float:
        return proven_stationarity(
            loss,
            n=10_000,
            batch_size=100,
            passes=passes,
            mu=1.0,
            clip_norm=0.1,
            feedback_clip=0.4,
            residual_clip=1.0,
        )

    assert min(range(1, 200), key=bound) not in (1, 199)


def test_the_published_table() -> None:
    rates = published_rates(10_000, 2.0, 1e-5, clip_norm=1.0, constant=3.0, gradient=50.0)
    root = math.sqrt(math.log(1e5)) / 20_000
    assert list(rates.values()) == pytest.approx([50 * root, root, math.sqrt(19) * root])
    with pytest.raises(ValueError, match="3 clip_norm"):
        stationarity_bound(Smooth(1, 1, 1), steps=9, clip_norm=1, feedback_clip=1, noise=0)


def test_growth_and_kl_say_the_same() -> None:
    """Theorem 6 at (lambda, tau) has Corollary 1's exponent at the KL parameters of Lemma 6."""
    for tau in (2.0, 3.0):
        gamma, kappa = kl_from_growth(0.7, tau)
        ratios = []
        for n in (10**4, 10**6):
            setting = KLSetting(n, 10, 0.5, 1.5, 1.0, gamma, kappa)
            ours = growth_lower_bound(n, 10, 1.0, lipschitz=1.5, growth=0.7, exponent=tau)
            ratios.append(ours / lower_bound_rate(setting))
        assert ratios[0] == pytest.approx(ratios[1])


def test_lower_bounds_are_below_what_is_reached() -> None:
    """Theorem 8 below a Gaussian mean's risk: a number in [-1, 1], kappa = 2 by curvature."""
    n, epsilon, delta = 1000, 0.5, 1e-5
    mu = next(m / 1000 for m in range(1, 3000) if gdp_epsilon((m + 1) / 1000, delta) > epsilon)
    reached = 0.5 * (2 / (n * mu)) ** 2  # of (w - mean)^2 / 2
    assert steep_lower_bound(n, epsilon, delta, kl_exponent=2) <= reached
    assert convex_lower_bound(n, 10**9, 1.0, lipschitz=2.0, distance=3.0) == 6.0
    setting = KLSetting(n, 1, 0.05, 1.0, 0.1, 1.0, 3.0)
    assert steep_lower_bound(n, epsilon, delta, kl_exponent=3) <= proximal_rate(setting)
    for wrong in (
        {"epsilon": 0.9, "delta": 1e-5, "kl_exponent": 3},
        {"epsilon": 0.5, "delta": 0.5, "kl_exponent": 3},
        {"epsilon": 0.5, "delta": 1e-5, "kl_exponent": 1.5},
    ):
        with pytest.raises(ValueError, match="must be"):
            steep_lower_bound(n, **wrong)


def test_what_is_proved_of_error_feedback_on_poisson_batches() -> None:
    run = {"clip": 1.0, "residual": 0.5, "feedback": 3.0, "noise": 4.0}
    bounds = (1.0, 0.5, 3.0)
    # one step a pass: all take part, and nothing is random
    once = squared_shifts(*bounds, 1, 1)
    sure = sampled_delta(0.7, passes=5, steps_per_pass=1, **run)
    assert sure == pytest.approx(gdp_delta(math.sqrt(5 * once) / 4, 0.7), rel=1e-9)
    # one pass of three steps: by hand, but for rounding up by a tenth of a participation
    chances = {1: 3 * 4 / 27, 2: 3 * 2 / 27, 3: 1 / 27}
    squares = {k: squared_shifts(*bounds, k, 3) for k in chances}
    lower, upper = (
        sum(c * gdp_delta(math.sqrt(squares[k] + up) / 4, 0.7) for k, c in chances.items())
        for up in (0.0, squares[1] / 10)
    )
    found = sampled_delta(0.7, passes=1, steps_per_pass=3, **run)
    assert lower * (1 - 1e-9) <= found <= upper * (1 + 1e-9)
    # it amplifies nothing
    fixed = gdp_delta(math.sqrt(4 * squared_shifts(*bounds, 1, 10)) / 4, 0.7)
    assert sampled_delta(0.7, passes=4, steps_per_pass=10, **run) > fixed
