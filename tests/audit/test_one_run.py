"""The one-run audit: right about coins that nobody saw, and able to refute."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.audit.one_run import OneRun, p_value, refuted_epsilon

CLAIM = dpoptim.Guarantee(1.0, 1e-5, "zero-out", "test")  # type: ignore[arg-type]


def test_p_values_of_pure_privacy_are_binomial() -> None:
    assert p_value(100, 10, 10, 0.0, 0.0) == pytest.approx(2.0**-10)
    chance = math.e / (1 + math.e)
    assert p_value(100, 10, 9, 1.0, 0.0) == pytest.approx(chance**10 + 10 * chance**9 * (1 - chance))
    assert p_value(100, 10, 10, 1.0, 1e-3) > p_value(100, 10, 10, 1.0, 0.0)
    assert p_value(100, 10, 0, 1.0, 0.0) == 1.0


def test_the_bound_inverts_the_p_value() -> None:
    bound = refuted_epsilon(1000, 200, 190, 1e-6, 0.05)
    assert p_value(1000, 200, 190, bound - 1e-6, 1e-6) <= 0.05 < p_value(1000, 200, 190, bound + 1e-6, 1e-6)
    assert refuted_epsilon(1000, 200, 100, 1e-6, 0.05) == 0.0


def test_a_randomised_response_is_found_and_not_exceeded() -> None:
    """Each coin is shown through a randomised response of epsilon 1: the bound stays below 1 and comes near."""
    epsilon, found = 1.0, []
    rng = np.random.default_rng(0)
    for seed in range(60):
        audit = OneRun(2000, seed=seed)
        flipped = rng.random(2000) < 1 / (1 + math.exp(epsilon))
        shown = audit.included ^ flipped
        result = audit.result(shown + rng.random(2000) * 0.5, claimed=CLAIM, guesses=1000, confidence=0.99)
        found.append(result.lower_bound)
    assert np.mean(np.array(found) > epsilon) <= 0.05  # 0.01 expected
    assert np.mean(found) > 0.7
    blind = [OneRun(500, seed=s).result(rng.random(500), claimed=CLAIM, confidence=0.999).lower_bound for s in range(50)]
    assert max(blind) <= 1.0


def train(noise_multiplier: float, model: nn.Module, steps: int) -> tuple[OneRun, np.ndarray, dpoptim.Guarantee]:
    """Canaries with random labels beside ordinary records; score: minus their loss."""
    generator = torch.Generator().manual_seed(0)
    audit = OneRun(300, seed=1)
    x = torch.randn(300, 20, generator=generator)
    y = torch.randint(0, 2, (300,), generator=generator)
    others = torch.randn(100, 20, generator=generator)
    kept = torch.from_numpy(audit.included)
    data = TensorDataset(torch.cat([x[kept], others]), torch.cat([y[kept], (others[:, 0] > 0).long()]))
    n = len(data)
    plan = dpoptim.DPSGD(1.0).plan(
        n=n, batch_size=n, steps=steps, noise_multiplier=noise_multiplier, delta=1e-5, neighboring="zero-out"
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with dpoptim.attach(plan, model, optimizer, data, noise_seed=0) as private:
        for a, b in private.batches():
            F.cross_entropy(model(a), b).backward()
            optimizer.step()
        spent = private.spent()
    with torch.no_grad():
        return audit, -F.cross_entropy(model(x), y, reduction="none").numpy(), spent


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))


def test_a_private_run_is_not_refuted() -> None:
    audit, scores, spent = train(30.0, network(0), 60)
    result = audit.result(scores, claimed=spent)
    assert result.verdict == "consistent"
    assert "consistent" in str(result)


def test_a_run_that_remembers_refutes_a_small_claim() -> None:
    audit, scores, _ = train(0.05, network(0), 300)
    result = audit.result(scores, claimed=CLAIM)
    assert result.verdict == "refuted"
    assert CLAIM.epsilon < result.lower_bound <= result.limit
    assert result.to_json()["verdict"] == "refuted"


def test_bad_input_is_named() -> None:
    audit = OneRun(10, seed=0)
    with pytest.raises(ValueError, match="scores must be 10 finite numbers"):
        audit.result(np.zeros(9), claimed=CLAIM)
    with pytest.raises(ValueError, match="scores must be 10 finite numbers"):
        audit.result(np.full(10, np.nan), claimed=CLAIM)
    for guesses in (3, 12, 0):
        with pytest.raises(ValueError, match="guesses must be an even number"):
            audit.result(np.zeros(10), claimed=CLAIM, guesses=guesses)
    with pytest.raises(ValueError, match="canaries must be at least 2"):
        OneRun(1)
