"""The price of b-min-sep sampling: against sums over all patterns, and exact profiles."""

import itertools
import math

import dp_accounting
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from dpoptim.accounting import compute_delta, compute_epsilon, gdp_epsilon
from dpoptim.accounting.event_json import event_from_json, event_to_json
from dpoptim.accounting.min_separation import (
    MinSeparationDpEvent,
    Outputs,
    SeparationProfile,
    chains,
    estimated_epsilon,
    lower_tail,
    normal_delta,
    renyi_epsilon,
)
from dpoptim.accounting.replicas import Replicas, states_of

DELTA = 1e-5
SAMPLES = 1 << 13


def patterns(steps: int, separation: int, rate: float) -> dict[tuple[int, ...], float]:
    """Chances of the sets of steps that a record takes part in, by following its coins."""
    found: dict[tuple[int, ...], float] = {}
    share = 1 / (1 + (separation - 1) * rate)
    for wait in range(separation):
        for coins in itertools.product((False, True), repeat=steps):
            chance, free, taken = share * (rate if wait else 1.0), wait, []
            for step, heads in enumerate(coins):
                if step < free:
                    chance *= 0.0 if heads else 1.0
                    continue
                chance *= rate if heads else 1 - rate
                if heads:
                    taken.append(step)
                    free = step + separation
            if chance > 0:
                found[tuple(taken)] = found.get(tuple(taken), 0.0) + chance
    assert math.isclose(sum(found.values()), 1.0)
    return found


def means(columns: np.ndarray, sets: dict[tuple[int, ...], float]) -> np.ndarray:
    """Sums of the patterns' columns; shape (patterns, steps)."""
    return np.array([columns[:, list(taken)].sum(1) for taken in sets])


@st.composite
def events(draw: st.DrawFn, steps: int = 7) -> MinSeparationDpEvent:
    separation = draw(st.integers(1, 4))
    entries = st.floats(0.05, 1.0)
    column = draw(st.lists(entries, min_size=1, max_size=separation))
    levels = draw(st.lists(entries, min_size=1, max_size=steps))
    rate = draw(st.floats(0.05, 1.0))
    noise = draw(st.floats(0.5, 3.0))
    lengths = (1,) * len(levels)
    return MinSeparationDpEvent(
        noise, tuple(column), tuple(levels), lengths, rate, separation, SAMPLES
    )


def entry_by_entry(event: MinSeparationDpEvent) -> np.ndarray:
    """The columns as the event states them; shape (steps, steps)."""
    rows = [level for level, n in zip(event.levels, event.lengths, strict=True) for _ in range(n)]
    columns = np.zeros((event.steps, event.steps))
    for t, k in itertools.product(range(event.steps), range(len(event.column))):
        if t + k < event.steps:
            columns[t + k, t] = math.sqrt(rows[t + k]) * event.column[k]
    return columns


@settings(max_examples=60)
@given(events(), st.integers(0, 1000))
def test_the_ratio_is_the_sum_over_all_patterns(event: MinSeparationDpEvent, seed: int) -> None:
    outputs = 2 * np.random.default_rng(seed).standard_normal((event.steps, 3))
    sets = patterns(event.steps, event.separation, event.rate)
    shifts = means(entry_by_entry(event), sets) / event.noise_multiplier
    exponents = shifts @ outputs - np.square(shifts).sum(1)[:, None] / 2
    weights = np.array(list(sets.values()))[:, None]
    expected = logsumexp(exponents, axis=0, b=weights)
    np.testing.assert_allclose(Outputs(event)._log_ratios(outputs), expected, atol=1e-11)


@settings(max_examples=30)
@given(events(steps=5), st.integers(1, 3))
def test_the_moment_is_the_sum_over_all_tuples(event: MinSeparationDpEvent, copies: int) -> None:
    sets = patterns(event.steps, event.separation, event.rate)
    shifts = means(entry_by_entry(event), sets) / event.noise_multiplier
    gram, chances = shifts @ shifts.T, np.array(list(sets.values()))
    total = np.zeros((len(sets),) * copies)
    for i, j in itertools.combinations(range(copies), 2):
        total = total + np.expand_dims(gram, [k for k in range(copies) if k not in (i, j)])
    for k in range(copies):
        total = total + np.expand_dims(np.log(chances), [i for i in range(copies) if i != k])
    found = Replicas(copies, event.rate, event.products).log_moment
    assert found == pytest.approx(float(logsumexp(total)), abs=1e-9)


def test_tuples_are_drawn_by_their_weights() -> None:
    event = MinSeparationDpEvent(0.9, (1.0, 0.6), (1.0,), (4,), 0.4, 2)
    sets = patterns(4, 2, 0.4)
    shifts = means(entry_by_entry(event), sets) / 0.9
    weights = np.exp(shifts @ shifts.T) * np.outer(list(sets.values()), list(sets.values()))
    expected: dict[tuple[int, ...], float] = {}
    for i, j in itertools.product(range(len(sets)), repeat=2):
        together = [0] * 4
        for step in list(sets)[i] + list(sets)[j]:
            together[step] += 1
        key = tuple(together)
        expected[key] = expected.get(key, 0.0) + float(weights[i, j] / weights.sum())
    replicas = Replicas(2, 0.4, event.products)
    drawn = replicas.draw(100_000, np.random.default_rng(3)).toarray()
    kinds, counts = np.unique(drawn, axis=0, return_counts=True)
    found = dict(zip(map(tuple, kinds.tolist()), counts.tolist(), strict=True))
    assert set(found) <= {key for key, chance in expected.items() if chance > 0}
    for key, chance in expected.items():
        deviation = math.sqrt(chance * (1 - chance) * 100_000)
        assert abs(found.get(key, 0) - chance * 100_000) <= 5 * deviation + 1


def exact_deltas(event: MinSeparationDpEvent, epsilon: float) -> tuple[float, float]:
    """Both directions' deltas of at most two steps, by integration on a grid."""
    sets = patterns(event.steps, event.separation, event.rate)
    shifts = means(entry_by_entry(event), sets) / event.noise_multiplier
    axis = np.linspace(-9, 15, 2401)
    grids = np.meshgrid(*[axis] * event.steps, indexing="ij")
    outputs = np.stack([grid.ravel() for grid in grids])
    absent = (
        np.exp(-np.square(outputs).sum(0) / 2)
        * ((axis[1] - axis[0]) / math.sqrt(2 * math.pi)) ** event.steps
    )
    present = np.zeros_like(absent)
    for chance, shift in zip(sets.values(), shifts, strict=True):
        present += chance * absent * np.exp(shift @ outputs - shift @ shift / 2)
    factor = math.exp(epsilon)
    return (
        float(np.maximum(present - factor * absent, 0).sum()),
        float(np.maximum(absent - factor * present, 0).sum()),
    )


@pytest.mark.set_aside("two steps")
@pytest.mark.parametrize(
    ("event", "least"),
    [
        (MinSeparationDpEvent(0.7, (1.0,), (1.0,), (1,), 0.2, 1), 0.75),
        (MinSeparationDpEvent(0.8, (0.8, 0.6), (1.0,), (2,), 0.3, 2), 0.75),
        (MinSeparationDpEvent(0.8, (1.0,), (1.0, 0.5), (1, 1), 0.3, 1), 0.75),
        # no amplification is left, and the straight line costs 7 % of epsilon
        (MinSeparationDpEvent(1.0, (0.9, 0.5), (0.7, 1.0), (1, 1), 1.0, 2), 0.2),
    ],
    ids=["one step", "two bands", "two steps", "all coins heads"],
)
def test_bounds_are_above_the_integral_and_near_it(
    event: MinSeparationDpEvent, least: float
) -> None:
    profile = SeparationProfile(event, DELTA)
    epsilon = profile.epsilon(DELTA)
    deltas = exact_deltas(event, epsilon)
    for true, bound in zip(deltas, profile._bounds(epsilon, 1e-9), strict=True):
        assert true <= bound <= DELTA
    assert max(deltas) >= least * DELTA


@pytest.mark.parametrize(("steps", "rate", "noise"), [(1, 0.1, 0.5), (200, 0.01, 0.7)])
def test_without_separation_it_is_poisson_sampling(steps: int, rate: float, noise: float) -> None:
    event = MinSeparationDpEvent(noise, (1.0,), (1.0,), (steps,), rate, 1)
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    poisson = dp_accounting.SelfComposedDpEvent(step, steps)
    exact = compute_epsilon(poisson, DELTA, "zero-out").epsilon
    found = compute_epsilon(event, DELTA, "zero-out")
    assert exact * 0.999 <= found.epsilon <= 1.03 * exact
    assert found.accountant == "Monte Carlo"


def test_the_bound_is_above_plain_sampling_of_patterns() -> None:
    event = MinSeparationDpEvent(0.7, (0.8, 0.5, 0.33), (1.0,), (30,), 0.15, 3, 1 << 14)
    rng, draws, epsilon = np.random.default_rng(5), 100_000, 4.0
    free = np.where(rng.random(draws) < 0.3 / 1.3, rng.integers(1, 3, draws), 0)
    taken = np.zeros((30, draws))
    for step in range(30):
        taken[step] = (rng.random(draws) < 0.15) & (free <= step)
        free = np.where(taken[step] > 0, step + 3, free)
    outputs = rng.standard_normal((30, draws))
    ratios = Outputs(event)._log_ratios
    present = ratios(event.columns @ taken / 0.7 + outputs)
    absent = ratios(outputs)
    truths = (
        np.maximum(0, -np.expm1(epsilon - present)).mean(),
        np.maximum(0, -np.expm1(epsilon + absent)).mean(),
    )
    bounds = SeparationProfile(event, 1e-3)._bounds(epsilon, 1e-6)
    assert 0.95 * truths[0] <= bounds[0] <= 1.25 * truths[0]
    assert 0.9 * truths[1] <= bounds[1] <= truths[1] + 5e-4
    # 1 / L has mean 1 where the record is, and L where it is not: the recursion's own law
    assert np.exp(-present).mean() == pytest.approx(1.0, abs=0.02)
    assert np.exp(absent).mean() == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("mu", [0.5, 2.0])
def test_the_lower_tail_of_a_normal_ratio_is_bounded_and_nearly_met(mu: float) -> None:
    """Linear ratios are where the straight line is the truth."""
    bounds = []
    for seed in range(20):
        ratios = np.sort(np.random.default_rng(seed).normal(-(mu**2) / 2, mu, 1 << 14))
        epsilon = gdp_epsilon(mu, DELTA)
        bounds.append(lower_tail(ratios, epsilon, 1e-3))
    assert min(bounds) >= DELTA
    assert np.median(bounds) <= 4 * DELTA
    assert normal_delta(epsilon, mu / 2, 1 / mu) == pytest.approx(DELTA, rel=1e-6)
    cubed = np.sort(np.exp(np.random.default_rng(0).normal(0, 0.5, 1 << 14)) - 1.5)
    assert lower_tail(cubed, 1.0, 1e-6) == pytest.approx(
        np.maximum(0, -np.expm1(cubed + 1.0)).mean(), abs=0.02
    )


def test_more_noise_and_fewer_participations_cost_less() -> None:
    def cost(noise: float, rate: float, gap: int) -> float:
        event = MinSeparationDpEvent(noise, (0.8, 0.6), (1.0,), (40,), rate, gap, SAMPLES)
        return compute_epsilon(event, DELTA, "add-or-remove-one").epsilon

    assert cost(1.0, 0.05, 2) < cost(0.8, 0.05, 2) < cost(0.8, 0.1, 2)
    assert cost(0.8, 0.1, 4) < cost(0.8, 0.1, 2)


def test_in_company_and_under_replace_one_it_is_the_gaussian_of_told_coins() -> None:
    event = MinSeparationDpEvent(1.0, (0.8, 0.6), (1.0,), (4,), 0.2, 2, SAMPLES)
    assert event.mu == pytest.approx(math.sqrt(2))
    twice = dp_accounting.SelfComposedDpEvent(event, 2)
    assert compute_epsilon(twice, DELTA, "zero-out").epsilon == pytest.approx(
        gdp_epsilon(2.0, DELTA)
    )
    assert compute_epsilon(event, DELTA, "replace-one").epsilon == pytest.approx(
        gdp_epsilon(2 * math.sqrt(2), DELTA)
    )
    delta = compute_delta(event, compute_epsilon(event, DELTA, "zero-out").epsilon, "zero-out")
    assert 0.8 * DELTA <= delta.delta <= 1.5 * DELTA


def test_many_copies_are_drawn_where_epsilon_is_small() -> None:
    event = MinSeparationDpEvent(2.0, (0.8, 0.6), (1.0,), (60,), 0.05, 2, SAMPLES)
    found = chains(event, DELTA)
    bounds = [renyi_epsilon(one, DELTA) for one in found]
    assert [one.copies for one in found][-1] > 8
    assert min(bounds) in bounds[-2:]  # one more was no better, or would take too long
    profile = SeparationProfile(event, DELTA)
    assert profile.epsilon(DELTA) <= min(bounds)
    assert estimated_epsilon(event, DELTA) == pytest.approx(profile.epsilon(DELTA), rel=0.1)


def test_it_survives_json_repeats_and_refuses_nonsense() -> None:
    event = MinSeparationDpEvent(1.0, (0.8, 0.6), (1.0, 0.5), (3, 1), 0.2, 2, SAMPLES)
    assert event_from_json(event_to_json(event)) == event
    first, second = (SeparationProfile(event, DELTA).epsilon(DELTA) for _ in range(2))
    assert first == second
    assert states_of(2, 4) == 10
    with pytest.raises(ValueError, match="separation=1"):
        MinSeparationDpEvent(1.0, (0.8, 0.6), (1.0,), (4,), 0.2, 1)
    with pytest.raises(ValueError, match=">= 0"):
        MinSeparationDpEvent(1.0, (0.8, -0.6), (1.0,), (4,), 0.2, 2)


def test_too_little_noise_costs_what_told_coins_cost() -> None:
    event = MinSeparationDpEvent(0.05, (1.0,), (1.0,), (4,), 0.2, 1, SAMPLES)
    assert compute_epsilon(event, DELTA, "zero-out").epsilon == pytest.approx(
        gdp_epsilon(event.mu, DELTA)
    )
