"""Lower bounds from attacks: against closed forms, published numbers, and simulated attacks of
known strength.
"""

import math

import numpy as np
import pytest
from scipy.stats import beta, binom, norm

from dpoptim.accounting import compute_epsilon, gdp_epsilon, tradeoff_curve
from dpoptim.audit.bounds import (
    Errors,
    clopper_pearson_lower,
    clopper_pearson_upper,
    epsilon_lower_bound,
    gdp_lower_bound,
)
from dpoptim.audit.sampled_gaussians import SampledGaussians, attainable_errors, choose_threshold


@pytest.mark.parametrize(
    ("count", "trials"), [(0, 10), (3, 10), (9, 10), (120, 5000), (0, 100_000)]
)
@pytest.mark.parametrize("failure", [0.05, 1e-6])
def test_clopper_pearson_inverts_the_binomial(count: int, trials: int, failure: float) -> None:
    upper = float(clopper_pearson_upper(count, trials, failure))
    assert upper == pytest.approx(beta.ppf(1 - failure, count + 1, trials - count), rel=1e-9)
    assert binom.cdf(count, trials, upper) == pytest.approx(failure, rel=1e-6)
    if count:
        lower = float(clopper_pearson_lower(count, trials, failure))
        assert binom.sf(count - 1, trials, lower) == pytest.approx(failure, rel=1e-6)


def test_clopper_pearson_at_the_ends() -> None:
    assert float(clopper_pearson_upper(7, 7, 0.05)) == 1
    assert float(clopper_pearson_lower(0, 7, 0.05)) == 0
    # No success in n trials: 1 - failure^(1/n).
    assert float(clopper_pearson_upper(0, 100, 0.05)) == pytest.approx(1 - 0.05**0.01)


def test_clopper_pearson_covers() -> None:
    """Exactly: the probability that the bound is below the rate, summed over all counts, is at
    most the failure.
    """
    n, failure = 60, 0.05
    counts = np.arange(n + 1)
    upper = clopper_pearson_upper(counts, n, failure)
    for rate in np.linspace(0.01, 0.99, 37):
        assert binom.pmf(counts[upper < rate], n, rate).sum() <= failure


def test_epsilon_bound_in_both_directions() -> None:
    """Perfect attacks on one side only: ln((1 - delta - FPR) / FNR) and its mirror image."""
    few, many = Errors(5, 1000, 500, 1000), Errors(500, 1000, 5, 1000)
    fpr, fnr = few.upper_bounds(0.95)
    expected = math.log((1 - 1e-3 - fnr) / fpr)
    assert epsilon_lower_bound(few, 1e-3, 0.95) == pytest.approx(expected)
    assert epsilon_lower_bound(many, 1e-3, 0.95) == pytest.approx(expected)
    assert epsilon_lower_bound(Errors(500, 1000, 500, 1000), 1e-3, 0.95) == 0


def test_gdp_bound_is_the_distance_of_the_normal_quantiles() -> None:
    errors = Errors(100, 10_000, 300, 10_000)
    fpr, fnr = errors.upper_bounds(0.9)
    assert gdp_lower_bound(errors, 0.9) == pytest.approx(norm.isf(fpr) - norm.ppf(fnr))
    assert gdp_lower_bound(Errors(9, 10, 9, 10), 0.9) == 0


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0, 4.0])
def test_a_gaussian_attack_with_many_trials_is_near_the_truth(mu: float) -> None:
    family = SampledGaussians(1.0, 3)
    errors = attainable_errors(family.tradeoff(math.sqrt(3) / mu), 10**7, 0.95)
    found = gdp_lower_bound(errors, 0.95)
    assert 0.99 * mu <= found <= mu
    assert family.lower_bound(errors, 1e-5, 0.95) == pytest.approx(gdp_epsilon(found, 1e-5))
    assert epsilon_lower_bound(errors, 1e-5, 0.95) <= gdp_epsilon(mu, 1e-5)


@pytest.mark.set_aside("replace-one", "zero-out")
@pytest.mark.parametrize("neighboring", ["add-or-remove-one", "replace-one", "zero-out"])
def test_the_family_bound_finds_the_noise_back(neighboring: str) -> None:
    """From points on the exact trade-off curve of a member, with nearly unlimited trials: its
    epsilon, from below.
    """
    family = SampledGaussians(0.05, 200, neighboring)
    errors = attainable_errors(family.tradeoff(0.9), 10**8, 0.95)
    epsilon = compute_epsilon(family.event(0.9), 1e-5, neighboring).epsilon
    assert 0.98 * epsilon <= family.lower_bound(errors, 1e-5, 0.95) <= epsilon


def test_full_batches_agree_with_the_closed_form() -> None:
    """The curve of q = 1 against the accountant's own bound on it, under every relation."""
    for neighboring in ("add-or-remove-one", "replace-one", "zero-out"):
        family = SampledGaussians(1.0, 4, neighboring)
        curve = family.tradeoff(2.0)
        bound = tradeoff_curve(family.event(2.0), neighboring, curve.false_positive_rates)
        assert np.all(bound <= curve.false_negative_rates + 1e-12)
        np.testing.assert_allclose(bound, curve.false_negative_rates, rtol=0, atol=2e-3)


@pytest.mark.variants
def test_the_design_figures_of_a_subsampled_audit() -> None:
    """q=0.01, sigma=1, T=1000, delta=1e-5: true 1.83; 20,000 trials a world show about 1.60,
    100,000 about 1.70.
    """
    family = SampledGaussians(0.01, 1000)
    assert compute_epsilon(family.event(1.0), 1e-5, "add-or-remove-one").epsilon == pytest.approx(
        1.83, abs=0.005
    )
    for trials, shown in ((20_000, 1.60), (100_000, 1.72)):
        errors = attainable_errors(family.tradeoff(1.0), trials, 0.95)
        assert family.lower_bound(errors, 1e-5, 0.95) == pytest.approx(shown, abs=0.03)


def test_nothing_is_shown_by_guessing() -> None:
    errors = Errors(5000, 10_000, 5000, 10_000)
    assert SampledGaussians(0.01, 1000).lower_bound(errors, 1e-5, 0.95) == 0
    assert epsilon_lower_bound(errors, 1e-5, 0.95) == 0


def test_the_bound_fails_no_oftener_than_it_says() -> None:
    """2,000 attacks on an exact 1-GDP mechanism; a bound at 95 % may exceed mu in at most 5 %.

    False alarm of this test: Binomial(2000, 0.05) above 150 has probability below 1e-6.
    """
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(2000):
        false_positives = rng.binomial(4000, norm.sf(0.7))
        false_negatives = rng.binomial(4000, norm.cdf(0.7 - 1.0))
        wrong += (
            gdp_lower_bound(Errors(int(false_positives), 4000, int(false_negatives), 4000), 0.95)
            > 1.0
        )
    assert wrong <= 150


def test_the_threshold_splits_shifted_normals_well() -> None:
    """A fresh sample at the chosen threshold certifies nearly what the best threshold would."""
    rng = np.random.default_rng(1)
    # another mu than the attack's: the choice does not need it
    claim = SampledGaussians(1.0, 1).tradeoff(1.0)
    threshold = choose_threshold(rng.normal(size=5000), rng.normal(3, 1, size=5000), 0.95, claim)
    n = 100_000
    exact = Errors(round(n * norm.sf(threshold)), n, round(n * norm.cdf(threshold - 3)), n)
    assert gdp_lower_bound(exact, 0.95) > 2.95


@pytest.mark.parametrize(
    "counts", [(-1, 10, 0, 10), (11, 10, 0, 10), (0, 0, 0, 10), (0, 10, 11, 10)]
)
def test_impossible_counts_are_refused(counts: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="counts"):
        Errors(*counts)


@pytest.mark.parametrize("confidence", [0.0, 1.0, math.nan])
def test_impossible_confidences_are_refused(confidence: float) -> None:
    with pytest.raises(ValueError, match="confidence"):
        gdp_lower_bound(Errors(1, 10, 1, 10), confidence)
