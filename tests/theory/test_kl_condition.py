"""The paper's rates: their exponents, their ranges, and that the solvers respect them where
constants are known.
"""

import dataclasses
import math

import pytest

from dpoptim.reproduce.kl_losses import power, tilted
from dpoptim.solvers import Budget, kl_spider
from dpoptim.theory.kl_condition import (
    KLSetting,
    adaptive_exponent,
    adaptive_rate,
    growth_from_kl,
    kl_from_growth,
    lower_bound_rate,
    proximal_rate,
    spider_bound,
    spider_radius,
    stationary_rate,
)

BASE = KLSetting(
    n=10**9,
    dimension=1,
    rho=1.0,
    lipschitz=1.5,
    smoothness=2.0,
    kl_gamma=3 ** (-1 / 1.5),
    kl_exponent=1.5,
    risk_bound=1 / 3,
)


def slope(rate, setting: KLSetting) -> float:
    """d log rate / d log x, over a factor of 1e6 in n, where logarithms hardly matter."""
    wider = dataclasses.replace(setting, n=setting.n * 10**6)
    return math.log(rate(setting) / rate(wider)) / math.log(setting.x / wider.x)


def test_rates_have_the_theorems_exponents() -> None:
    assert slope(spider_bound, BASE) == pytest.approx(1.5, rel=0.1)
    assert slope(lower_bound_rate, BASE) == pytest.approx(1.5)
    steep = dataclasses.replace(
        BASE, kl_exponent=3.0, kl_gamma=1.0, smoothness=0.01, risk_bound=0.1
    )
    assert slope(proximal_rate, steep) == pytest.approx(3.0, rel=0.15)
    wide = dataclasses.replace(BASE, dimension=10**12, n=10**13)
    assert slope(adaptive_rate, wide) == pytest.approx(adaptive_exponent(1.5), rel=0.15)
    assert slope(stationary_rate, dataclasses.replace(BASE, dimension=10**6)) == pytest.approx(
        0.5, rel=0.1
    )


def test_the_upper_bound_is_above_the_lower_one() -> None:
    for exponent in (1.1, 1.5, 2.0):
        setting = dataclasses.replace(BASE, kl_exponent=exponent, risk_bound=None)
        assert lower_bound_rate(setting) < spider_bound(setting) <= setting.initial_risk


def test_spider_keeps_the_bound_of_theorem_1() -> None:
    """On |w|^3 / 3, with the theorem's constants: failure probability 0.05, observed margin about
    100.
    """
    x = 1e-6
    objective = tilted(power(1.5, 20), 64)
    setting = dataclasses.replace(BASE, n=64, dimension=20, rho=20 / (64 * x) ** 2)
    result = kl_spider(
        objective,
        None,
        Budget(delta=1e-6, rho=setting.rho),
        lipschitz=1.5,
        smoothness=2.0,
        kl_gamma=setting.kl_gamma,
        kl_exponent=1.5,
        risk_bound=1 / 3,
        constants="theorem",
        noise_seed=0,
    )
    bound = spider_bound(setting)
    assert bound < 1e-2
    assert objective.risk(result.weights, data_is_public=True) <= bound
    assert float((result.weights - objective.problem.initial()).norm()) <= spider_radius(setting)


def test_more_steps_are_better_until_the_worst_case_rules() -> None:
    assert stationary_rate(BASE, steps=10**9) < stationary_rate(BASE)
    assert stationary_rate(BASE, steps=1) == stationary_rate(BASE)


@pytest.mark.parametrize("tau", [2.0, 3.0, 5.0])
def test_conversions_of_appendix_a_hold_on_a_known_loss(tau: float) -> None:
    """|w|^tau / tau has lambda = tau^(-1/tau) and gamma = tau^(-1/kappa); the lemmas lose a factor
    of tau at most.
    """
    kappa = tau / (tau - 1)
    gamma = tau ** (-1 / kappa)
    growth, exponent = growth_from_kl(gamma, kappa)
    assert exponent == pytest.approx(tau)
    assert growth <= tau ** (-1 / tau) * (1 + 1e-12)
    implied, back = kl_from_growth(tau ** (-1 / tau), tau)
    assert back == pytest.approx(kappa)
    assert gamma <= implied <= tau * gamma * (1 + 1e-12)


def test_what_a_theorem_does_not_cover_is_refused() -> None:
    steep = dataclasses.replace(BASE, kl_exponent=3.0, risk_bound=None)
    for rate in (spider_bound, adaptive_rate, lower_bound_rate):
        with pytest.raises(ValueError, match="kl_exponent must be in"):
            rate(steep)
    with pytest.raises(ValueError, match="kl_exponent must be in"):
        proximal_rate(BASE)
    with pytest.raises(ValueError, match="outside Theorem 4"):
        adaptive_rate(dataclasses.replace(BASE, n=10, rho=0.01))
    with pytest.raises(ValueError, match="allows no larger risk"):
        dataclasses.replace(BASE, risk_bound=100.0)
    with pytest.raises(ValueError, match="rho must be"):
        dataclasses.replace(BASE, rho=0.0)
