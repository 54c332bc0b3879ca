"""Banded strategies: the noise is what the strategy says, sensitivities are exact, and errors are
near the best possible.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler

from dpoptim.noise.correlated import (
    BandedToeplitz,
    BestStrategy,
    BufferedToeplitz,
    Independent,
    Workload,
)
from dpoptim.noise.correlated.banded import most_with_gaps
from dpoptim.noise.correlated.choose_strategy import mean_error
from dpoptim.noise.correlated.fitting import inverse
from dpoptim.noise.correlated.workload import Rates
from dpoptim.noise.stream import KeyStream
from dpoptim.theory.dense_strategies import least_mean_error


def matrix(strategy: BandedToeplitz, steps: int) -> np.ndarray:
    """The strategy matrix C = D T, from its definition."""
    column, rows = strategy.coefficients(steps)
    toeplitz = sum(c * np.eye(steps, k=-lag) for lag, c in enumerate(column))
    return np.sqrt(rows)[:, None] * toeplitz


def toeplitz(column: np.ndarray) -> np.ndarray:
    return sum((c * np.eye(len(column), k=-lag) for lag, c in enumerate(column)), np.zeros(1))


def words(decay: Rates) -> str:
    return decay if isinstance(decay, str) else "planned"


STRATEGIES = [
    BandedToeplitz(1),
    BandedToeplitz(3),
    BandedToeplitz(12),
    BandedToeplitz(4, 4),
    BandedToeplitz(2, 5, Workload(0.9)),
    BandedToeplitz(4, 4, Workload(0.9, "cosine")),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_what_is_added_is_undone_by_the_strategy(strategy: BandedToeplitz) -> None:
    """C times the streamed increments is white noise, step by step and between steps."""
    steps, size = 12, 40_000
    state = strategy.start(steps, [size], KeyStream.from_seed(1, "test"))
    added = []
    for _ in range(steps):
        buffer = torch.zeros(size, dtype=torch.float64)
        state.add([buffer], 1.0)
        added.append(buffer.numpy())
    white = matrix(strategy, steps) @ np.stack(added)
    assert np.allclose(np.cov(white), np.eye(steps), atol=6 / np.sqrt(size))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize(
    ("participations", "separation"), [(1, None), (2, 5), (3, 4), (2, 12), (4, 1)]
)
def test_sensitivities_are_those_of_the_worst_pattern(
    strategy: BandedToeplitz, participations: int, separation: int | None
) -> None:
    steps, gap = 12, separation or 1
    c = matrix(strategy, steps)
    any_gap = [
        places
        for count in range(1, participations + 1)
        for places in itertools.combinations(range(steps), count)
        if all(b - a >= gap for a, b in itertools.pairwise(places))
    ]
    # C >= 0: all of one sign
    worst = max(np.linalg.norm(c[:, list(places)].sum(1)) for places in any_gap)
    stated = strategy.sensitivity(steps, participations, separation)
    assert worst <= stated * (1 + 1e-12)
    if strategy.bands <= gap or participations == 1:
        assert stated == pytest.approx(worst, rel=1e-6)
    regular = max(
        np.linalg.norm(c[:, start::gap][:, :participations].sum(1))
        for start in range(min(gap, steps))
    )
    stated = strategy.sensitivity(steps, participations, separation, regular=True)
    assert regular <= stated * (1 + 1e-12)
    if strategy.bands <= gap and participations * gap >= steps:
        assert stated == pytest.approx(regular, rel=1e-6)


WARM = tuple(min((t + 1) / 5, 1.0) * (1 - t / 25) for t in range(20))  # of 20 steps
RATES: dict[Rates, Callable[[torch.optim.Optimizer, int], LRScheduler]] = {
    "none": lambda optimizer, steps: LambdaLR(optimizer, lambda step: 1.0),
    "linear": lambda optimizer, steps: LinearLR(optimizer, 1.0, 0.0, steps),
    "cosine": lambda optimizer, steps: CosineAnnealingLR(optimizer, steps),
    WARM: lambda optimizer, steps: LambdaLR(optimizer, lambda step: WARM[min(step, steps - 1)]),
}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", RATES, ids=words)
def test_errors_are_those_of_the_workload(decay: Rates, momentum: float) -> None:
    """Of torch's SGD with torch's own schedule, fed with one unit of noise after the other."""
    workload, steps = Workload(momentum, decay), 20
    strategy = BandedToeplitz(5, 5, workload)
    position = torch.zeros(steps, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([position], lr=1.0, momentum=momentum)
    schedule = RATES[decay](optimizer, steps)
    iterates = []
    for release in np.linalg.inv(matrix(strategy, steps)):
        position.grad = torch.from_numpy(release) * -(1 - momentum)
        optimizer.step()
        schedule.step()
        iterates.append(position.detach().numpy().copy())
    noise = np.stack(iterates)
    assert strategy.errors(steps) == pytest.approx(np.linalg.norm(noise, axis=1), rel=1e-9)
    assert strategy.prefix_std(steps) == pytest.approx(
        strategy.errors(steps) * strategy.sensitivity(steps)
    )
    column, rows = strategy.coefficients(steps)
    response = inverse(column, steps)
    assert workload.costs(response) / rows == pytest.approx(np.sum(noise**2, axis=0), rel=1e-9)
    assert workload.error(1 / rows)(response)[0] == pytest.approx(np.sum(noise**2))


@pytest.mark.parametrize("decay", RATES, ids=words)
def test_slopes_of_the_error_are_its_differences(decay: Rates) -> None:
    value = Workload(0.0, decay).error(np.linspace(1, 2, 20))
    response = np.random.default_rng(0).normal(size=20)
    _, half = value(response)
    differences = [
        (value(response + 1e-4 * one)[0] - value(response - 1e-4 * one)[0]) / 2e-4
        for one in np.eye(20)
    ]
    assert differences == pytest.approx(2 * half, rel=1e-6, abs=1e-6)


def test_of_long_runs_a_few_steps_of_noise_stand_for_all() -> None:
    """Rates with a kink and a step; a decay with a name, written out, is as by its name."""
    steps = 700
    response = inverse(np.array([1.0, 0.5, 0.3]), steps)
    rates = np.where(np.arange(steps) < 90, (np.arange(steps) + 1) / 90, 1.0)
    rates[500:] = 0.1
    planned = Workload(0.9, tuple(rates))
    exact = np.sum((planned.matrix(steps) @ toeplitz(response)) ** 2, axis=0)
    assert np.abs(planned.costs(response) - exact).sum() <= 0.003 * exact.sum()
    cosine = Workload(0.9, "cosine")
    written = Workload(0.9, tuple(cosine.rates(steps)))
    assert written.rates(steps) == pytest.approx(cosine.rates(steps))
    exact = cosine.costs(response)
    assert np.abs(written.costs(response) - exact).sum() <= 0.003 * exact.sum()
    variances = np.linspace(1, 3, steps)
    errors = cosine.errors(response, variances)
    assert written.errors(response, variances) == pytest.approx(errors, rel=1e-9)


def test_planned_rates_lie_on_straight_lines() -> None:
    workload = Workload(decay=(0.5, 1.0, 0.1))
    assert workload.rates(5) == pytest.approx([0.5, 0.75, 1.0, 0.55, 0.1])
    assert workload.rates(3) == pytest.approx([0.5, 1.0, 0.1])
    assert Workload(decay=[1, 2]) == Workload(decay=(1.0, 2.0))  # type: ignore[arg-type]


@pytest.mark.set_aside("cosine-1.06-4", "decay8-1.09-16")
@pytest.mark.parametrize(
    ("decay", "most", "passes"),
    [
        pytest.param(*decay, passes, marks=[pytest.mark.variants] * (i != j))
        for i, decay in enumerate(
            [("linear", 1.06), ("cosine", 1.06), ((0.02, 1.0, 0.7, 0.3, 0.05), 1.09)]
        )
        for j, passes in enumerate([1, 4, 16])
    ],
)
def test_a_decay_is_worth_knowing(decay: Rates, most: float, passes: int) -> None:
    """Nearer to the dense optimum of the decay; a fit to constant rates is up to 20 % above."""
    steps, workload = 128, Workload(decay=decay)
    apart = steps // passes
    least = least_mean_error(steps, apart, 60, workload)
    knows, ignores = (
        BestStrategy(workload=each).made_for(steps, passes, apart)
        for each in (workload, Workload())
    )
    assert isinstance(knows, BandedToeplitz)
    assert isinstance(ignores, BandedToeplitz)
    errors = {}
    for name, each in (("knows", knows), ("ignores", ignores)):
        column, rows = each.coefficients(steps)
        squares = workload.errors(inverse(column, steps), 1 / rows) ** 2
        charged = each.sensitivity(steps, passes, apart, regular=True)
        errors[name] = math.sqrt(squares.mean()) * charged / least
    assert 1 <= errors["knows"] <= most
    assert errors["ignores"] > errors["knows"] * (1.01 if passes == 1 else 1.08)
    few = BestStrategy(4, workload).made_for(steps, passes, apart)
    assert mean_error(few, steps, passes, apart) <= 1.12 * least  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", [BandedToeplitz(5, 5), BufferedToeplitz(2, True, 5)])
@pytest.mark.parametrize("decay", ["linear", "cosine", WARM], ids=words)
def test_the_charge_is_of_the_matrix_whatever_it_was_fitted_to(
    strategy: BandedToeplitz | BufferedToeplitz, decay: Rates
) -> None:
    """Rates enter the fit and nothing that is charged: the gram matrix alone says it."""
    steps, fitted = 20, replace(strategy, workload=Workload(0.9, decay))
    assert fitted.increment_std(steps) != pytest.approx(strategy.increment_std(steps))
    state = fitted.start(steps, [steps], KeyStream())
    state._draw = lambda like: torch.eye(steps, dtype=torch.float64)[state.step]  # type: ignore[method-assign]
    undone = torch.zeros(steps, steps, dtype=torch.float64)
    for row in undone:
        state.add([row], 1.0)
    streamed = np.linalg.inv(undone.numpy())
    worst = max(np.linalg.norm(streamed[:, start::5].sum(1)) for start in range(5))
    charged = fitted.sensitivity(steps, 4, 5, regular=True)
    assert worst <= charged == pytest.approx(worst, rel=1e-8)


def test_momentum_is_worth_knowing() -> None:
    knows, ignores = (BandedToeplitz(32, 32, Workload(momentum)) for momentum in (0.9, 0.0))
    steps = 128
    weights = np.cumsum(0.1 * 0.9 ** np.arange(steps))
    workload = sum(w * np.eye(steps, k=-lag) for lag, w in enumerate(weights))
    errors = [
        np.linalg.norm(workload @ np.linalg.inv(matrix(each, steps)))
        * each.sensitivity(steps, 4, 32, regular=True)
        for each in (knows, ignores)
    ]
    assert errors[0] < 0.995 * errors[1]


@pytest.mark.parametrize(("passes", "allowed"), [(1, 1.02), (4, 1.08), (8, 1.08)])
def test_errors_are_near_the_dense_optimum(passes: int, allowed: float) -> None:
    steps = 128
    separation = steps // passes
    strategy = BestStrategy().made_for(steps, passes, separation)
    assert isinstance(strategy, BandedToeplitz)
    ratio = mean_error(strategy, steps, passes, separation) / least_mean_error(
        steps, separation, 60
    )
    assert 1 <= ratio <= allowed


@pytest.mark.parametrize(("passes", "allowed"), [(1, 1.02), (4, 1.09)])
def test_what_bands_cannot_span_is_near_the_optimum_in_four_vectors(
    passes: int, allowed: float
) -> None:
    apart = 128 // passes
    strategy = BestStrategy(4).made_for(128, passes, apart)
    assert isinstance(strategy, BufferedToeplitz)
    assert strategy.separation == (apart if passes > 1 else None)
    ratio = mean_error(strategy, 128, passes, apart) / least_mean_error(128, apart, 60)
    assert 1 <= ratio <= allowed


def test_the_best_is_taken_that_fits() -> None:
    assert BestStrategy(buffers=128).made_for(600, 5, 120) == BandedToeplitz(120, 120)
    assert BestStrategy().made_for(100, 1, 100) == BandedToeplitz(100)
    few = BestStrategy(buffers=4).made_for(2000, 1, 2000)
    assert isinstance(few, BufferedToeplitz)  # exponentials reach further than four bands
    assert BandedToeplitz(1).sensitivity(10) == pytest.approx(1)
    assert mean_error(BandedToeplitz(1), 50, 1, 50) >= 0.8 * np.sqrt(
        np.mean(Independent().prefix_std(50) ** 2)
    )


@pytest.mark.parametrize(("count", "gap"), [(3, 3), (2, 5), (4, 3), (12, 1)])
def test_the_largest_sum_with_gaps(count: int, gap: int) -> None:
    values = np.random.default_rng(0).random(12)
    best = max(
        values[list(places)].sum()
        for size in range(1, count + 1)
        for places in itertools.combinations(range(12), size)
        if all(b - a >= gap for a, b in itertools.pairwise(places))
    )
    assert most_with_gaps(values, count, gap) == pytest.approx(best)


@pytest.mark.parametrize("wrong", [{"bands": 0}, {"bands": 5, "separation": 4}])
def test_bad_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="bands"):
        BandedToeplitz(**wrong)
    with pytest.raises(ValueError, match="momentum must be in"):
        Workload(1.0)
    with pytest.raises(ValueError, match="decay must be one of"):
        Workload(decay="step")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"decay\[1\] must be a finite number above 0"):
        Workload(decay=(1.0, 0.0))
    with pytest.raises(ValueError, match="or two rates or more"):
        Workload(decay=(1.0,))
