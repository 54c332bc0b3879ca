"""The experiment's parts: problems with the minimiser they claim, fits that find known exponents, and one small run."""

import csv
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from dpoptim.reproduce import one_pass, srgd_rates
from dpoptim.reproduce.srgd_rates import METHODS, SIGNAL, Cell, Task, exponents, slope, tuned


@pytest.mark.parametrize("kind", ["squared", "logistic"])
def test_the_minimiser_is_known(kind: str) -> None:
    task = Task(kind, 4)
    n = 200_000
    x, y = task.sample(n, 0)
    assert float(x.double().norm(dim=1).max()) <= 1
    best = torch.full((4,), SIGNAL, dtype=torch.float64)
    problem = task.problem(n)
    gradient = problem.clipped_sum(problem.prepare((x, y)), [(1.0, best)], 1e6) / n
    spread = torch.sqrt(torch.from_numpy(task.curvatures) / n)  # the residuals are below 1
    assert bool((gradient.abs() < 5 * spread).all())
    assert task.excess(best) == pytest.approx(0, abs=1e-12)
    for other in (torch.zeros(4), torch.tensor([2.0, 3.0, 3.0, 3.0])):
        loss = [problem.total_loss(problem.prepare((x, y)), w.double()) / n for w in (other, best)]
        excess = task.excess(other.double())
        assert excess > 0
        assert loss[0] - loss[1] == pytest.approx(excess, rel=0.05, abs=2e-4)


def made_up(alpha: float, gamma: float) -> list[Cell]:
    return [
        Cell(
            "squared", p, n, epsilon, "DP-SGD", 1, 1.0, 1.0, p * n**-alpha + 3 * (math.sqrt(p) / (epsilon * n)) ** gamma, 0.0
        )
        for n, p, epsilon in itertools.product((10**3, 10**4, 10**5, 10**6), (10, 100), (0.5, 2.0, math.inf))
    ]


def test_known_exponents_are_found() -> None:
    for alpha, gamma in ((0.5, 1.0), (0.3, 0.8), (0.7, 1.6)):
        assert exponents(made_up(alpha, gamma)) == pytest.approx((alpha, gamma), abs=1e-3)
    assert slope(c for c in made_up(0.4, 1.0) if c.p == 10 and math.isinf(c.epsilon)) == pytest.approx(-0.4)


def test_tuning_finds_a_minimum() -> None:
    found = tuned(lambda c, b: (math.log(c) - math.log(2)) ** 2 + (math.log(b) - math.log(8)) ** 2, (0.5, 1, 2), (1, 4, 16))
    assert found == (2, 8)


def test_a_small_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(srgd_rates, "BETAS", (1.0, 4.0))
    monkeypatch.setattr(srgd_rates, "CLIP_NORMS", (1.0,))
    cells = srgd_rates.measure(Task("squared", 3), 400, (0.5, math.inf), 2)
    assert {(c.method, c.epsilon) for c in cells} == set(itertools.product(METHODS, (0.5, math.inf)))
    assert all(c.steps == 9 and 0 < c.excess < 100 for c in cells)
    srgd_rates.write(tmp_path / "table.csv", [{"a": 1, "b": 2.5}])
    assert list(csv.reader((tmp_path / "table.csv").read_text().splitlines())) == [["a", "b"], ["1", "2.5"]]


def test_the_picture_and_the_fits(tmp_path: Path) -> None:
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


def test_one_pass_learns_and_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = torch.from_numpy(rng.integers(0, 10, 3000))
    x = torch.nn.functional.one_hot(y, 784).float() + torch.from_numpy(rng.random((3000, 784), dtype=np.float32)) * 0.1
    monkeypatch.setattr(
        one_pass, "load", lambda _: ((x[:2000], y[:2000]), (x[2000:2500], y[2000:2500]), (x[2500:], y[2500:]))
    )
    monkeypatch.setattr(one_pass, "BETAS", (0.1, 0.3))
    monkeypatch.setattr(one_pass, "CLIP_NORMS", (1.0,))
    path = one_pass.one_pass(tmp_path, seeds=2, batch_sizes=(200,), epsilons=(8.0,))
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["method"] for row in rows] == list(METHODS)
    assert all(float(row["accuracy"]) > 0.5 for row in rows)
