"""The comparison on real data: every method learns something, and the file says how it was
done.
"""

import csv
from pathlib import Path

import pytest

from dpoptim.reproduce import kl_real as module
from dpoptim.reproduce.kl_real import EPSILONS, METHODS, kl_real


def check(folder: Path) -> None:
    rows = kl_real(folder, quick=True)
    assert {(row.method, row.epsilon) for row in rows} == {
        (name, epsilon) for name in module.METHODS for epsilon in EPSILONS
    }
    for row in rows:
        assert row.excess_risk > 0, "no private run beats the minimum"
        assert row.test_accuracy > 75, row  # 63 % are benign
        assert "lipschitz=" in row.settings
    with (folder / "kl_real.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)


@pytest.mark.figures
def test_two_methods_learn_breast_cancer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """test_results_of_solvers.py runs each at one epsilon."""
    few = {name: METHODS[name] for name in ("noisy GD", "stationary point")}
    monkeypatch.setattr(module, "METHODS", few)
    check(tmp_path)


@pytest.mark.figures
def test_every_method_learns_breast_cancer(tmp_path: Path) -> None:
    check(tmp_path)
