"""The Monte Carlo price of balls in bins: above the truth where that is known, and not far."""

import math

import dp_accounting
import numpy as np
import pytest
from scipy.special import ndtr

from dpoptim.accounting import compute_delta, compute_epsilon, gdp_epsilon
from dpoptim.accounting.accountant import renyi_divergence
from dpoptim.accounting.balls_in_bins import (
    AllocationProfile,
    BallsInBinsDpEvent,
    Bins,
    upper_confidence_bound,
)
from dpoptim.accounting.event_json import event_from_json, event_to_json

DELTA = 1e-5
SAMPLES = 1 << 14


def alone(bins: int, noise: float, correlation: float = 0.0) -> BallsInBinsDpEvent:
    return BallsInBinsDpEvent(noise, (1.0, *[correlation] * (bins - 1)), SAMPLES)


@pytest.mark.parametrize("event", [alone(1, 1.0), alone(4, 1.0, 1.0)], ids=["one", "all alike"])
def test_bins_that_do_not_differ_are_a_gaussian(event: BallsInBinsDpEvent) -> None:
    exact = gdp_epsilon(1.0, DELTA)
    found = AllocationProfile(event, DELTA).epsilon(DELTA)
    assert found == pytest.approx(exact, rel=1e-9)  # the Gaussian that it is never above
    # what is not told: the estimate itself, against the exact profile
    for epsilon in (1.0, 2.0, 3.0):
        true = ndtr(0.5 - epsilon) - math.exp(epsilon) * ndtr(-0.5 - epsilon)
        bounds = AllocationProfile(event, true)._bounds(epsilon, 1e-6)
        assert true <= bounds[0] <= 1.3 * true


@pytest.mark.parametrize(("bins", "correlation", "most"), [(5, 0.0, 1.4), (6, 0.4, 4.5)])
def test_the_bound_is_above_plain_sampling_and_near_it(
    bins: int, correlation: float, most: float
) -> None:
    """Against a million plain draws, where delta is large enough for these."""
    event, epsilon, draws = alone(bins, 0.8, correlation), 2.0, 1_000_000
    rng = np.random.default_rng(5)
    gram = np.full((bins, bins), correlation)
    np.fill_diagonal(gram, 1.0)
    a = rng.standard_normal((draws, bins)) @ np.linalg.cholesky(gram).T / 0.8 - 0.5 / 0.64
    absent = np.exp(a).mean(1)
    present = np.exp(a + gram[rng.integers(bins, size=draws)] / 0.64).mean(1)
    truths = (
        np.maximum(0, 1 - math.exp(epsilon) / present).mean(),
        np.maximum(0, 1 - math.exp(epsilon) * absent).mean(),
    )
    bounds = AllocationProfile(event, float(truths[0]))._bounds(epsilon, 1e-6)
    for true, bound in zip(truths, bounds, strict=True):
        assert 0.97 * true <= bound <= most * true + 3e-3


def test_the_same_is_charged_whichever_eigenvectors_a_processor_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal correlations leave all eigenvectors but one open: these are turned."""
    event = alone(6, 0.8, 0.4)
    here = AllocationProfile(event, 0.01)._bounds(2.0, 1e-6)
    honest = np.linalg.eigh

    def turned(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values, axes = honest(matrix)
        angle = 0.7
        turn = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        axes[:, 1:3] = axes[:, 1:3] @ turn
        return values, -axes

    monkeypatch.setattr(np.linalg, "eigh", turned)
    elsewhere = AllocationProfile(event, 0.01)._bounds(2.0, 1e-6)
    assert elsewhere == pytest.approx(here, rel=1e-9)


@pytest.mark.parametrize("noise", [0.05, 0.02, 1e-3])
def test_next_to_no_noise_costs_what_the_gaussian_of_a_told_bin_costs(noise: float) -> None:
    found = compute_epsilon(alone(3, noise), DELTA, "add-or-remove-one").epsilon
    assert found == pytest.approx(gdp_epsilon(1 / noise, DELTA), rel=1e-6)


def test_more_bins_more_noise_and_less_correlation_cost_less() -> None:
    events = [alone(2, 1.0), alone(8, 1.0), alone(32, 1.0)]
    epsilons = [compute_epsilon(event, DELTA, "zero-out").epsilon for event in events]
    assert gdp_epsilon(1.0, DELTA) > epsilons[0] > epsilons[1] > epsilons[2]
    sampled = dp_accounting.PoissonSampledDpEvent(1 / 8, dp_accounting.GaussianDpEvent(1.0))
    poisson = compute_epsilon(
        dp_accounting.SelfComposedDpEvent(sampled, 8), DELTA, "zero-out"
    ).epsilon
    assert epsilons[1] < poisson  # as Chua et al. 2025 find
    assert compute_epsilon(alone(8, 1.0, 0.5), DELTA, "zero-out").epsilon > epsilons[1]
    delta = compute_delta(events[1], epsilons[1], "zero-out").delta
    assert 0.8 * DELTA <= delta <= 1.5 * DELTA


def test_in_company_and_under_replace_one_it_is_the_gaussian_of_a_told_bin() -> None:
    event = alone(8, 1.0)
    twice = dp_accounting.SelfComposedDpEvent(event, 2)
    assert compute_epsilon(twice, DELTA, "zero-out").epsilon == pytest.approx(
        gdp_epsilon(math.sqrt(2), DELTA)
    )
    assert compute_epsilon(event, DELTA, "replace-one").epsilon == pytest.approx(
        gdp_epsilon(2.0, DELTA)
    )
    assert renyi_divergence(event, 3.0, "zero-out") == pytest.approx(1.5)


def test_it_survives_json_and_repeats() -> None:
    event = BallsInBinsDpEvent(0.7, (1.0, 0.25, 0.0), 1 << 12)
    assert event_from_json(event_to_json(event)) == event
    assert AllocationProfile(event, DELTA).epsilon(DELTA) == AllocationProfile(
        event, DELTA
    ).epsilon(DELTA)


def test_chances_of_the_conditional_sampling_are_right() -> None:
    bins = Bins(alone(4, 1.0, 0.3))
    weighted = bins.present(200_000, 2.0)
    rng = np.random.default_rng(1)
    gram = bins.covariance
    a = rng.standard_normal((400_000, 4)) @ np.linalg.cholesky(gram).T - 0.5
    a += gram[rng.integers(4, size=400_000)]
    exceeded = (a > 2.0).any(1)
    chance = exceeded.mean()
    assert np.exp(weighted.weights).mean() == pytest.approx(chance, rel=0.02)
    means = np.exp(weighted.weights) * weighted.ratios
    log_ratio = np.log(np.exp(a).mean(1))
    assert means.mean() == pytest.approx((log_ratio * exceeded).mean(), rel=0.02)


def test_the_confidence_bound_covers_rare_large_values() -> None:
    """One value in a thousand: the mean of draws that missed it is no bound."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        hits = rng.random(2000) < 1e-3
        assert upper_confidence_bound(hits[hits].astype(float), 2000, 1.0, 1e-4) >= 1e-3
