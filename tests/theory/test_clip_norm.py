"""The clip-norm theory against direct computation."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from dpoptim.theory import clip_norm as theory


def test_phi_matches_the_gaussian_mechanism() -> None:
    """With the implied nu, T steps of std sqrt(nu T log(1/delta)) tau / (n epsilon) are exactly
    (epsilon, delta)-DP.
    """
    n, epsilon, delta, steps = 10_000, 1.5, 1e-6, 37
    nu = theory.implied_nu(epsilon, delta)
    std = math.sqrt(nu * steps * math.log(1 / delta)) / (n * epsilon)
    mu = math.sqrt(steps) / n / std
    exact = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert exact == pytest.approx(delta, rel=1e-4)
    assert theory.privacy_rate(n, 50, epsilon, delta) == pytest.approx(std * math.sqrt(50 / steps))
    with pytest.raises(ValueError, match="phi = .* is not below 1"):
        theory.privacy_rate(10, 1000, 0.1, delta)


def quadratics() -> tuple[np.ndarray, np.ndarray]:
    """Interpolated: f_i(w) = G_i |w - 0| on [-1, 1], G_i-Lipschitz, all minimised at 0."""
    constants = np.array([1.0, 2.0, 5.0])
    points = np.array([[-1.0], [0.3], [0.9]])
    return constants, np.abs(points) * constants


def test_alpha_has_the_papers_properties() -> None:
    constants, excess = quadratics()
    values = [
        theory.clipped_advantage(tau, constants, excess) for tau in (0.1, 0.5, 1.0, 2.0, 3.0, 5.0)
    ]
    assert values[-1] == pytest.approx(1)  # (i)
    assert all(value >= 1 - 1e-12 for value in values)
    assert values == sorted(values, reverse=True)  # (ii)
    # min(1/tau, 1/G_i) is 1/G_i below G_1: constant, (iii)
    assert values[0] == pytest.approx(values[2])
    assert values[2] == pytest.approx(3 * 5 / 8)  # by hand: mean(G_i / G_i) / mean(G_i / 5)
    ratios = [
        5 / (tau * value) for value, tau in zip(values, (0.1, 0.5, 1.0, 2.0, 3.0, 5.0), strict=True)
    ]
    assert min(ratios) >= 1 - 1e-12  # (v)
    assert ratios == sorted(ratios, reverse=True)  # (vi)
    with pytest.raises(ValueError, match="tau must be in"):
        theory.clipped_advantage(6.0, constants, excess)


def test_under_interpolation_the_smallest_constant_is_best() -> None:
    constants, excess = quadratics()
    risks = []
    for tau in (1.0, 2.0, 5.0):
        alpha = theory.clipped_advantage(tau, constants, excess)
        terms = theory.risk_terms(
            tau, alpha, largest=5.0, phi=0.01, distance=1.0, scale=0.7, interpolation_gap=0.0
        )
        assert terms.bias == 0
        risks.append(terms.total)
    assert risks == sorted(risks)
    without = theory.risk_terms(
        5.0, 1.0, largest=5.0, phi=0.01, distance=1.0, scale=0.7, interpolation_gap=0.3
    )
    assert without.bias == 0  # nothing is clipped
    assert (
        theory.risk_terms(
            1.0, 1.5, largest=5.0, phi=0.01, distance=1.0, scale=0.7, interpolation_gap=0.3
        ).bias
        > 0
    )


@pytest.mark.parametrize("k", [2.0, 3.0, 8.0])
def test_settings_reproduce_the_closed_forms(k: float) -> None:
    """With T = 1 / phi^2 exactly, the theorems' second displays."""
    phi, moment, gamma, diameter, distance, scale = 1 / 32, 1.7, 0.1, 3.0, 2.0, 0.9
    tail = moment / gamma ** (1 / k)
    bounded = theory.constrained_heavy_tailed(
        phi, k=k, moment=moment, gamma=gamma, diameter=diameter
    )
    assert bounded.steps == 1024
    # The paper prints 2^((1 + 1/k)/2) in the denominator: 5/2 * 2^((1 - 1/k)/2).
    assert bounded.risk == pytest.approx(
        5 * diameter * tail / 2 ** ((1 + 1 / k) / 2) * phi ** (1 - 1 / k)
    )
    free = theory.unconstrained_heavy_tailed(
        phi, k=k, moment=moment, gamma=gamma, distance=distance, scale=scale
    )
    power = 1 - 2 / (k + 1)
    expected = tail * (
        (distance**2 / scale + 4 * scale) * phi**power / 2 ** (0.5 + 1 / (k + 1))
        + 2**power * (distance + scale) * phi ** (2 * power)
    )
    assert free.risk == pytest.approx(expected)
    improved = theory.improved_heavy_tailed(
        phi, k=k, moment=moment, distance=distance, scale=scale, minimiser_bound=1.3
    )
    expected = (
        moment
        * (2 ** ((1 - 1 / k) / 2) * (distance**2 / scale + 2 * scale) + 16 * 1.3)
        * phi ** (1 - 1 / k)
    )
    assert improved.risk == pytest.approx(expected)
    for settings in (bounded, free, improved):
        assert settings.clip_norm > moment  # most records stay unclipped
        assert settings.learning_rate > 0


def test_rates_have_their_exponents() -> None:
    for k in (2.0, 4.0):
        small, large = theory.optimal_orders(1e-4, k), theory.optimal_orders(1e-2, k)
        slopes = {name: math.log(large[name] / small[name]) / math.log(100) for name in small}
        assert slopes["constrained convex"] == pytest.approx(1 - 1 / k)
        assert slopes["unconstrained convex"] == pytest.approx(1 - 2 / (k + 1))
        assert slopes["nonconvex"] == pytest.approx(1 - 1 / (2 * k - 1))
        order = theory.nonconvex_orders(1e-2, k=k, gamma=0.5)
        assert order.risk == pytest.approx(large["nonconvex"] * 0.5 ** (-2 / (2 * k - 1)))


def test_growth_conditions_hold_for_logistic_loss() -> None:
    """log(1 + e^-s |x|...) is (|x|^2 / 4)-smooth in w, so its gradients obey |g|^2 <= 2 L f."""
    s = np.linspace(-20, 20, 4001)
    loss, slope = np.logaddexp(0, -s), 1 / (1 + np.exp(s))
    for length in (0.5, 3.0):
        bound = theory.growth_bound(loss, *theory.growth_parameters(length**2 / 4))
        assert (slope * length <= bound + 1e-12).all()


def test_steps_and_batches_reduce_the_smooth_rate() -> None:
    few = theory.smooth_orders(10_000, 50, 1.0, 1e-5, steps=10, batch_size=100)
    many = theory.smooth_orders(10_000, 50, 1.0, 1e-5, steps=10_000, batch_size=100)
    floor = math.sqrt(50 * math.log(1e5)) / 10_000
    assert floor < many < few
    assert theory.interpolation_settings(2.0, 0.1, 1.0) == (34, pytest.approx(0.075))


@pytest.mark.parametrize("d", [1, 16, 256])
def test_gaussian_noise_is_as_light_as_assumption_4_1_asks(d: int) -> None:
    """E exp(|z|^2 / rho^2) = e, the product of d integrals."""
    rho = theory.gaussian_spread(d)
    z = np.linspace(-60, 60, 400_001)
    density = np.exp(z**2 / rho**2 - z**2 / 2) / math.sqrt(2 * math.pi)
    assert np.trapezoid(density, z) ** d == pytest.approx(math.e, rel=1e-6)


def test_settings_for_smooth_losses() -> None:
    known: dict[str, float] = {
        "batch_size": 100, "smoothness": 0.5, "gap": 3.0, "spread": 2.0,
        "noise_multiplier": 1.5, "failure": 0.01,
    }  # fmt: skip
    n, d, epsilon = 10_000, 50, 0.5

    def settings(**changed: float) -> theory.Settings:
        return theory.smooth_settings(n, d, epsilon, 1e-5, **(known | changed))

    found = settings()
    # 1 / sqrt(B T) is sqrt(d) / (n epsilon)
    assert found.steps * 100 == pytest.approx((n * epsilon) ** 2 / d)
    # as many tails as there are gradients: n of each of T + 1 iterates
    assert settings(spread=3.0).clip_norm - found.clip_norm == pytest.approx(
        math.log(n * (found.steps + 1) / 0.01)
    )
    without = settings(spread=0.0, gap=0.0, clip_norm=2.0)
    assert without.clip_norm == 2
    noise = math.sqrt(d) * 2 * 1.5 / 100  # of a step, per root of its sum of squares
    assert without.learning_rate == pytest.approx(1 / (noise * math.sqrt(found.steps)))
    smooth = settings(smoothness=100.0, spread=0.0, clip_norm=2.0)
    assert smooth.learning_rate == 1 / 200
    assert settings(failure=0.5).clip_norm < found.clip_norm
