"""Tries to get more out of a budgeted ledger than (epsilon, delta).

The references are written from the formulas and share no code with the ledger or the accountants.
"""

from __future__ import annotations

import itertools
import math

import dp_accounting as dp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize
from scipy.stats import norm

from dpoptim.accounting.budget import filter_order
from dpoptim.accounting.ledger import BudgetExceeded, Ledger

# sensitivity over the bound
RELATIONS = {"add-or-remove-one": 1.0, "zero-out": 1.0, "replace-one": 2.0}


def hockey_stick(mu: float, epsilon: float | np.ndarray) -> float | np.ndarray:
    """delta(epsilon) of N(0, 1) against N(mu, 1) (Balle & Wang 2018), for any real epsilon."""
    if mu == 0:
        return np.maximum(0.0, -np.expm1(epsilon))
    tail = norm.logcdf(-mu / 2 - epsilon / mu)
    return norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon + tail)


def renyi_of(event: dp.DpEvent, order: float, sensitivity: float) -> float:
    """The larger Renyi divergence of the two directions, by numerical integration."""
    if isinstance(event, dp.SelfComposedDpEvent):
        return event.count * renyi_of(event.event, order, sensitivity)
    if isinstance(event, dp.GaussianDpEvent):
        return order * (sensitivity / event.noise_multiplier) ** 2 / 2
    if isinstance(event, dp.LaplaceDpEvent):
        loss = 1 / event.noise_multiplier
        up = math.log(order / (2 * order - 1)) + (order - 1) * loss
        down = math.log((order - 1) / (2 * order - 1)) - order * loss
        return float(np.logaddexp(up, down)) / (order - 1)
    assert isinstance(event, dp.PoissonSampledDpEvent)
    rate, noise = event.sampling_probability, event.event.noise_multiplier

    def log_ratio(x: np.ndarray) -> np.ndarray:  # sampled mixture over N(0, noise^2)
        return np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * noise**2))

    x = np.linspace(-40 * noise, 40 * noise + order, 400_001)
    without = norm.logpdf(x, scale=noise)
    ratio = log_ratio(x)
    # Minus one where that matters; far out, where the ratio overflows, in one exponential with the
    # density.
    moments = [
        integrate.simpson(
            np.where(
                power * ratio < 1,
                np.expm1(np.minimum(power * ratio, 1)) * np.exp(without),
                np.exp(power * ratio + without),
            ),
            x=x,
        )
        for power in (order, 1 - order)
    ]
    return max(math.log1p(moment) for moment in moments) / (order - 1)


def epsilon_of_renyi(renyi: float, delta: float, order: float) -> float:
    """The least epsilon for which the tail bound of Canonne, Kamath & Steinke, Prop. 12, is at
    most delta.
    """

    def excess(epsilon: float) -> float:
        log_delta = (
            (order - 1) * (renyi - epsilon) - math.log(order - 1) + order * math.log1p(-1 / order)
        )
        return log_delta - math.log(delta)

    return float(optimize.brentq(excess, -1e3, 1e5, xtol=1e-12))


gaussians = st.floats(1.0, 60.0).map(dp.GaussianDpEvent)
laplaces = st.floats(2.0, 60.0).map(dp.LaplaceDpEvent)
sampled = st.builds(
    lambda rate, noise, steps: dp.SelfComposedDpEvent(
        dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)), steps
    ),
    st.sampled_from([0.001, 0.01, 0.1]),
    st.floats(0.8, 6.0),
    st.integers(1, 200),
)


@settings(max_examples=25)
@given(
    relation=st.sampled_from(sorted(RELATIONS)),
    budget=st.sampled_from([(0.5, 1e-5), (2.0, 1e-5), (8.0, 1e-6)]),
    data=st.data(),
)
def test_admitted_runs_keep_within_the_budget(
    relation: str, budget: tuple[float, float], data: st.DataObject
) -> None:
    epsilon, delta = budget
    kinds = gaussians | laplaces if relation == "replace-one" else gaussians | laplaces | sampled
    events = data.draw(st.lists(kinds, min_size=2, max_size=8))
    ledger = Ledger(epsilon=epsilon, delta=delta, neighboring=relation)
    for event in events:
        before = ledger.entries()
        try:
            ledger.reserve(event, neighboring=relation, label="x")
        except BudgetExceeded:
            assert ledger.entries() == before
    admitted = [entry.event for entry in ledger.entries()]
    if len(admitted) > 1:
        order = filter_order(epsilon, delta)
        total = sum(renyi_of(event, order, RELATIONS[relation]) for event in admitted)
        assert epsilon_of_renyi(total, delta, order) <= epsilon
    noise = [event.noise_multiplier for event in admitted if isinstance(event, dp.GaussianDpEvent)]
    mu = RELATIONS[relation] * math.sqrt(sum(z**-2 for z in noise))
    assert hockey_stick(mu, epsilon) <= delta * (1 + 1e-9)


@settings(max_examples=8)
@given(noises=st.lists(st.floats(1.5, 9.0), min_size=1, max_size=8))
def test_basic_filter_keeps_within_the_budget(noises: list[float]) -> None:
    ledger = Ledger(epsilon=3, delta=1e-5, neighboring="replace-one", filter="basic")
    for noise in noises:
        try:
            ledger.reserve(dp.GaussianDpEvent(noise), neighboring="replace-one", label="x")
        except BudgetExceeded:
            continue
    mus = [2 / entry.event.noise_multiplier for entry in ledger.entries()]
    if len(mus) > 1:
        shares = [
            optimize.brentq(lambda e, mu=mu, i=i: hockey_stick(mu, e) - 1e-5 * 0.5**i, 0, 50)
            for i, mu in enumerate(mus, 1)
        ]
        assert sum(shares) <= 3 + 1e-9
    assert hockey_stick(math.hypot(*mus), 3) <= 1e-5 * (1 + 1e-9)


def largest_second(first: float, epsilon: float, delta: float) -> float:
    """mu of the largest Gaussian run that the ledger admits after one of mu = `first`."""
    ledger = Ledger(epsilon=epsilon, delta=delta)
    ledger.reserve(dp.GaussianDpEvent(1 / first), neighboring="add-or-remove-one", label="first")

    def admitted(mu: float) -> bool:
        try:
            ledger.check(dp.GaussianDpEvent(1 / mu), "add-or-remove-one")
        except BudgetExceeded:
            return False
        return True

    low, high = 1e-6, 10.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if admitted(middle) else (low, middle)
    return low


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-5), (4.0, 1e-3)])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_second_run_chosen_by_the_first_ones_output(
    epsilon: float, delta: float, share: float
) -> None:
    """The strategy "spend all that is left iff the first output was telling", evaluated exactly.

    delta of the adaptive pair is the average, over the first output, of the second run's hockey
    stick at what is left of epsilon; the rule takes whichever is worse for privacy, to stop or to
    go on.
    """
    full = optimize.brentq(lambda mu: hockey_stick(mu, epsilon) - delta, 1e-3, 20)
    first = share * 0.9 * full
    second = largest_second(first, epsilon, delta)
    assert second > 0.1 * full
    x = np.linspace(-12, 12 + first, 40_001)
    loss = first * x - first**2 / 2  # log density ratio of N(first, 1) over N(0, 1)
    density = norm.pdf(x - first)
    stopped = density * hockey_stick(0.0, epsilon - loss)
    going_on = density * hockey_stick(second, epsilon - loss)
    worst = integrate.simpson(np.maximum(stopped, going_on), x=x)
    assert worst <= delta * (1 + 1e-6)


def test_what_was_reserved_never_shrinks() -> None:
    ledger = Ledger(epsilon=8, delta=1e-6)
    reserved = [0.0]
    for noise in itertools.chain([4.0], np.geomspace(60, 3, 12)):
        try:
            made = ledger.reserve(
                dp.GaussianDpEvent(float(noise)), neighboring="add-or-remove-one", label="x"
            )
        except BudgetExceeded:
            break
        reserved.append(ledger.remaining().reserved)
        ledger.commit(ledger.resume(made.id, made.event))
        assert ledger.remaining().reserved == reserved[-1]
    assert reserved == sorted(reserved)
    assert len(reserved) > 4
