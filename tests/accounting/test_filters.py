"""The filter: no adaptive sequence of charges gets past the budget, and prices are what they
should be.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from dpoptim.accounting.filters import GaussianFilter, selection_epsilon, selection_mu
from dpoptim.errors import PrivacyError

# What a hostile analyst asks for, given what is left: exactly that, a hair more or less, a share,
# anything.
STRATEGY = st.one_of(
    st.just(lambda left: left),
    st.just(lambda left: math.nextafter(left, math.inf)),
    st.just(lambda left: math.nextafter(left, 0)),
    st.floats(1e-9, 3).map(lambda share: lambda left: share * left),
    st.floats(1e-12, 10).map(lambda mu: lambda left: mu),
    st.just(lambda left: 5e-324),
    st.just(lambda left: 1e308),
)


@settings(max_examples=300)
@given(mu=st.floats(1e-6, 1e3), strategies=st.lists(STRATEGY, max_size=40))
def test_hostile_strategies_never_exceed_the_budget(mu: float, strategies: list) -> None:
    budget = GaussianFilter(mu)
    accepted = Fraction(0)
    for choose in strategies:
        asked = choose(budget.left)
        if not 0 < asked < math.inf:
            continue
        admitted = budget.ask(asked)
        if admitted:
            budget.charge(asked)
            accepted += Fraction(asked) ** 2
        else:
            before = budget.spent
            with pytest.raises(PrivacyError, match="does not fit"):
                budget.charge(asked)
            assert budget.spent == before
        assert accepted <= Fraction(mu) ** 2
        assert admitted == (
            accepted + (0 if admitted else Fraction(asked) ** 2) <= Fraction(mu) ** 2
        )
    if budget.left > 0:
        assert budget.ask(budget.left)


def test_small_charges_do_not_creep_past_it() -> None:
    """In floating point, 1 + 1e-17 stays 1 for ever."""
    budget = GaussianFilter(1.0)
    budget.charge(math.sqrt(1 - 1e-9))
    admitted = 0
    while admitted < 10**5 and budget.ask(1e-7):
        budget.charge(1e-7)
        admitted += 1
    assert 9.99e4 < admitted <= 10**5
    assert budget.spent**2 <= 1


@pytest.mark.parametrize("mu", [0.0, -1.0, math.inf, math.nan])
def test_nonsense_is_refused(mu: float) -> None:
    with pytest.raises(ValueError, match="mu must be a finite number above 0"):
        GaussianFilter(mu)
    with pytest.raises(ValueError, match="mu must be a finite number above 0"):
        GaussianFilter(1.0).charge(mu)


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 1.0, 3.0, 8.0, 20.0])
def test_a_selection_costs_what_its_worst_case_costs(epsilon: float) -> None:
    """The vertices of all randomised responses with ratios e^t, e^(t - epsilon) lie above the
    mu-GDP curve, one on it.
    """
    t = np.linspace(0, epsilon, 4001)[1:-1]
    false_positives = (1 - np.exp(t - epsilon)) / (np.exp(t) - np.exp(t - epsilon))
    needed = norm.isf(false_positives) - norm.isf(np.exp(t) * false_positives)
    assert selection_mu(epsilon) == pytest.approx(needed.max(), rel=1e-6)
    assert selection_mu(epsilon) >= needed.max() * (1 - 1e-9)
    # Gaussian with sensitivity-to-noise epsilon would say so
    assert selection_mu(epsilon) < epsilon


@settings(max_examples=200)
@given(mu=st.floats(1e-6, 40))
def test_a_selection_bought_for_mu_costs_no_more(mu: float) -> None:
    assert mu * (1 - 1e-6) - 1e-13 <= selection_mu(selection_epsilon(mu)) <= mu
