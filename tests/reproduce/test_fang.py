"""Other budgets (Fang et al. 2023, Fig. 5) on made-up images."""

import csv
from pathlib import Path

import pytest
import torch

from dpoptim.reproduce import fang_budgets


@pytest.mark.figures
def test_each_budget_has_both_methods_and_more_is_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 10, (1200,), generator=generator)
    x = torch.eye(784)[y] + 0.01 * torch.randn(1200, 784, generator=generator)
    parts = [(x[a:b], y[a:b]) for a, b in ((0, 1000), (1000, 1100), (1100, 1200))]
    monkeypatch.setattr(fang_budgets, "RECORDS", 800)
    monkeypatch.setattr(fang_budgets, "BATCH", 200)
    monkeypatch.setattr(fang_budgets, "EPOCHS", 3)
    pairs = ((0.05, 1e-5), (8.0, 1e-5))
    rows = fang_budgets.budgets(tmp_path, tuple(parts), seeds=2, pairs=pairs)
    assert [(row.epsilon, row.method) for row in rows] == [
        (epsilon, method)
        for epsilon, _ in pairs
        for method in ("gradient clipping", "value clipping, sharp")
    ]
    assert rows[0].accuracy < 0.6
    assert rows[2].accuracy > 0.9
    with (tmp_path / "fang_fig5.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4
