"""Tries to falsify what is promised of the range that targets take up."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from dpoptim import Ledger
from dpoptim.accounting import compute_epsilon
from dpoptim.accounting.gaussian import gdp_mu
from dpoptim.audit.statistics import shifts_seen
from dpoptim.estimators import DPLinearRegression, DPSGDRegressor, target_spread
from dpoptim.estimators.target_spread import (
    LARGEST_RESIDUAL,
    LONGEST,
    MEAN_SHARE,
    ROUNDS,
    SHARE,
    Residuals,
    price_of_round,
    spread_of_targets,
)
from dpoptim.gate import FilteredGate
from dpoptim.noise.stream import key_stream
from dpoptim.statistics import bounded_sum
from dpoptim.target_range import TargetRange
from spies import plans_attached

MU = 2.0
N = 3_000
OTHERS = np.full(N - 1, 0.25)
HOSTILE = [1.0, -1.0, 0.0, 0.25, 0.9, math.nan, math.inf, -1e300]
Seen = list[tuple[Tensor, float]]


def sums_of(
    y: np.ndarray, shares: np.ndarray | None = None, released: Sequence[Tensor] | None = None
) -> Seen:
    """What the rounds hand to the gate, and the noise that it would add."""
    with Ledger(neighboring="zero-out") as ledger, shifts_seen(released) as seen:
        gate = FilteredGate(
            mu=MU, neighboring="zero-out", ledger=ledger, noise=key_stream(0, "test"), label="test"
        )
        spread_of_targets(gate, y, shares, N, mu=price_of_round(MU))
        assert gate.filter.spent <= MU * math.sqrt(SHARE) * (1 + 1e-9)
    return seen


def mu_of(record: float) -> float:
    """The mu that a record really has in all rounds, given what they released without it."""
    absent = sums_of(OTHERS)
    present = sums_of(np.append(OTHERS, record), released=[total for total, _ in absent])
    assert len(absent) == ROUNDS
    return math.hypot(
        *(
            float((after - before).norm()) / deviation
            for (before, deviation), (after, _) in zip(absent, present, strict=True)
        )
    )


def test_one_target_moves_all_rounds_by_their_share() -> None:
    claimed = MU * math.sqrt(SHARE)
    assert 0.99 * claimed < max(map(mu_of, HOSTILE)) <= claimed * (1 + 1e-9)


def test_targets_that_a_narrowed_range_does_not_cut_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TargetRange, "scaled", lambda self, y: (y - self.middle) / self.half)
    monkeypatch.setattr(target_spread, "bounded_sum", lambda rows, bound: rows[:].sum(0))
    assert mu_of(0.9) > MU * math.sqrt(SHARE)


def test_rows_of_a_person_count_by_their_mean() -> None:
    y = np.random.default_rng(0).uniform(-1, 1, (40, 3))
    y[0] = 1.0
    shares = np.full(y.shape, 1 / 3)
    moved = sums_of(y, shares)[0][0] - sums_of(y[1:], shares[1:])[0][0]
    torch.testing.assert_close(moved, torch.tensor([1.0, 0.5]).double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("record", HOSTILE)
def test_one_record_adds_at_most_the_bound_to_a_mean_residual(record: float) -> None:
    """However far off: of a person's rows the mean counts."""
    x, weights = np.ones((4, 1)), np.array([3.0, -1.0])
    y = np.array([0.1, -0.2, 5.0, record])
    terms = Residuals(x, y, weights, None)
    moved = bounded_sum(terms, LARGEST_RESIDUAL) - bounded_sum(
        Residuals(x[:3], y[:3], weights, None), LARGEST_RESIDUAL
    )
    assert abs(moved[0]) <= LARGEST_RESIDUAL * (1 + 2.0**-40)
    of_person = Residuals(x.reshape(2, 2, 1), y.reshape(2, 2), weights, np.full((2, 2), 0.5))
    assert of_person[:].shape == (2, 1)
    assert not (np.abs(of_person[:]) > LARGEST_RESIDUAL).any()


def test_a_fit_spends_on_rounds_solver_and_residual_what_it_has() -> None:
    """Their squared prices, by the gate's noise, add up to the budget's."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (20_000, 2))
    with shifts_seen() as seen:
        model = DPLinearRegression(1.0, 1e-5, target_bound=100.0, noise_seed=0)
        model.fit(x, np.exp(x[:, 0]))
    spent = [LONGEST / deviation for total, deviation in seen[:-1] if len(total) == 2]
    spent.append(LARGEST_RESIDUAL / seen[-1][1])
    assert 0.02 < sum(np.square(spent)) / gdp_mu(1.0, 1e-5) ** 2 < SHARE + MEAN_SHARE
    assert model.privacy_.epsilon <= 1.0


def test_what_a_networks_fit_releases_is_what_it_is_charged_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rounds' Gaussians, and the plan of what is attached."""
    attached = plans_attached(monkeypatch)
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (N, 2))
    with Ledger(neighboring="zero-out") as ledger:
        model = DPSGDRegressor(
            3.0, 1e-5, target_bound=1.0, epochs=1, ledger=ledger, noise_seed=0, random_state=0
        )
        with shifts_seen() as seen:
            model.fit(x, 0.01 * x[:, 0])
        (charged,) = ledger.entries()
    rounds, network = charged.event.events
    assert {plan.event for plan in attached} == {network}
    assert len(seen) == ROUNDS
    released = math.hypot(*(LONGEST / deviation for _, deviation in seen))
    assert 0.999 / rounds.noise_multiplier < released <= 1 / rounds.noise_multiplier
    whole = compute_epsilon(charged.event, 1e-5, "zero-out").epsilon
    assert model.privacy_.epsilon == pytest.approx(whole)
    assert whole <= 3.0
