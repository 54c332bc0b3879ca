"""Solvers: what they spend is what they promised, and with nearly no noise they find the
minimum.
"""

import math
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpoptim.accounting.gaussian import gdp_epsilon
from dpoptim.accounting.ledger import BudgetExceeded, Ledger
from dpoptim.solvers import (
    Budget,
    LinearProblem,
    Objective,
    adaptive_gd,
    kl_spider,
    noisy_gd,
    proximal_point,
)
from dpoptim.solvers.linear_model import LinearModel
from dpoptim.theory.kl_schedules import proximal_rounds, spider_schedule
from solving import BUDGET, COMMON, FEATURES, SOLVERS, logistic, records

PLENTY = Budget(delta=1e-5, rho=1e10)  # noise of about 1e-6


@cache
def least_risk() -> float:
    """Of `logistic`'s records, without privacy."""
    objective = logistic()
    w = objective.problem.initial()
    for _ in range(3000):
        w = w - 0.5 * (
            objective.clipped_sum([(1.0, w)], 1e6) / objective.n
            + objective.problem.penalty_gradient(w)
        )
    return objective.risk(w, data_is_public=True)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("neighboring", ["zero-out", "replace-one"])
def test_the_guarantee_is_the_reserved_budget_and_is_never_exceeded(
    name: str, neighboring: str
) -> None:
    objective = logistic(neighboring=neighboring)
    with Ledger(neighboring=neighboring) as ledger:
        result = SOLVERS[name](objective, BUDGET, ledger=ledger)
        (entry,) = ledger.entries()
        assert entry.state == "committed"
        assert ledger.spent(1e-5).epsilon == pytest.approx(4, rel=1e-6)
    assert result.guarantee.epsilon == pytest.approx(4, rel=1e-6)
    assert "seeded: not for release" in str(result.guarantee)
    assert neighboring in str(result.guarantee)
    assert 0 < result.rho_spent <= BUDGET.gdp**2 / 2
    assert bool(torch.isfinite(result.weights).all())
    m = 2 if neighboring == "replace-one" else 1
    for step in result.trace:
        if step.kind in ("gradient", "norm"):
            assert step.noise == pytest.approx(
                m * COMMON["lipschitz"] / objective.n / math.sqrt(2 * step.rho), rel=1e-9
            )


@pytest.mark.parametrize("name", [name for name in SOLVERS if "adaptive" not in name])
def test_plans_of_fixed_length_spend_exactly_the_budget(name: str) -> None:
    result = SOLVERS[name](logistic(), BUDGET)
    assert result.rho_spent == pytest.approx(BUDGET.gdp**2 / 2, rel=1e-9)


@settings(max_examples=20)
@given(
    rho=st.floats(1e-3, 1e4),
    exponent=st.floats(1, 2),
    gamma=st.floats(0.5, 3),
    smoothness=st.floats(0.2, 2),
    share=st.none() | st.floats(0.05, 0.95),
    neighboring=st.sampled_from(["zero-out", "replace-one"]),
)
def test_spiders_prices_add_up_at_the_largest_step_counts(
    rho: float,
    exponent: float,
    gamma: float,
    smoothness: float,
    share: float | None,
    neighboring: str,
) -> None:
    """Gradients that never get short use every round's last step, and the whole budget, to
    1e-9.
    """
    x = torch.tensor([[1.0, 0.0]] * 8, dtype=torch.float64)
    steep = Objective(Steep(), (x,), neighboring=neighboring)
    settings_ = {
        "lipschitz": 1.0,
        "smoothness": smoothness,
        "kl_gamma": gamma,
        "kl_exponent": exponent,
    }
    risk_bound = min(1.0, gamma**exponent)
    result = kl_spider(
        steep,
        None,
        Budget(delta=1e-5, rho=rho),
        risk_bound=risk_bound,
        anchor_share=share,
        noise_seed=1,
        **settings_,
    )
    schedule = spider_schedule(
        n=8,
        dimension=2,
        rho=rho * (1 - 1e-10),
        risk_bound=risk_bound,
        beta=0.05,
        constants="practical",
        **settings_,
    ).longest()
    assert [step.kind for step in result.trace] == [
        kind for round_ in schedule for kind in ["gradient", *["difference"] * (round_.steps - 1)]
    ]
    assert result.rho_spent == pytest.approx(rho, rel=1e-9)
    assert result.rho_spent <= rho


class Steep:
    """A loss whose gradient has length 1e9 everywhere; nothing is clipped away, to reach the
    longest path.
    """

    dimension, capacity = 2, 8

    def initial(self) -> torch.Tensor:
        return torch.zeros(2, dtype=torch.float64)

    def prepare(self, records_: tuple) -> tuple:
        return records_

    def clipped_sum(self, batch: tuple, terms: list, bound: float) -> torch.Tensor:
        return 1e9 * batch[0].sum(0) * sum(c for c, _ in terms)

    def penalty_gradient(self, w: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(w)


@pytest.mark.set_aside("proximal_point", "noisy_gd")
@pytest.mark.parametrize(
    "name",
    ["noisy_gd", "spider_pl", "spider", "adaptive_gd", "select_stationary", "proximal_point"],
)
def test_with_nearly_no_noise_the_minimum_is_found(name: str) -> None:
    objective = logistic()
    longer = {
        "noisy_gd": lambda: noisy_gd(objective, None, PLENTY, steps=400, step_size=2.0, **COMMON),
        "proximal_point": lambda: proximal_point(
            objective,
            None,
            PLENTY,
            weak_convexity=0.05,
            kl_gamma=2,
            kl_exponent=2,
            risk_bound=0.7,
            smoothness=1.0,
            inner_steps=60,
            **COMMON | {"lipschitz": 10.0},
        ),
    }
    solve = longer.get(name, lambda: SOLVERS[name](objective, PLENTY, lipschitz=10.0))
    assert objective.risk(solve().weights, data_is_public=True) - least_risk() < 1e-4


def test_algorithm_4_is_what_the_paper_prints() -> None:
    """Projection, steps 1/(L t), weights t, the pull towards the start: against a loop written
    from the paper.
    """
    objective = logistic(l2=0.0)
    w0 = torch.full((FEATURES + 1,), 0.3, dtype=torch.float64)
    result = noisy_gd(
        objective, w0, PLENTY, lipschitz=2.0, steps=6, weak_convexity=0.5, noise_seed=1
    )
    points, w = [w0], w0
    for t in range(1, 7):
        gradient = objective.clipped_sum([(1.0, w)], 2.0) / objective.n + 2 * 0.5 * (w - w0)
        away = w - gradient / (0.5 * t) - w0
        w = w0 + away * min(1.0, 2.0 / (2 * 0.5) / float(away.norm()))
        points.append(w)
    T = len(points)
    expected = 2 / (T * (T + 1)) * sum(t * w for t, w in enumerate(points, 1))
    torch.testing.assert_close(result.weights, expected, rtol=0, atol=1e-4)


def test_adaptive_noise_is_in_proportion_to_the_gradient() -> None:
    result = adaptive_gd(
        *(logistic(), None, Budget(delta=1e-5, rho=100.0)), smoothness=1.0, last_steps=0, **COMMON
    )
    pairs = [
        (a, b)
        for a, b in zip(result.trace[::2], result.trace[1::2], strict=False)
        if b.kind == "gradient"
    ]
    assert len(pairs) > 5
    for norm, gradient in pairs[:-1]:
        assert norm.kind == "norm"
        assert gradient.noise * math.sqrt((FEATURES + 1) * 4) == pytest.approx(norm.norm, rel=1e-6)
    assert pairs[0][1].rho < pairs[-2][1].rho, "small gradients cost more"


def test_spider_continues_from_the_point_whose_gradient_was_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the norm stop the round's last point is the one that triggered it: the next anchor is
    asked there.
    """
    objective = logistic()
    asked = []
    original = Objective.clipped_sum
    monkeypatch.setattr(
        Objective,
        "clipped_sum",
        lambda self, terms, bound: (asked.append(terms), original(self, terms, bound))[1],
    )
    kl_spider(
        objective,
        None,
        PLENTY,
        lipschitz=10.0,
        smoothness=1.0,
        kl_gamma=2,
        kl_exponent=1.2,
        risk_bound=0.7,
        noise_seed=1,
    )
    stopped = 0
    for before, now in pairwise(asked):
        if len(before) == 2 and len(now) == 1:  # a difference, then the next round's anchor
            stopped += now[0][1].equal(before[0][1])
    assert stopped > 3


def test_rounds_get_what_an_early_stop_left() -> None:
    result = kl_spider(
        logistic(),
        None,
        Budget(delta=1e-5, rho=1e4),
        smoothness=1.0,
        kl_gamma=2,
        kl_exponent=1.2,
        risk_bound=0.7,
        anchor_share=0.5,
        **COMMON | {"lipschitz": 10.0},
    )
    anchors = [step.rho for step in result.trace if step.kind == "gradient"]
    assert anchors[-1] > anchors[0] * 1.01
    assert result.rho_spent <= 1e4


def test_a_refused_reservation_releases_nothing() -> None:
    objective = logistic()
    with Ledger(neighboring="zero-out", epsilon=1.0, delta=1e-5) as ledger:
        for solve in SOLVERS.values():
            with pytest.raises(BudgetExceeded):
                solve(objective, BUDGET, ledger=ledger)
        assert ledger.entries() == []


def test_proximal_rounds_and_spider_rounds_follow_the_theorems() -> None:
    n, d, rho, gamma, L0, L1, F0 = 1000, 10, 0.5, 0.7, 1.5, 2.0, 0.4
    shared = {
        "n": n,
        "dimension": d,
        "rho": rho,
        "lipschitz": L0,
        "kl_gamma": gamma,
        "risk_bound": F0,
    }
    log = math.log(F0) + 3 * math.log(n * math.sqrt(rho) / (gamma * L0 * math.sqrt(d)))
    K = proximal_rounds(**shared, weak_convexity=L1, kl_exponent=3, constants="theorem")
    assert math.ceil((1 + 32 * F0 ** (1 / 3) * gamma**2 * L1) * log) == K
    schedule = spider_schedule(
        **shared, smoothness=L1, kl_exponent=1.5, beta=0.1, constants="theorem"
    ).longest()
    log = math.log(F0) + 1.5 * math.log(n * math.sqrt(rho) / (gamma * L0 * math.sqrt(d)))
    assert len(schedule) == math.ceil((1 + 64 * (1 / F0) ** (0.5 / 1.5) * gamma**2 * L1) * log)
    for round_ in schedule:
        assert round_.steps == math.ceil((F0 / round_.target) ** (0.5 / 1.5) * (1 - 1e-12))
        assert round_.difference_bound == pytest.approx(round_.target ** (1 / 1.5) / (4 * gamma))
        assert round_.stop_below == pytest.approx(7 / 8 / gamma * round_.target ** (1 / 1.5))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kl_exponent": 2.5}, "kl_exponent must be in"),
        ({"kl_gamma": 0.0}, "kl_gamma must be"),
        ({"lipschitz": math.inf}, "lipschitz must be"),
        ({"smoothness": "1"}, "smoothness must be a number"),
        ({"constants": "best"}, "constants must be"),
        ({"anchor_share": 1.0}, "anchor_share must be"),
        ({"beta": 0.0}, "beta must be"),
        ({"kl_gamma": 1e3}, "ask for .* rounds"),
    ],
)
def test_wrong_settings_are_refused_by_name(wrong: dict, says: str) -> None:
    good = {"lipschitz": 1.0, "smoothness": 1.0, "kl_gamma": 1.0, "kl_exponent": 2.0}
    with pytest.raises(ValueError, match=says):
        kl_spider(logistic(), None, BUDGET, **good | wrong)


def test_a_wrong_starting_point_is_refused() -> None:
    for w0 in (torch.zeros(3), torch.full((FEATURES + 1,), math.nan)):
        with pytest.raises(ValueError, match="w0 must be a finite vector"):
            adaptive_gd(logistic(), w0, BUDGET, lipschitz=1.0, smoothness=1.0)


@pytest.mark.parametrize(
    "given_", [{}, {"epsilon": 1.0, "rho": 1.0}, {"mu": 0.0}, {"rho": math.nan}, {"epsilon": -1.0}]
)
def test_wrong_budgets_are_refused(given_: dict) -> None:
    with pytest.raises(ValueError, match="exactly one|must be a finite number above 0"):
        Budget(delta=1e-5, **given_)


def test_budgets_convert_by_the_exact_profile() -> None:
    assert gdp_epsilon(Budget(delta=1e-5, epsilon=2.0).gdp, 1e-5) == pytest.approx(2.0, rel=1e-9)
    assert Budget(delta=1e-5, rho=0.02).gdp == pytest.approx(0.2)


def test_noise_differs_from_run_to_run_without_a_seed() -> None:
    problem = LinearProblem(LinearModel("logistic", features=FEATURES), capacity=200)
    objective = Objective(problem, records())
    torch.manual_seed(0)
    first = adaptive_gd(objective, None, BUDGET, lipschitz=2.0, smoothness=1.0)
    torch.manual_seed(0)
    second = adaptive_gd(objective, None, BUDGET, lipschitz=2.0, smoothness=1.0)
    assert not first.weights.equal(second.weights)
    assert "seeded" not in str(first.guarantee)


@pytest.mark.parametrize("gamma", [0.5, 2.0, 8.0])
def test_spider_never_spends_its_budget_on_staying_where_it_is(gamma: float) -> None:
    """Where the smallest threshold is above every gradient, as for these 200 records."""
    result = kl_spider(
        *(logistic(), None, Budget(delta=1e-5, rho=0.5)),
        smoothness=1.0,
        kl_gamma=gamma,
        kl_exponent=2,
        risk_bound=0.7,
        rounds=50,
        **COMMON,
    )
    x, y = records()
    assert float(((x @ result.weights[:-1] + result.weights[-1] > 0) == y).double().mean()) > 0.75
    assert result.rho_spent == pytest.approx(0.5, rel=1e-9)


def test_the_theorem_is_refused_where_it_promises_nothing() -> None:
    with Ledger(neighboring="zero-out") as ledger:
        with pytest.raises(ValueError, match="promises no excess risk below"):
            kl_spider(
                *(logistic(), None, BUDGET),
                **COMMON,
                smoothness=1.0,
                kl_gamma=1.0,
                kl_exponent=2,
                constants="theorem",
                ledger=ledger,
            )
        assert ledger.entries() == []
