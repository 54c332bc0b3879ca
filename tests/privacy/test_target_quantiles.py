"""Tries to falsify what is promised of the range about the median of few targets."""

import math
from typing import Any

import numpy as np
import pytest

import dpoptim
from dpoptim import Ledger
from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.accounting.filters import selection_mu
from dpoptim.accounting.gaussian import gdp_epsilon, gdp_mu
from dpoptim.audit.statistics import choices_seen, shifts_seen
from dpoptim.estimators import DPLinearRegression, DPSGDRegressor, target_quantiles
from dpoptim.estimators.target_prices import CHOICES_SHARE, Prices
from dpoptim.estimators.target_quantiles import Choices, range_about_median
from dpoptim.gate import FilteredGate, adaptive
from dpoptim.noise.stream import key_stream

CHOICES = Choices(0.6, 0.8, 0.8)  # their squares add up to 1
OTHERS = np.linspace(-1, 1, 40)
HOSTILE = [1.0, -1.0, 0.0, 0.1, math.nan, math.inf, -1e300]


def odds_of(y: Any, shares: Any = None, neighboring: str = "zero-out") -> list[Any]:
    """The logarithms of the odds of both choices; the first is taken to be the lowest place."""
    with Ledger(neighboring=neighboring) as ledger, choices_seen(adaptive) as seen:
        gate = FilteredGate(
            mu=1.001,
            neighboring=neighboring,
            ledger=ledger,
            noise=key_stream(0, "test"),
            label="test",
        )
        range_about_median(gate, y, shares, prices=CHOICES, origin=0.3)
        assert gate.filter.spent == pytest.approx(1.0)
    assert len(seen) == 2
    return [odds - np.logaddexp.reduce(odds) for odds in seen]


def largest_mu(worlds: list[Any], neighboring: str = "zero-out") -> float:
    """What both choices together show of the worst pair of neighbouring tables."""
    worst = 0.0
    for pair in worlds:
        one, other = (odds_of(*table, neighboring=neighboring) for table in pair)
        spans = [float(np.ptp(a - b)) for a, b in zip(one, other, strict=True)]
        worst = max(worst, math.hypot(*(selection_mu(span) for span in spans if span)))
    return worst


def tables(neighboring: str) -> list[Any]:
    held = [(np.append(OTHERS, record),) for record in HOSTILE]
    if neighboring == "replace-one":
        return [(one, other) for one in held for other in held]
    return [((OTHERS,), one) for one in held]


@pytest.mark.parametrize("neighboring", ["zero-out", "replace-one", "add-or-remove-one"])
def test_one_record_shows_at_most_what_both_choices_cost(neighboring: str) -> None:
    assert 0.4 < largest_mu(tables(neighboring), neighboring) <= 1.0


def test_a_record_that_counts_for_three_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = target_quantiles.scores_of
    monkeypatch.setattr(
        target_quantiles, "scores_of", lambda *given: [3 * each for each in real(*given)]
    )
    assert largest_mu(tables("replace-one"), "replace-one") > 1.0


@pytest.mark.parametrize("rows", [[1.0, 1.0, 1.0], [-1.0, 0.2, 1.0], [math.nan, 1.0, math.inf]])
def test_rows_of_a_person_count_one_together(rows: list[float]) -> None:
    y = np.tile(OTHERS[:, None], 3)
    held = np.vstack([y, rows])
    pair = ((y, np.full(y.shape, 1 / 3)), (held, np.full(held.shape, 1 / 3)))
    assert 0 < largest_mu([pair]) <= 1.0


@pytest.mark.parametrize("neighboring", ["zero-out", "replace-one"])
def test_a_fit_spends_on_choices_and_solver_what_it_has(neighboring: str) -> None:
    """And which choices there are does not follow from the targets."""
    n, rng = 600, np.random.default_rng(0)
    x, mu = rng.uniform(-1, 1, (n, 2)), gdp_mu(1.0, 1e-5)
    prices = Prices.of(mu, n, neighboring)
    assert prices.choices is not None
    assert 0 < prices.mu**2 < CHOICES_SHARE * mu**2 * (1 + 1e-6)
    for y in (x[:, 0], np.full(n, 1e7), np.append(np.zeros(n - 1), 1e8)):
        with choices_seen(adaptive) as seen:
            model = DPLinearRegression(
                1.0, 1e-5, target_bound=1e8, neighboring=neighboring, noise_seed=0
            )
            model.fit(x, y)
        spans = [float(np.ptp(odds)) for odds in seen]
        assert len(spans) == 2
        assert model.privacy_.epsilon <= 1.0


def test_the_mean_of_few_records_costs_what_it_says() -> None:
    """Odds and sums of neighbours, all together."""
    n, mu = 300, 0.5
    others = np.random.default_rng(0).normal(5, 1, n - 1)
    worst = 0.0
    for one, other in ((1e6, -1e6), (5.0, 1e6), (math.nan, 1e6), (0.0, -math.inf)):
        seen = []
        for record in (one, other):
            with choices_seen(adaptive) as odds, shifts_seen() as sums:
                dpoptim.private_mean(
                    np.append(others, record),
                    -1e6,
                    1e6,
                    epsilon=gdp_epsilon(mu, 1e-5),
                    delta=1e-5,
                    neighboring="replace-one",
                    noise_seed=0,
                )
            seen.append(([each - np.logaddexp.reduce(each) for each in odds], sums))
        (left, sums), (right, moved) = seen
        assert len(left) == len(right) == 2
        spent = [
            selection_mu(span)
            for a, b in zip(left, right, strict=True)
            if (span := float(np.ptp(a - b)))
        ]
        spent += [
            float((a - b).norm()) / deviation
            for (a, deviation), (b, _) in zip(sums, moved, strict=True)
        ]
        worst = max(worst, math.hypot(*spent))
    assert 0.2 * mu < worst <= mu * (1 + 1e-9)


@pytest.mark.parametrize("n", [100, 180, 200, 220, 300, 1500])
def test_a_networks_fit_leaves_nothing_unspent_where_choices_begin(n: int) -> None:
    """Their price follows from the budget, not from the noise that is looked for."""
    model = DPSGDRegressor(1.0, 1e-5, target_bound=1.0)
    plan = model._plan_of_fit(n, 1e-5, 1.0, 100, anew=True)
    found = compute_epsilon(model._event(plan), 1e-5, model.relation)
    assert 0.95 < found.epsilon <= 1.0
