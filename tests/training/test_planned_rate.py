"""The loops of `dpoptim train` and of the estimators follow the decay that noise is fitted to."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from command_work import run
from dpoptim import DPFTRL, DPSGD, PrivateQuantile
from dpoptim.estimators import DPSGDClassifier
from dpoptim.runs import interrupted
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


@pytest.mark.variants
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
            rate.before(step, 1.0)
            assert optimizer.param_groups[0]["lr"] == 0.3


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """Clip norm and learning rate of every step of both loops from here on."""
    found: list[tuple[float, float]] = []

    class Noting(PlannedRate):
        def before(self, step: int, clip_norm: float) -> None:
            super().before(step, clip_norm)
            found.append((clip_norm, self._optimizer.param_groups[0]["lr"]))

    monkeypatch.setattr("dpoptim.estimators.network_fit.PlannedRate", Noting)
    monkeypatch.setattr("dpoptim.runs.train.PlannedRate", Noting)
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("when", ["at the start", "all along"])
def test_a_chosen_rate_follows_the_clip_norm_that_is_found(
    moves: list[tuple[float, float]], when: Any
) -> None:
    """Only the product of the two matters, and one of them was chosen for another norm."""
    x = np.random.default_rng(0).uniform(-1, 1, (600, 3))
    common: dict[str, Any] = {
        **{"epsilon": 8.0, "delta": 1e-5, "classes": [0, 1], "hidden_layer_sizes": ()},
        **{"batch_size": 200, "epochs": 10, "noise_seed": 0, "clip_norm": 3.0},
        "method_options": {"clip_norm": PrivateQuantile(0.5, when=when, start=3.0)},
    }
    fitted = DPSGDClassifier(**common).fit(x, x[:, 0] > 0)
    trained = [(norm, rate) for norm, rate in moves if not math.isnan(norm)]
    assert abs(trained[-1][0] - 3.0) > 1
    for norm, rate in trained:
        assert rate * norm == pytest.approx(3.0 * fitted.learning_rate_)
    for told in ({"learning_rate": 0.5}, {"optimizer": "adam"}):  # Adam divides by the size
        del moves[:]
        DPSGDClassifier(**common, **told).fit(x, x[:, 0] > 0)
        assert len({rate for _, rate in moves}) == 1


def test_the_command_follows_the_clip_norm_and_says_so(
    moves: list[tuple[float, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it goes on: a checkpoint knows the rate that the run began with."""
    common = "--epochs 4 --batch-size 200 --seed 0 --noise-seed 1 --no-compare --epsilon 8"
    said = ["train", "--data", "digits", "--clip-quantile", "0.5", *common.split()]
    shown = run(*said, "--out", str(tmp_path / "run"))
    norm, rate = moves[-1]
    base = next(rate for norm, rate in moves if math.isnan(norm))
    assert rate * norm == pytest.approx(base)
    assert f"learning rate {base:g} for clip norm 1, over the one found" in shown
    original = interrupted.SavedRun.after_step

    def stop_after_4(self: Any, private: Any, *rest: Any) -> None:
        self.stop.asked = private.steps_done == 4
        original(self, private, *rest)

    monkeypatch.setattr(interrupted.SavedRun, "after_step", stop_after_4)
    parts = [*said, "--out", str(tmp_path / "parts")]
    run(*parts, code=130)
    monkeypatch.setattr(interrupted.SavedRun, "after_step", original)
    refused = run(*parts, "--resume", "--learning-rate", f"{base:g}", code=2)
    assert "--resume: the run has another learning rate" in refused
    del moves[:]
    run(*parts, "--resume")
    assert moves[0] == pytest.approx((norm, rate))
