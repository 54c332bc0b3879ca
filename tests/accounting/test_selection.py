"""The best of a random number of Gaussian trials: no order of scores, no pairing of outputs, and
no event shows more than its accounting says; and an attack shows nearly as much.
"""

import math
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp.rdp_privacy_accountant import _gamma_truncated_negative_binomial
from scipy.stats import norm

from dpoptim.accounting import compute_delta, compute_epsilon, gdp_epsilon
from dpoptim.accounting.choose_profile import Accountant
from dpoptim.accounting.selection import best_density, stopping_parameter
from dpoptim.audit.searches import worst_order, worst_orders
from dpoptim.noise.trials import logarithmic_parameter

CASES = [(0.2, 8.0, 0.0), (1.0, 2.0, 0.0), (0.5, 50.0, 1.0), (2.0, 5.0, 3.0)]
OURS: Accountant = "order statistics"


def best_of(mu: float, mean: float, shape: float) -> RepeatAndSelectDpEvent:
    return RepeatAndSelectDpEvent(dp.GaussianDpEvent(1 / mu), mean, shape)


def law_of_best(trial: np.ndarray, mean: float, shape: float) -> np.ndarray:
    """Chances of the outputs of the best of K, from those of one trial, worst score first."""
    worse = np.concatenate([[0.0], np.cumsum(trial)]).clip(0, 1)
    gamma = stopping_parameter(mean, shape)
    rest = 1 - (1 - gamma) * worse
    if shape == 0:
        return np.diff(np.log(rest) / math.log(gamma))
    return np.diff((rest**-shape - 1) / (gamma**-shape - 1))


def exact_delta(one: np.ndarray, other: np.ndarray, epsilon: float) -> float:
    return float(np.maximum(one - math.exp(epsilon) * other, 0).sum())


@pytest.mark.parametrize(("mu", "mean", "shape"), CASES)
def test_no_order_of_scores_shows_more(mu: float, mean: float, shape: float) -> None:
    """Outputs are cells of a Gaussian, ordered at random, then for the worse while that helps."""
    rng = np.random.default_rng(5)
    event = best_of(mu, mean, shape)
    claims = {
        e: compute_delta(event, e, "zero-out", accountant=OURS).delta for e in (mu / 10, mu, 3 * mu)
    }
    edges = np.concatenate([[-np.inf], np.linspace(-3.5, 3.5 + mu, 24), [np.inf]])
    one, other = np.diff(norm.cdf(edges - mu)), np.diff(norm.cdf(edges))
    nearest = 0.0
    for epsilon, claimed in claims.items():
        order = rng.permutation(len(one))
        best = 0.0
        for _ in range(1000):
            tried = order.copy()
            i, j = rng.choice(len(order), 2, replace=False)
            tried[i], tried[j] = tried[j], tried[i]
            p, q = (law_of_best(law[tried], mean, shape) for law in (one, other))
            shown = max(exact_delta(p, q, epsilon), exact_delta(q, p, epsilon))
            assert shown <= claimed
            if shown >= best:
                order, best = tried, shown
        nearest = max(nearest, best / claimed)
    assert nearest > 0.35  # the search comes near, or its silence says nothing


@pytest.mark.parametrize(("mean", "share"), [(1.2, 0.95), (2.0, 0.9), (8.0, 0.9), (100.0, 0.9)])
def test_an_exact_attack_shows_nine_tenths(mean: float, share: float) -> None:
    event = best_of(0.15, mean, 0.0)
    claimed = compute_epsilon(event, 1e-5, "zero-out", accountant=OURS)
    assert claimed.accountant == "order statistics"
    shown = worst_orders(0.15, mean)
    assert share * claimed.epsilon <= shown <= claimed.epsilon
    monotone = worst_order(0.15, mean, -np.inf)  # the best score is the largest output
    assert monotone < 0.98 * shown


@pytest.mark.parametrize("mu", [0.05, 0.7, 4.0])
@pytest.mark.parametrize("mean", [1.1, 8.0, 1e4])
@pytest.mark.parametrize("shape", [0.0, 1.0])
def test_it_is_never_above_the_renyi_bound(mu: float, mean: float, shape: float) -> None:
    accountant: Any = dp.rdp.RdpAccountant([1.5, 2, 4, 8, 16, 32, 64, 128, 256])
    accountant.compose(best_of(mu, mean, shape))
    exact = compute_epsilon(best_of(mu, mean, shape), 1e-6, "zero-out", accountant=OURS).epsilon
    assert gdp_epsilon(mu, 1e-6) < exact <= accountant.get_epsilon(1e-6)


def test_hardly_ever_more_than_one_trial_costs_one_trial() -> None:
    for mu in (0.1, 1.0, 3.0):
        found = compute_epsilon(
            best_of(mu, 1 + 1e-6, 0.0), 1e-6, "zero-out", accountant=OURS
        ).epsilon
        assert found == pytest.approx(gdp_epsilon(mu, 1e-6), rel=1e-3)


def test_replacing_a_record_moves_twice_as_far() -> None:
    one = compute_epsilon(best_of(0.5, 8.0, 0.0), 1e-6, "zero-out", accountant=OURS).epsilon
    two = compute_epsilon(best_of(0.25, 8.0, 0.0), 1e-6, "replace-one", accountant=OURS).epsilon
    assert one == pytest.approx(two, rel=1e-9)


@pytest.mark.parametrize(("mean", "shape"), [(1.5, 0.0), (8.0, 0.0), (8.0, 1.0), (30.0, 2.5)])
def test_the_law_of_the_number_of_trials(mean: float, shape: float) -> None:
    gamma = stopping_parameter(mean, shape)
    assert gamma == pytest.approx(_gamma_truncated_negative_binomial(shape, mean), rel=1e-8)
    if shape == 0:
        assert gamma == pytest.approx(logarithmic_parameter(mean), rel=1e-12)
    above = np.linspace(0, 1, 7)
    k = np.arange(1, 40_000)
    if shape == 0:
        chances = (1 - gamma) ** k / k / -math.log(gamma)
    else:  # P(K = k) = (1 - gamma)^k / (gamma^-shape - 1) prod (l + shape) / (l + 1), l < k
        logs = np.cumsum(np.log((k - 1 + shape) / k)) + k * math.log1p(-gamma)
        chances = np.exp(logs) / (gamma**-shape - 1)
    assert chances.sum() == pytest.approx(1, abs=1e-9)
    expected = [(k * chances * (1 - a) ** (k - 1)).sum() for a in above]
    assert best_density(above, mean, shape) == pytest.approx(expected, rel=1e-8)


def test_searches_are_charged_by_the_published_bound() -> None:
    event = best_of(0.15, 8.0, 0.0)
    accountant: Any = dp.rdp.RdpAccountant(np.linspace(1.1, 400, 1_000))
    accountant.compose(event)
    charged = compute_epsilon(event, 1e-5, "zero-out")
    assert charged.accountant == "RDP"
    assert charged.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


@pytest.mark.parametrize("event", [dp.GaussianDpEvent(1.0), best_of(0.1, 8.0, 0.0)])
def test_only_one_selection_has_order_statistics(event: dp.DpEvent) -> None:
    with pytest.raises(ValueError, match='accountant="order statistics" is for one selection'):
        compute_epsilon(dp.SelfComposedDpEvent(event, 2), 1e-5, "zero-out", accountant=OURS)


def test_no_trial_at_all_says_nothing() -> None:
    found = compute_epsilon(RepeatAndSelectDpEvent(dp.NoOpDpEvent(), 8.0, 0.0), 1e-6, "zero-out")
    assert found.epsilon < 1e-3


def test_a_delta_follows_from_divergences_too() -> None:
    twice = dp.SelfComposedDpEvent(best_of(0.1, 8.0, 0.0), 2)  # only RDP composes selections
    epsilon = compute_epsilon(twice, 1e-6, "zero-out").epsilon
    found = compute_delta(twice, epsilon, "zero-out")
    assert found.accountant == "RDP"
    assert found.delta == pytest.approx(1e-6, rel=1e-3)
