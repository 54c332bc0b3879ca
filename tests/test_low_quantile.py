"""The low quantile of per-record constants: right, priced, and drawn with the probabilities of its
mechanism.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dpoptim
from dpoptim.accounting.budget_words import WholeBudgetWarning
from dpoptim.gate import SelectionGate
from dpoptim.methods.low_quantile import private_low_quantile
from dpoptim.noise.stream import KeyStream
from dpoptim.reproduce.real_cases import lipschitz_constants
from dpoptim.solvers.linear_model import LinearModel


def test_it_is_near_the_quantile() -> None:
    values = np.exp(np.random.default_rng(0).normal(size=2000))
    for quantile in (0.05, 0.5):
        found = [
            private_low_quantile(values, quantile, epsilon=0.5, low=1e-3, high=1e3, noise_seed=s)[0]
            for s in range(40)
        ]
        shares = [(values < one).mean() for one in found]
        assert abs(np.mean(shares) - quantile) < 0.04
    _, guarantee = private_low_quantile(values, 0.1, epsilon=0.5, low=1e-3, high=1e3, noise_seed=0)
    assert (guarantee.epsilon, guarantee.delta) == (0.5, 0.0)
    assert "not for release" in str(guarantee)


def test_neighbours_odds_stay_within_epsilon() -> None:
    """The mechanism's own probabilities, from its scores: the frequencies of a million draws would
    only blur them.
    """
    values = torch.tensor([0.5] * 15 + [1.0] * 15 + [8.0] * 30)
    epsilon, seen = 1.0, []

    def spy(self: Any, scores: list[float]) -> int:
        logits = torch.tensor(scores, dtype=torch.float64) * self.epsilon / 2
        seen.append(logits.log_softmax(0))
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dpoptim.methods.low_quantile.SelectionGate, "select", spy)
        for hostile in (0.5, 1e-30, 1e30, math.nan, math.inf, -1.0):
            changed = values.clone()
            changed[0] = hostile
            private_low_quantile(changed, 0.25, epsilon=epsilon, low=0.1, high=100)
    for one in seen:
        for other in seen:
            assert float((one - other).abs().max()) <= epsilon + 1e-9
    assert float((seen[0] - seen[2]).abs().max()) > 0.1  # the search is not empty


def test_several_numbers_of_a_record_would_be_several_votes() -> None:
    with pytest.raises(ValueError, match="one number for each record"):
        private_low_quantile(np.ones((100, 2)), 0.5, epsilon=1.0, low=0.1, high=10)


def test_the_draw_has_the_mechanisms_odds() -> None:
    noise, counts = KeyStream.from_seed(0, "x"), np.zeros(3)
    for _ in range(1000):
        with dpoptim.Ledger(neighboring="zero-out") as ledger:
            gate = SelectionGate(
                epsilon=2.0, neighboring="zero-out", ledger=ledger, noise=noise, label="x"
            )
            counts[gate.select([0.0, -1.0, 1.0])] += 1
    expected = 1000 * np.exp([0.0, -1.0, 1.0]) / np.exp([0.0, -1.0, 1.0]).sum()
    assert (np.abs(counts - expected) < 6 * np.sqrt(expected)).all()


def test_it_is_charged_with_what_follows() -> None:
    values = np.linspace(1, 2, 500)
    with dpoptim.Ledger(neighboring="zero-out", epsilon=1.2, delta=1e-5) as ledger:
        with pytest.warns(WholeBudgetWarning, match="charges choices"):
            private_low_quantile(values, 0.1, epsilon=1.0, low=0.1, high=10, ledger=ledger)
        with pytest.raises(dpoptim.BudgetExceeded):
            private_low_quantile(values, 0.1, epsilon=1.0, low=0.1, high=10, ledger=ledger)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"quantile": 0.001}, "rank 0.5; the noise needs at least"),
        ({"quantile": 1.5}, "quantile=1.5"),
        ({"epsilon": 0}, "epsilon must be"),
        ({"low": 0}, "low must be"),
        ({"low": 20}, "low=20 must be below high=10"),
        ({"neighboring": "add-or-remove-one"}, "makes n private"),
    ],
)
def test_bad_settings_are_refused_by_name(wrong: dict[str, Any], said: str) -> None:
    settings: dict[str, Any] = {"quantile": 0.2, "epsilon": 1.0, "low": 0.1, "high": 10.0, **wrong}
    with pytest.raises(ValueError, match=said):
        private_low_quantile(np.ones(500), settings.pop("quantile"), **settings)


@settings(max_examples=60)
@given(
    loss=st.sampled_from(["softmax", "logistic", "squared", "huber"]),
    size=st.floats(0, 100),
    weight=st.floats(0, 30),
    seed=st.integers(0, 1000),
)
def test_no_gradient_is_longer_than_its_constant(
    loss: Any, size: float, weight: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    outputs = {"softmax": 3, "logistic": 1}.get(loss, 2)
    model = LinearModel(loss, features=4, outputs=outputs, huber_delta=0.7)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64) * size
    w = torch.randn(model.dimension, generator=generator, dtype=torch.float64)
    w *= weight / w.norm()
    if loss in ("softmax", "logistic"):
        y = torch.randint(0, max(outputs, 2), (6,), generator=generator)
    else:
        y = torch.randn(6, outputs, generator=generator, dtype=torch.float64)
        y *= (2.0 / y.norm(dim=1, keepdim=True)).clamp(max=1)
    constants = lipschitz_constants(model, x, radius=weight, target_bound=2.0)
    norms = model.residuals(model.scores(w, x), y).norm(dim=1) * torch.hypot(
        x.norm(dim=1), torch.ones(6).double()
    )
    assert bool((norms <= constants * (1 + 1e-9)).all())


def test_constants_are_reached() -> None:
    model = LinearModel("softmax", features=2, outputs=3)
    x, y = torch.tensor([[3.0, 4.0]]), torch.tensor([0])
    w = torch.zeros(model.dimension, dtype=torch.float64)
    w[3:5] = 50.0  # the second class, surely
    norm = model.residuals(model.scores(w, x), y).norm() * math.sqrt(26)
    assert float(norm) == pytest.approx(float(lipschitz_constants(model, x)), rel=1e-6)
    with pytest.raises(ValueError, match="finite radius and target_bound"):
        lipschitz_constants(LinearModel("squared", features=2), x)
