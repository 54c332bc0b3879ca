"""The loops of `dpoptim train` and of the estimators follow the decay that noise is fitted to."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from command_work import run
from dpoptim import DPFTRL, DPSGD
from dpoptim.estimators import DPSGDClassifier
from dpoptim.training.planned_rate import PlannedRate


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Learning rates of the steps of all SGD optimizers made from here on."""
    rates: list[float] = []

    class Noted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    monkeypatch.setattr(torch.optim, "SGD", Noted)
    return rates


def cosine(steps: int) -> np.ndarray:
    return (1 + np.cos(np.pi * np.arange(steps) / steps)) / 2


def test_an_estimator_follows_the_decay(seen: list[float]) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (60, 3))
    DPSGDClassifier(
        4.0,
        1e-4,
        classes=[0, 1],
        hidden_layer_sizes=(),
        batch_size=20,
        epochs=2,
        learning_rate=0.5,
        method="dp-ftrl",
        method_options={"decay": "cosine"},
        noise_seed=0,
    ).fit(x, (x[:, 0] > 0).astype(int))
    assert seen[-6:] == pytest.approx(0.5 * cosine(6))  # the one before is of a trial


def test_the_command_follows_the_decay_and_says_so(tmp_path: Path, seen: list[float]) -> None:
    out = tmp_path / "run"
    common = "--epochs 1 --batch-size 200 --learning-rate 0.5 --seed 0 --noise-seed 1 --no-compare"
    said = ["train", "--data", "digits", "--method", "dp-ftrl", "--set"]
    run(*said, "decay=cosine", *common.split(), "--out", str(out))
    assert seen == pytest.approx(0.5 * cosine(len(seen)))
    assert len(seen) > 5
    assert "0.5, cosine decay" in (out / "report.html").read_text()
    steps = len(seen)
    del seen[:]
    run(*said, "decay=[0.2, 1, 0.1]", *common.split(), "--out", str(tmp_path / "warm"))
    assert seen == pytest.approx(
        0.5 * np.interp(np.linspace(0, 2, steps), range(3), [0.2, 1.0, 0.1])
    )
    assert "0.5, a plan from 0.2 over 1 to 0.1" in (tmp_path / "warm" / "report.html").read_text()


def test_without_a_decay_rates_stay() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=9.0)
    budget: dict[str, Any] = {"noise_multiplier": 1.0, "delta": 1e-5}
    for method in (DPSGD(1.0), DPFTRL(1.0, momentum=0.9)):
        rate = PlannedRate(optimizer, 0.3, method.plan(n=20, batch_size=4, epochs=1, **budget))
        for step in range(5):
            rate.before(step)
            assert optimizer.param_groups[0]["lr"] == 0.3
