"""The measured slopes are within 15 % of the theorems' exponents (seeded, so no false alarms)."""

import csv

import numpy as np
import pytest

from dpoptim.reproduce import kl_rates
from dpoptim.reproduce.kl_rates import experiments

SPIDER = "KL-Spider, |w|^tau"
CASES = [
    pytest.param(SPIDER, 1.25, marks=pytest.mark.figures),
    pytest.param(SPIDER, 1.5, marks=pytest.mark.figures),
    (SPIDER, 2.0),
    pytest.param("adaptive GD, |w|^tau", 1.5, marks=pytest.mark.figures),
]


@pytest.mark.parametrize(("name", "kappa"), CASES)
def test_slopes_are_the_theorems(name: str, kappa: float) -> None:
    (experiment,) = (e for e in experiments() if e.name == name and e.kappa == kappa)
    runs = list(experiment.runs(points=4, seeds=1))
    slope = np.polyfit(np.log([r.x for r in runs]), np.log([r.measured for r in runs]), 1)[0]
    assert slope == pytest.approx(experiment.expected, rel=0.15)


def test_files_hold_what_was_measured(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kl_rates,
        "experiments",
        lambda: [e for e in experiments() if e.name == SPIDER and e.kappa == 2.0],
    )
    slopes = kl_rates.kl_rates(tmp_path / "out", quick=True)
    assert len(slopes) == 1
    with (tmp_path / "out" / "kl_rates.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3
    assert (tmp_path / "out" / "kl_slopes.csv").read_text().count("\n") == 2
    assert (tmp_path / "out" / "kl_rates.png").stat().st_size > 10_000
