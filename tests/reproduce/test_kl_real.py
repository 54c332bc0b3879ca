"""The comparison on real data: every method learns something, and the file says how it was
done.
"""

import csv

from dpoptim.reproduce.kl_real import EPSILONS, METHODS, kl_real


def test_every_method_learns_breast_cancer(tmp_path) -> None:
    rows = kl_real(tmp_path, quick=True)
    assert {(row.method, row.epsilon) for row in rows} == {
        (name, epsilon) for name in METHODS for epsilon in EPSILONS
    }
    for row in rows:
        assert row.excess_risk > 0, "no private run beats the minimum"
        assert row.test_accuracy > 75, row  # 63 % are benign
        assert "lipschitz=" in row.settings
    with (tmp_path / "kl_real.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
