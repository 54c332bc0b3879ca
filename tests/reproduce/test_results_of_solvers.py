"""Slices of the tables of Menart et al. 2024 and Choquette-Choo et al. 2024, made again."""

import numpy as np
import pytest

from committed import fashion, rows_of
from dpoptim.data import FASHION_MNIST_DIRECTORY
from dpoptim.reproduce import (
    kl_rates,
    kl_real,
    one_pass,
    srgd_rates,
)


def test_kl_slopes_are_those_of_the_runs() -> None:
    runs = rows_of("kl_rates.csv")
    for row in rows_of("kl_slopes.csv"):
        mine = [
            r for r in runs if (r["experiment"], r["kappa"]) == (row["experiment"], row["kappa"])
        ]
        logs = np.log([[float(r["x"]), float(r["measured"])] for r in mine])
        assert np.polyfit(*logs.T, 1)[0] == pytest.approx(float(row["slope"]), abs=1e-9)
    listed = [(row["experiment"], row["kappa"]) for row in rows_of("kl_slopes.csv")]
    assert listed == [(e.name, str(e.kappa)) for e in kl_rates.experiments()]


def test_kl_rates() -> None:
    (experiment,) = (
        e for e in kl_rates.experiments() if (e.name, e.kappa) == ("KL-Spider, |w|^tau", 2)
    )
    run = next(experiment.runs(points=1, seeds=1))
    ours = next(row for row in rows_of("kl_rates.csv") if row["kappa"] == "2.0")
    assert run.measured == pytest.approx(float(ours["measured"]), rel=0.3)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", list(kl_real.METHODS))
def test_kl_real(name: str) -> None:
    """Every method on the smallest data, all seeds."""
    case = kl_real.breast_cancer()
    (ours,) = (
        row
        for row in rows_of("kl_real.csv")
        if (row["data"], row["method"], row["epsilon"]) == (case.name, name, "1.0")
    )
    settings = {
        key: float(value) for key, value in (p.split("=") for p in ours["settings"].split())
    }
    method, choices = kl_real.METHODS[name]
    assert settings in choices
    risks = [case.excess_risk(method(case, 1.0, seed, settings)) for seed in range(1, 4)]
    assert np.mean(risks) == pytest.approx(float(ours["excess_risk"]), rel=0.05)


def test_srgd_exponents_are_those_of_the_rates() -> None:
    kinds = (str, int, int, float, str, int, float, float, float, float)
    cells = [
        srgd_rates.Cell(*(kind(value) for kind, value in zip(kinds, row.values(), strict=True)))
        for row in rows_of("srgd_rates.csv")
    ]
    found = [
        srgd_rates.exponents(
            [c for c in cells if (c.loss, c.method) == (row["loss"], row["method"])]
        )
        for row in rows_of("srgd_exponents.csv")
    ]
    ours = [(float(row["alpha"]), float(row["gamma"])) for row in rows_of("srgd_exponents.csv")]
    np.testing.assert_allclose(found, ours, atol=2e-3)


@fashion
@pytest.mark.slow
def test_one_pass() -> None:
    """One seed of three, of the largest batches."""
    row = rows_of("one_pass.csv")[-5]
    training, _, test = one_pass.load_split(FASHION_MNIST_DIRECTORY)
    settings = srgd_rates.settings_for(
        srgd_rates.METHODS[row["method"]],
        int(row["steps"]),
        int(row["batch_size"]),
        float(row["clip_norm"]),
        float(row["beta"]),
    )
    found = one_pass.train(settings, training, float(row["epsilon"]), 1)
    accuracy = one_pass.accuracy(found[row["averaged"] == "True"], test)
    assert accuracy == pytest.approx(float(row["accuracy"]), abs=0.03)


def test_srgd_rates() -> None:
    """The first problem of the table; the mean of three repetitions of ten."""
    row = rows_of("srgd_rates.csv")[1]
    task = srgd_rates.Task(row["loss"], int(row["p"]))
    n, epsilon = int(row["n"]), float(row["epsilon"])
    settings = srgd_rates.settings_for(
        srgd_rates.METHODS[row["method"]],
        int(row["steps"]),
        n // int(row["steps"]),
        float(row["clip_norm"]),
        float(row["beta"]),
    )
    found = [
        srgd_rates.excess_of(task, task.sample(n, seed), settings, epsilon, seed)
        for seed in (1, 2, 3)
    ]
    assert np.mean(found) == pytest.approx(float(row["excess"]), rel=0.5)
