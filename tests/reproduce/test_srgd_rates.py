"""The experiment's parts: problems with the minimiser they claim, fits that find known exponents,
and one small run.
"""

import csv
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from dpoptim.reproduce import one_pass, srgd_rates
from dpoptim.reproduce.srgd_problem import SIZE, Task
from dpoptim.reproduce.srgd_rates import METHODS, Cell, exponents, intervals, slope, tuned


@pytest.mark.parametrize("kind", ["squared", "logistic"])
def test_the_minimiser_is_known(kind: str) -> None:
    task = Task(kind, 4)
    n = 200_000
    x, y = task.sample(n, 0)
    assert x.double().norm(dim=1).numpy() == pytest.approx(1, abs=1e-6)
    problem = task.problem(n)
    gradient = problem.clipped_sum(problem.prepare((x, y)), [(1.0, task.best)], 1e6) / n
    # the residuals are below 1
    assert bool((gradient.abs() < 5 * torch.from_numpy(task.scales) / math.sqrt(n)).all())
    assert task.excess(task.best) == pytest.approx(0, abs=1e-12)
    for other in (torch.zeros(4).double(), task.best + torch.tensor([0.5, -1.0, 0.0, 0.0])):
        loss = [problem.total_loss(problem.prepare((x, y)), w) / n for w in (other, task.best)]
        excess = task.excess(other)
        assert excess > 0
        assert loss[0] - loss[1] == pytest.approx(excess, rel=0.05, abs=2e-4)


def test_both_terms_are_tight() -> None:
    """What `srgd_problem` derives, on the population risk of squared loss: the steps' error falls
    like T^-2, whatever p; what noise in the gradient leaves grows like sqrt(p) times its standard
    deviation."""
    steps, deviations = np.array([12, 20, 36, 64]), np.array([1e-3, 3e-3, 1e-2])
    left, noisy = {}, {}
    for p in (10, 100):
        task = Task("squared", p)
        curvatures = task.scales**2
        left[p] = [task.excess(without_noise(task, t)) for t in steps]
        signal = curvatures * task.best.numpy() ** 2
        noisy[p] = [float(np.minimum(signal[1:], s**2 / curvatures[1:]).sum()) for s in deviations]
        assert np.polyfit(np.log(steps), np.log(left[p]), 1)[0] == pytest.approx(-2, rel=0.1)
        assert float(np.linalg.norm(task.best)) * task.smoothness == pytest.approx(SIZE)
    assert np.array(left[100]) / np.array(left[10]) == pytest.approx(1, rel=0.4)
    assert np.polyfit(np.log(deviations[:2]), np.log(noisy[100][:2]), 1)[0] == pytest.approx(
        1, rel=0.15
    )
    assert np.polyfit(np.log(deviations), np.log(noisy[10]), 1)[0] == pytest.approx(1, rel=0.15)
    assert noisy[100][0] / noisy[10][0] == pytest.approx(math.sqrt(10), rel=0.25)


def without_noise(task: Task, steps: int) -> torch.Tensor:
    """Algorithm 1 on the population risk of squared loss."""
    curvatures = torch.from_numpy(task.scales**2)
    x = y = z = torch.zeros(task.p, dtype=torch.float64)
    for eta in range(1, steps + 1):
        gradient = curvatures * (x - task.best)
        y, z = x - gradient / task.smoothness, z - eta * gradient / task.smoothness
        x = y + 2 / (eta + 2) * (z - y)
    return y


def made_up(alpha: float, gamma: float, power: float = 1.0, error: float = 0.0) -> list[Cell]:
    rng = np.random.default_rng(1)
    cells = []
    for n, p, epsilon in itertools.product(
        (10**3, 10**4, 10**5, 10**6), (10, 100), (0.5, 2.0, math.inf)
    ):
        terms = p * n**-alpha, 30 * (math.sqrt(p) / (epsilon * n)) ** gamma
        excess = (terms[0] ** power + terms[1] ** power) ** (1 / power) * math.exp(
            error * rng.standard_normal()
        )
        cells.append(Cell("squared", p, n, epsilon, "DP-SGD", 1, 1.0, 1.0, excess, 0.0))
    return cells


def test_known_exponents_are_found() -> None:
    for alpha, gamma in ((0.5, 1.0), (0.3, 0.8), (0.7, 1.6)):
        assert exponents(made_up(alpha, gamma)) == pytest.approx((alpha, gamma), abs=1e-3)
    assert slope(
        c for c in made_up(0.4, 1.0) if c.p == 10 and math.isinf(c.epsilon)
    ) == pytest.approx(-0.4)


def test_the_two_fits_tell_apart_how_terms_add() -> None:
    assert exponents(made_up(0.5, 1.0, power=2), 2) == pytest.approx((0.5, 1.0), abs=1e-3)
    # privacy's part falls faster where it is the smaller
    assert 1.02 < exponents(made_up(0.5, 1.0, power=2))[1] < 1.5


@pytest.mark.figures
def test_intervals_hold_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(srgd_rates, "DRAWS", 50)
    cells = made_up(0.5, 1.0, error=0.05)
    (low, high), (gamma_low, gamma_high) = intervals(cells)
    assert low < 0.5 < high < low + 0.1
    assert gamma_low < 1 < gamma_high < gamma_low + 0.5
    alpha, gamma = exponents(cells)
    assert low < alpha < high
    assert gamma_low < gamma < gamma_high


def test_tuning_finds_a_minimum() -> None:
    found = tuned(
        lambda c, b: (math.log(c) - math.log(2)) ** 2 + (math.log(b) - math.log(8)) ** 2,
        (0.5, 1, 2),
        (1, 4, 16),
    )
    assert found == (2, 8)


@pytest.mark.figures
def test_a_small_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(srgd_rates, "BETAS", (1.0, 4.0))
    monkeypatch.setattr(srgd_rates, "CLIP_NORMS", (1.0,))
    cells = srgd_rates.measure(Task("squared", 3), 400, (0.5, math.inf), 2)
    assert {(c.method, c.epsilon) for c in cells} == set(
        itertools.product(METHODS, (0.5, math.inf))
    )
    assert all(c.steps == 9 and 0 < c.excess < 100 for c in cells)
    srgd_rates.write_dicts(tmp_path / "table.csv", [{"a": 1, "b": 2.5}])
    assert list(csv.reader((tmp_path / "table.csv").read_text().splitlines())) == [
        ["a", "b"],
        ["1", "2.5"],
    ]


@pytest.mark.figures
def test_the_picture_and_the_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(srgd_rates, "DRAWS", 2)
    cells = [
        Cell(kind, c.p, c.n, c.epsilon, method, 1, 1.0, 1.0, c.excess, 0.0)
        for kind in ("squared", "logistic")
        for method in METHODS
        for c in made_up(0.5, 1.0)
    ]
    srgd_rates.draw(cells, tmp_path / "rates.png")
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    rows = srgd_rates.fitted_exponents(cells)
    assert len(rows) == 2 * len(METHODS)
    assert all(row["alpha"] == pytest.approx(0.5, abs=0.01) for row in rows)


@pytest.mark.figures
def test_one_pass_learns_and_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = torch.from_numpy(rng.integers(0, 10, 3000))
    x = (
        torch.nn.functional.one_hot(y, 784).float()
        + torch.from_numpy(rng.random((3000, 784), dtype=np.float32)) * 0.1
    )
    monkeypatch.setattr(
        one_pass,
        "load_split",
        lambda _: ((x[:2000], y[:2000]), (x[2000:2500], y[2000:2500]), (x[2500:], y[2500:])),
    )
    monkeypatch.setattr(one_pass, "BETAS", (0.1, 0.3))
    monkeypatch.setattr(one_pass, "CLIP_NORMS", (1.0,))
    path = one_pass.one_pass(tmp_path, seeds=2, batch_sizes=(200,), epsilons=(8.0,))
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["method"] for row in rows] == list(METHODS)
    assert all(float(row["accuracy"]) > 0.5 for row in rows)
