"""What events cost: against published values, independent integrals, closed forms and limits."""

import logging
import math
import re

import dp_accounting as dp
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate
from scipy.stats import norm

from dpoptim.accounting import (
    compute_delta,
    compute_epsilon,
    gdp_delta,
    gdp_epsilon,
    gdp_mu,
    privacy_curve,
    renyi_divergence,
    tradeoff_curve,
)
from dpoptim.accounting.canonical import canonical
from dpoptim.accounting.choose_profile import pure_epsilon
from dpoptim.accounting.guarantee import parse_neighboring as dp_relation

RELATIONS = ["add-or-remove-one", "zero-out", "replace-one"]
SENSITIVITIES = [("add-or-remove-one", 1), ("zero-out", 1), ("replace-one", 2)]
Gaussian, Laplace, ZCDp = dp.GaussianDpEvent, dp.LaplaceDpEvent, dp.ZCDpEvent
Sampled, Repeated, Composed = dp.PoissonSampledDpEvent, dp.SelfComposedDpEvent, dp.ComposedDpEvent


def dp_sgd(rate, noise, steps):
    return Repeated(Sampled(rate, Gaussian(noise)), steps)


# --- Values computed elsewhere -------------------------------------------------------------------


@pytest.mark.set_aside("0.6-100000-114.8", "1.0-100000-27.67", "2.0-100000-8.985")
@pytest.mark.parametrize(
    ("noise", "steps", "expected"),
    [
        (0.6, 1_000, 8.711),
        (0.6, 10_000, 25.44),
        (0.6, 100_000, 114.8),
        (1.0, 1_000, 2.125),
        (1.0, 10_000, 6.907),
        (1.0, 100_000, 27.67),
        (2.0, 1_000, 0.721),
        (2.0, 10_000, 2.447),
        (2.0, 100_000, 8.985),
    ],
)
def test_reference_table(noise, steps, expected):
    found = compute_epsilon(dp_sgd(0.01, noise, steps), 1e-6, "add-or-remove-one")
    assert found.accountant == "PLD"
    assert found.epsilon == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize(("accountant", "expected"), [("PLD", 3.171), ("RDP", 3.459)])
def test_reference_run(accountant, expected):
    event = dp_sgd(500 / 60_000, 1.1, 6_000)
    found = compute_epsilon(event, 1e-5, "zero-out", accountant=accountant)
    assert found.accountant == accountant
    assert found.epsilon == pytest.approx(expected, rel=5e-3)


# --- Independent integrals -----------------------------------------------------------------------


def one_step_delta(rate, noise, epsilon, direction):
    """Hockey-stick divergence of one sampled step, by adaptive quadrature in 30 digits
    (mpmath).
    """
    with mpmath.workdps(30):
        q, s, e = mpmath.mpf(rate), mpmath.mpf(noise), mpmath.exp(mpmath.mpf(epsilon))

        def without(x):
            return mpmath.npdf(x, 0, s)

        def within(x):
            return (1 - q) * mpmath.npdf(x, 0, s) + q * mpmath.npdf(x, 1, s)

        # within / without rises with x; it passes e^epsilon (or e^-epsilon) at the threshold.
        ratio = e if direction == "remove" else 1 / e
        if ratio <= 1 - q:  # never reached: within is nowhere that much smaller
            return 0.0
        threshold = s**2 * mpmath.log((ratio - 1 + q) / q) + mpmath.mpf(1) / 2
        pieces = [threshold + k * s for k in range(41)]
        if direction == "remove":
            return float(mpmath.quad(lambda x: within(x) - e * without(x), pieces))
        pieces = [threshold - k * s for k in range(40, -1, -1)]
        return float(mpmath.quad(lambda x: without(x) - e * within(x), pieces))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("rate", "noise", "epsilon"),
    [
        (0.001, 0.7, 0.02),
        (0.001, 0.7, 0.5),
        (0.001, 2.0, 0.003),
        (0.3, 0.7, 0.02),
        (0.3, 2.0, 0.5),
        (0.9, 1.0, 2.0),
    ],
)
def test_one_sampled_step_against_quadrature(rate, noise, epsilon):
    delta = max(one_step_delta(rate, noise, epsilon, direction) for direction in ("remove", "add"))
    found = compute_epsilon(dp_sgd(rate, noise, 1), delta, "add-or-remove-one").epsilon
    assert epsilon <= found <= 1.002 * epsilon
    found = compute_delta(dp_sgd(rate, noise, 1), epsilon, "add-or-remove-one").delta
    assert delta <= found <= 1.02 * delta + 2e-14


def test_the_two_directions_differ_and_the_larger_counts():
    remove, add = (one_step_delta(0.3, 0.7, 0.25, direction) for direction in ("remove", "add"))
    assert remove > 1.1 * add > 0
    assert compute_delta(dp_sgd(0.3, 0.7, 1), 0.25, "zero-out").delta >= remove


@pytest.mark.parametrize(("rate", "noise", "epsilon"), [(0.1, 0.8, 1.0), (0.5, 2.0, 0.4)])
def test_two_sampled_steps_against_quadrature(rate, noise, epsilon):
    """delta_2(epsilon) = E over the first output x of delta_1(epsilon - loss(x)), in closed form
    inside.
    """

    def closed_form(e):  # removal: (1 - rate) N(0) + rate N(1) against N(0), any real e
        if math.exp(e) <= 1 - rate:
            return 1 - math.exp(e)
        threshold = noise**2 * math.log((math.exp(e) - 1 + rate) / rate) + 0.5
        upper = (1 - rate) * norm.sf(threshold / noise) + rate * norm.sf((threshold - 1) / noise)
        return upper - math.exp(e) * norm.sf(threshold / noise)

    def integrand(x):
        density = (1 - rate) * norm.pdf(x, 0, noise) + rate * norm.pdf(x, 1, noise)
        loss = math.log(1 - rate + rate * math.exp((2 * x - 1) / (2 * noise**2)))
        return density * closed_form(epsilon - loss)

    delta = integrate.quad(integrand, -12 * noise, 1 + 12 * noise, epsabs=1e-13, limit=400)[0]
    found = compute_epsilon(dp_sgd(rate, noise, 2), delta, "zero-out").epsilon
    assert epsilon <= found <= 1.002 * epsilon


@pytest.mark.parametrize(
    ("mu", "epsilon"),
    [(0.01, 0.001), (0.01, 0.1), (0.5, 0.1), (0.5, 1.0), (3.0, 0.1), (3.0, 10.0), (40.0, 900.0)],
)
def test_gaussian_profile_against_high_precision(mu, epsilon):
    with mpmath.workdps(60):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        exact = float(mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m))
    assert gdp_delta(mu, epsilon) == pytest.approx(exact, rel=1e-9)
    assert gdp_epsilon(mu, exact) == pytest.approx(epsilon, rel=1e-9)
    assert gdp_mu(epsilon, exact) == pytest.approx(mu, rel=1e-9)


# --- Gaussians, exactly --------------------------------------------------------------------------


@pytest.mark.parametrize(("relation", "sensitivity"), SENSITIVITIES)
def test_full_batches_use_the_exact_profile(relation, sensitivity):
    event = Composed([Repeated(Gaussian(8.0), 9), Sampled(1.0, Gaussian(6.0)), dp.NoOpDpEvent()])
    mu = sensitivity * math.sqrt(9 / 64 + 1 / 36)
    found = compute_epsilon(event, 1e-5, relation)
    assert found.accountant == "exact Gaussian"
    assert found.epsilon == pytest.approx(gdp_epsilon(mu, 1e-5), rel=1e-9)
    assert compute_delta(event, found.epsilon, relation).delta <= 1e-5
    discretised = compute_epsilon(event, 1e-5, relation, accountant="PLD").epsilon
    assert found.epsilon <= discretised <= 1.002 * found.epsilon


def test_replace_one_means_twice_the_sensitivity_in_every_accountant():
    event = Gaussian(2.0)
    epsilons = {
        name: compute_epsilon(event, 1e-5, "replace-one", accountant=name).epsilon
        for name in ("auto", "PLD", "RDP")
    }
    # 2.17, at best, with the wrong scale
    assert epsilons["auto"] == pytest.approx(4.377, abs=1e-3)
    assert epsilons["auto"] <= epsilons["PLD"] <= 1.002 * epsilons["auto"]
    assert epsilons["auto"] <= epsilons["RDP"] <= 1.1 * epsilons["auto"]
    for name in ("auto", "PLD", "RDP"):
        half = compute_epsilon(Gaussian(1.0), 1e-5, "zero-out", accountant=name).epsilon
        assert epsilons[name] == pytest.approx(half, rel=2e-3)


def test_the_scale_reaches_gaussians_inside_compositions():
    nested = Repeated(Composed([Gaussian(4.0), Repeated(Gaussian(4.0), 3)]), 2)
    found = compute_epsilon(nested, 1e-5, "replace-one", accountant="RDP").epsilon
    expected = compute_epsilon(Gaussian(4 / 8**0.5 / 2), 1e-5, "zero-out", accountant="RDP").epsilon
    assert found == pytest.approx(expected, rel=1e-9)


# --- Relations, composition, limits --------------------------------------------------------------


def test_relations_of_a_sampled_run():
    event = dp_sgd(0.02, 1.0, 500)
    add, zero, replace = (compute_epsilon(event, 1e-6, relation).epsilon for relation in RELATIONS)
    assert add == zero
    assert zero < replace < compute_epsilon(dp_sgd(0.02, 0.5, 500), 1e-6, "zero-out").epsilon


def test_equal_events_merge_in_any_order_and_nesting():
    a, b = Sampled(0.01, Gaussian(1.0)), Sampled(0.02, Gaussian(1.5))
    expected = compute_epsilon(Composed([Repeated(a, 6), Repeated(b, 4)]), 1e-6, "zero-out")
    shuffled = Composed([b, a, Repeated(Composed([a, a, b]), 2), a, b])
    assert compute_epsilon(shuffled, 1e-6, "zero-out") == expected


def test_two_gaussians_on_one_batch_are_one_gaussian():
    pair = Sampled(0.02, Composed([Gaussian(1.25), Gaussian(5 / 3)]))
    single = Sampled(0.02, Gaussian(1.0))
    assert compute_epsilon(Repeated(pair, 50), 1e-6, "zero-out").epsilon == pytest.approx(
        compute_epsilon(Repeated(single, 50), 1e-6, "zero-out").epsilon, rel=1e-9
    )


def test_nothing_released_costs_nothing():
    for event in (
        dp.NoOpDpEvent(),
        Composed([]),
        Repeated(Gaussian(1.0), 0),
        Sampled(0.5, dp.NoOpDpEvent()),
    ):
        assert compute_epsilon(event, 1e-5, "zero-out").epsilon == 0
        assert compute_epsilon(event, 1e-5, "zero-out", accountant="PLD").epsilon == 0
        assert compute_delta(event, 1.0, "zero-out").delta == 0


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_pure_selection_costs_its_epsilon_under_every_relation(relation):
    found = compute_epsilon(Laplace(2.0), 1e-12, relation).epsilon
    assert 0.5 * (1 - 1e-9) <= found <= 0.5 * 1.002
    both = Composed([Laplace(2.0), Gaussian(2.0)])
    gaussian = compute_epsilon(Gaussian(2.0), 1e-5, relation).epsilon
    assert gaussian < compute_epsilon(both, 1e-5, relation).epsilon < gaussian + 0.5


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0, 8.0])
def test_a_pure_event_has_no_delta_at_its_epsilon(noise, relation):
    """And several of them none at the sum: the grid made it 5e-15, and up to 1e-3 too much."""
    assert compute_delta(Laplace(noise), 1 / noise, relation).delta == 0.0
    assert compute_delta(Laplace(noise), 0.99 / noise, relation).delta > 0.001 / noise
    assert compute_epsilon(Laplace(noise), 1e-12, relation).epsilon <= 1 / noise
    several = Repeated(Laplace(noise), 3)
    assert compute_epsilon(several, 1e-12, relation).epsilon <= 3 / noise * (1 + 1e-14)
    assert privacy_curve(several, relation, [1e-12])[0] <= 3 / noise * (1 + 1e-14)


@pytest.mark.parametrize("rate", [1e-6, 1e-3, 0.3])
@pytest.mark.parametrize("noise", [0.01, 1.0, 8.0])
def test_sampling_amplifies_a_pure_event(rate, noise):
    """Exactly, at the worst outcomes of a Laplace with the record and without, in both ways."""
    found = compute_epsilon(Sampled(rate, Laplace(noise)), 1e-12, "add-or-remove-one").epsilon
    with mpmath.workdps(60):
        whole = mpmath.exp(1 / mpmath.mpf(noise))
        exact = [mpmath.log(1 + rate * (whole - 1)), -mpmath.log(1 - rate * (1 - 1 / whole))]
    pure = pure_epsilon(canonical(Sampled(rate, Laplace(noise))), dp_relation("zero-out"))
    assert float(max(exact)) * (1 - 1e-9) <= pure <= float(max(exact)) * (1 + 1e-9)
    assert found <= pure


def test_replaced_records_amplify_no_pure_event():
    """Between records whose outputs are alike, the batch without either may be unlike both."""
    event = canonical(Sampled(0.1, Laplace(1.0)))
    assert pure_epsilon(event, dp_relation("replace-one")) == 1.0


@pytest.mark.set_aside("zero-out")
@pytest.mark.parametrize("relation", RELATIONS)
def test_what_is_hardly_ever_sampled_costs_delta_alone(relation):
    """As few as that took a minute."""
    found = compute_epsilon(dp_sgd(1e-9, 0.3, 50), 1e-7, relation)
    assert found.epsilon == 0.0
    assert compute_epsilon(dp_sgd(1e-9, 0.3, 200), 1e-7, relation).epsilon > 0.0


@pytest.mark.set_aside("1e-05-zero-out")
@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("noise", [pytest.param(1e-3, marks=pytest.mark.variants), 1e-5])
def test_hardly_any_noise_has_a_bound_all_the_same(noise, relation):
    """An OverflowError, before; never less than the loss of a batch that has the record."""
    found = compute_epsilon(dp_sgd(0.1, noise, 3), 1e-5, relation).epsilon
    assert found >= noise**-2 / 2


@pytest.mark.parametrize("noise", [0.005, 0.02, 0.05])
def test_epsilons_of_thousands_keep_to_a_thousandth(noise):
    """Of a batch with the record in it, each step, which no more than a delta of 0.1^3 misses."""
    delta = 1e-5
    found = compute_epsilon(dp_sgd(0.1, noise, 3), delta, "add-or-remove-one").epsilon
    exact = gdp_epsilon(math.sqrt(3) / noise, delta / 0.1**3)
    assert 0 < found - exact - 3 * math.log(0.1) < 1e-3 * found


def test_rdp_steps_in_where_pld_cannot():
    found = compute_epsilon(ZCDp(0.125), 1e-5, "zero-out")
    assert found.accountant == "RDP"
    assert gdp_epsilon(0.5, 1e-5) <= found.epsilon <= 1.15 * gdp_epsilon(0.5, 1e-5)
    with pytest.raises(ValueError, match=r"event: PLD cannot evaluate ZCDpEvent.* under zero-out"):
        compute_epsilon(ZCDp(0.125), 1e-5, "zero-out", accountant="PLD")


def test_deltas_below_the_rounding_of_long_compositions_need_the_tilted_scale():
    event = dp_sgd(0.01, 4.0, 100_000)
    for accountant in ("PLD", "auto"):
        assert compute_epsilon(event, 1e-11, "zero-out", accountant=accountant).accountant == (
            "tilted PLD"
        )
    with pytest.raises(ValueError, match=r"delta: .* rounding errors of PLD over 100000 steps"):
        compute_epsilon(event, 1e-11, "replace-one", accountant="PLD")


@pytest.mark.parametrize(("steps", "delta"), [(100, 1e-12), (10_000, 1e-10), (100_000, 1e-9)])
def test_rounding_of_long_compositions_never_helps(steps, delta):
    """Nearly full sampling costs at most what full batches do, and the numerical answer may not be
    below.
    """
    rate = 1 - 1e-9
    found = compute_epsilon(dp_sgd(rate, 2 * math.sqrt(steps), steps), delta, "zero-out")
    assert found.accountant == "PLD"
    assert 1 - 1e-6 <= found.epsilon / gdp_epsilon(0.5, delta) <= 1.003


@pytest.mark.parametrize("noise", [0.45, 0.5, 0.52, 0.54])
def test_epsilons_beyond_the_range_of_exp_stay_finite(noise):
    """dp_accounting's own search answers inf for some of these."""
    found = compute_epsilon(dp_sgd(0.3, noise, 2_000), 1e-6, "zero-out")
    assert found.accountant == "PLD"
    assert 690 < found.epsilon < gdp_epsilon(2_000**0.5 / noise, 1e-6)


def test_truncated_batches_cost_at_least_as_much():
    event = dp.TruncatedSubsampledGaussianDpEvent(1000, 0.02, 40, 1.0)
    plain = compute_epsilon(dp_sgd(0.02, 1.0, 50), 1e-6, "zero-out").epsilon
    assert (
        0.999 * plain
        <= compute_epsilon(Repeated(event, 50), 1e-6, "zero-out").epsilon
        <= 1.2 * plain
    )


@settings(max_examples=12)
@given(
    rate=st.floats(0.001, 0.5),
    noise=st.floats(0.5, 5.0),
    steps=st.integers(1, 2000),
    factor=st.floats(1.05, 3.0),
    relation=st.sampled_from(RELATIONS),
)
def test_more_noise_fewer_steps_lower_rate_never_cost_more(rate, noise, steps, factor, relation):
    def epsilon(*arguments, delta=1e-6):
        return compute_epsilon(dp_sgd(*arguments), delta, relation).epsilon

    here = epsilon(rate, noise, steps) * 1.002  # the discretisation's own tolerance
    assert epsilon(rate, noise * factor, steps) <= here
    assert epsilon(rate / factor, noise, steps) <= here
    assert epsilon(rate, noise, max(1, int(steps / factor))) <= here
    assert epsilon(rate, noise, steps, delta=factor * 1e-6) <= here


# --- Curves --------------------------------------------------------------------------------------


def test_curve_agrees_with_single_evaluations():
    event, deltas = dp_sgd(0.01, 1.0, 1000), np.array([1e-3, 1e-9, 1e-5])
    curve = privacy_curve(event, "zero-out", deltas)
    single = [compute_epsilon(event, delta, "zero-out").epsilon for delta in deltas]
    assert curve == pytest.approx(single, rel=2e-3)


def test_delta_inverts_epsilon():
    event = dp_sgd(0.01, 1.0, 1000)
    epsilon = compute_epsilon(event, 1e-6, "zero-out").epsilon
    found = compute_delta(event, epsilon, "zero-out")
    assert found.epsilon == epsilon
    assert found.delta == pytest.approx(1e-6, rel=0.02)


RATES = np.array([0.0, 1e-4, 0.01, 0.1, 0.5, 0.9, 1.0])


def test_tradeoff_of_a_gaussian_is_the_gdp_curve_from_below():
    exact = norm.cdf(norm.isf(RATES) - 1)
    bound = tradeoff_curve(Gaussian(1.0), "zero-out", RATES)
    assert np.all(bound <= exact + 1e-12)
    assert bound == pytest.approx(exact, abs=1e-3)


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_tradeoff_bounds_the_best_attack_on_one_sampled_step(direction):
    rate, noise = 0.3, 0.7
    thresholds = np.linspace(-4, 5, 200)
    without = norm.sf(thresholds / noise)
    within = (1 - rate) * without + rate * norm.sf((thresholds - 1) / noise)
    # The likelihood ratio rises with the output, so thresholds are the best attacks.
    positive, negative = (without, 1 - within) if direction == "remove" else (1 - within, without)
    bound = tradeoff_curve(dp_sgd(rate, noise, 1), "zero-out", positive)
    assert np.all(bound <= negative + 1e-9)
    # Tight for one of the two directions somewhere, hence not an empty statement.
    assert np.max(bound - negative) > -5e-3


def test_tradeoff_keeps_shape_and_refuses_other_numbers():
    assert tradeoff_curve(Gaussian(1.0), "zero-out", 0.5).shape == ()
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="false_positive_rates"):
            tradeoff_curve(Gaussian(1.0), "zero-out", [0.5, wrong])


# --- Renyi divergence ----------------------------------------------------------------------------


@pytest.mark.parametrize(("relation", "sensitivity"), SENSITIVITIES)
def test_renyi_divergence_of_gaussians(relation, sensitivity):
    found = renyi_divergence(Repeated(Gaussian(3.0), 5), 4.0, relation)
    assert found == pytest.approx(5 * 4 * sensitivity**2 / (2 * 9), rel=1e-9)


def test_renyi_divergence_of_a_sampled_step_against_quadrature():
    rate, noise, order = 0.1, 1.0, 6.0

    def integrand(x):
        ratio = 1 - rate + rate * math.exp((2 * x - 1) / (2 * noise**2))
        return norm.pdf(x, 0, noise) * ratio**order

    exact = math.log(integrate.quad(integrand, -20, 30, points=[0, order], limit=400)[0]) / (
        order - 1
    )
    assert renyi_divergence(Sampled(rate, Gaussian(noise)), order, "zero-out") == pytest.approx(
        exact, rel=1e-7
    )


@pytest.mark.parametrize("order", [1.1, 1.5, 1.9])
@pytest.mark.parametrize("rate", [0.25, 0.5])
def test_where_a_series_does_not_converge_the_next_whole_order_bounds(rate, order):
    """Budgets with a large epsilon are kept at orders below 2: a cost without bound would refuse
    every second run.
    """

    def moment(x):  # of the worse direction, under its other law
        return norm.pdf(x) * (1 - rate + rate * np.exp(x - 0.5)) ** order

    moments = integrate.quad(moment, -12, 14, points=[0, 1, 2], limit=500)[0]
    truth = math.log(moments) / (order - 1)
    event = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(1.0))
    found = renyi_divergence(event, order, "add-or-remove-one")
    assert truth <= found <= renyi_divergence(event, 2.0, "add-or-remove-one")
    thrice = renyi_divergence(dp.SelfComposedDpEvent(event, 3), order, "add-or-remove-one")
    assert math.isclose(thrice, 3 * found)


def test_a_series_that_another_bounds_is_not_logged(monkeypatch):
    """The log would say that the order is left out."""
    told = []
    log = logging.getLogger("absl")
    monkeypatch.setattr(
        log, "handle", lambda record: told.append(record) if log.filter(record) else 0
    )
    event = dp.PoissonSampledDpEvent(0.25, dp.GaussianDpEvent(1.0))
    accountant = dp.rdp.RdpAccountant([1.5]).compose(event)
    assert accountant is not None
    assert len(told) == 1
    renyi_divergence(event, 1.5, "add-or-remove-one")
    log.warning("something else")
    assert [record.msg for record in told[1:]] == ["something else"]
    dp.rdp.RdpAccountant([1.5]).compose(event)
    assert len(told) == 3  # the program's own


def test_a_renyi_divergence_that_rounds_to_zero_is_not_perfect_privacy():
    assert renyi_divergence(Sampled(1e-8, Gaussian(100.0)), 2.0, "zero-out") > 0


@pytest.mark.parametrize("order", [1.0, 0.5, math.inf, math.nan])
def test_orders_out_of_range_are_refused(order):
    with pytest.raises(ValueError, match="order"):
        renyi_divergence(Gaussian(1.0), order, "zero-out")


def test_renyi_divergence_says_where_it_has_no_answer():
    with pytest.raises(ValueError, match=r"event: .*(RDP|replace-one)"):
        renyi_divergence(Sampled(0.1, Gaussian(1.0)), 2.0, "replace-one")


# --- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 1e-14, 1e-20, math.nan, math.inf])
def test_deltas_out_of_range_are_refused(delta):
    with pytest.raises(ValueError, match=r"^delta: "):
        compute_epsilon(Gaussian(1.0), delta, "zero-out")
    with pytest.raises(ValueError, match=r"^delta: "):
        privacy_curve(Gaussian(1.0), "zero-out", [1e-5, delta])


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
def test_epsilons_out_of_range_are_refused(epsilon):
    with pytest.raises(ValueError, match=r"^epsilon: "):
        compute_delta(Gaussian(1.0), epsilon, "zero-out")


@pytest.mark.parametrize(
    ("event", "match"),
    [
        (Sampled(1.5, Gaussian(1.0)), "sampling probability"),
        (Sampled(0.0, Gaussian(1.0)), "sampling probability"),
        (Sampled(math.nan, Gaussian(1.0)), "sampling probability"),
        (Gaussian(0.0), "noise multiplier"),
        (Sampled(0.1, Gaussian(-1.0)), "noise multiplier"),
        (Laplace(math.inf), "noise multiplier"),
        (Repeated(Gaussian(1.0), 1.5), "count"),
        (Repeated(Gaussian(1.0), -1), "count"),
        (ZCDp(-1.0), "zCDP"),
        (dp.NonPrivateDpEvent(), "NonPrivateDpEvent"),
        (dp.UnsupportedDpEvent(), "UnsupportedDpEvent"),
        (dp.RandomizedResponseDpEvent(0.5, 2), "RandomizedResponseDpEvent"),
        (
            Composed([Gaussian(1.0), dp.SingleEpochTreeAggregationDpEvent(1.0, [3])]),
            "TreeAggregation",
        ),
    ],
)
def test_events_that_cannot_be_trusted_are_refused(event, match):
    with pytest.raises(ValueError, match=rf"^event: .*{match}"):
        compute_epsilon(event, 1e-5, "zero-out")


def test_a_pure_bound_answers_where_no_accountant_does():
    sampled = Sampled(0.1, Laplace(1.0))
    assert compute_epsilon(sampled, 1e-5, "replace-one").epsilon == pytest.approx(1.0)
    assert compute_epsilon(sampled, 1e-5, "zero-out").epsilon < 0.3


def test_next_to_no_noise_is_no_bare_error():
    with pytest.raises(ValueError, match="noise|event|epsilon"):
        compute_epsilon(Gaussian(1e-170), 1e-5, "zero-out")


@pytest.mark.parametrize(
    ("event", "relation", "said"),
    [
        (
            dp.SampledWithoutReplacementDpEvent(1000, 100, Gaussian(1.0)),
            "zero-out",
            "event: no accountant evaluates SampledWithoutReplacementDpEvent under zero-out; one "
            "does under replace-one. Fix: neighboring='replace-one'.",
        ),
    ],
)
def test_events_that_another_relation_covers_are_refused_with_its_name(event, relation, said):
    """No number of the event: a search for the noise tries some that nobody gave."""
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        compute_epsilon(event, 1e-5, relation)


def test_wrong_types_and_names_are_refused():
    with pytest.raises(TypeError, match="event"):
        compute_epsilon("Gaussian", 1e-5, "zero-out")
    with pytest.raises(ValueError, match="neighboring"):
        compute_epsilon(Gaussian(1.0), 1e-5, "add")
    with pytest.raises(ValueError, match="accountant"):
        compute_epsilon(Gaussian(1.0), 1e-5, "zero-out", accountant="pld")
