"""One-run audits of a softmax, a CNN, a tiny GPT and a loop of one's own: sound runs stand,
weakened ones are refuted.

A right implementation is refuted with probability at most 1e-6 by each; weak ones are refuted at
95 %. Seeds are fixed.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import ndtr, ndtri
from scipy.stats import binom
from torch import Tensor, nn

import dpoptim
from dpoptim.audit.attached_run import attached_run
from dpoptim.audit.one_run import (
    binomial_epsilon,
    binomial_pvalue,
    one_run,
    tradeoff_refutes,
)
from dpoptim.noise.gaussian import add_normal
from dpoptim.noise.stream import KeyStream
from mutants.faults import noisy_by

SURE = 1 - 1e-6
M = 400


def test_the_binomial_bound_at_delta_zero() -> None:
    for correct in (0, 20, 60, 100):
        assert binomial_pvalue(500, 100, correct, 1.0, 0.0) == pytest.approx(
            binom.sf(correct - 1, 100, 1 / (1 + math.exp(-1))), abs=1e-12
        )
    assert binomial_pvalue(500, 100, 90, 1.0, 1e-4) > binomial_pvalue(500, 100, 90, 1.0, 0.0)
    assert binomial_epsilon(500, 100, 50, 1e-5, 0.05) == 0
    assert 2 < binomial_epsilon(500, 100, 98, 1e-5, 0.05) < math.log(98 / 2)


def gdp(mu: float) -> Callable[[float], float]:
    """B^-1 of mu-GDP."""
    return lambda y: float(ndtr(ndtri(y) - mu))


def test_the_tradeoff_bound_knows_randomised_response() -> None:
    """At epsilon = 0 the guesses are coins: the bound may not refute what a coin reaches too
    often.
    """
    nothing = lambda y: y  # noqa: E731
    assert not tradeoff_refutes(nothing, 200, 100, 55, 0.05)
    assert tradeoff_refutes(nothing, 200, 100, 80, 0.05)
    # right guesses of the best attack on 0.25-GDP, all coins guessed
    expected = round(1000 * ndtr(0.25 / 2))
    assert not tradeoff_refutes(gdp(0.25), 1000, 1000, expected + 20, 0.05)
    assert tradeoff_refutes(gdp(0.25), 1000, 1000, expected + 150, 0.05)


def test_false_alarms_of_the_tradeoff_bound() -> None:
    """Independent canaries of exactly mu-GDP, 2,000 experiments at level 0.05: 100 alarms would be
    right, 150 too many.
    """
    rng, mu, m, alarms = np.random.default_rng(0), 1.0, 60, 0
    refuted = {c: tradeoff_refutes(gdp(mu), m, 20, c, 0.05) for c in range(21)}
    for _ in range(2000):
        present = rng.random(m) < 0.5
        order = np.argsort(rng.normal(size=m) + mu * present)
        alarms += refuted[int(present[order[-10:]].sum() + (~present[order[:10]]).sum())]
    assert alarms <= 150


class TinyGPT(nn.Module):
    """One block: embedding, causal attention, MLP, head; one loss a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.out = nn.Embedding(64, 16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        q, k, v = self.mix(h).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2) / 4).masked_fill(torch.ones(8, 8).triu(1).bool(), -1e9)
        return self.head(self.norm(h + torch.tanh(self.out(scores.softmax(-1) @ v))))


def sequence_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    losses = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    return 10 * losses.view(len(tokens), -1).sum(1)


def labels_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return 10 * F.cross_entropy(logits, labels, reduction="none")


def case(name: str) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    if name == "softmax":
        return nn.Linear(300, 10), labels_loss, (torch.randn(M, 300), torch.randint(10, (M,)))
    if name == "cnn":
        trunk = [nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 10)]
        return (
            nn.Sequential(*trunk),
            labels_loss,
            (torch.randn(M, 1, 8, 8), torch.randint(10, (M,))),
        )
    tokens = torch.randint(64, (M, 8))
    return TinyGPT(), sequence_loss, (tokens, tokens)


def plan(neighboring: str = "add-or-remove-one") -> dpoptim.Plan:
    return dpoptim.DPSGD(clip_norm=1.0).plan(
        n=M, batch_size=M, steps=4, noise_multiplier=6.0, delta=1e-5, neighboring=neighboring
    )


@pytest.mark.parametrize("name", ["softmax", "cnn", "gpt"])
@pytest.mark.parametrize("neighboring", ["add-or-remove-one", "zero-out"])
@pytest.mark.thinned(2)
def test_a_sound_run_stands_and_a_weak_one_falls(name: str, neighboring: str) -> None:
    promise = plan(neighboring)
    model, loss, canaries = case(name)
    run = attached_run(promise, model, loss, canaries, noise_seed=1)
    sound = one_run(run, M, promise, confidence=SURE, seed=1)
    assert sound.verdict == "consistent"
    with noisy_by(lambda stream, total, std: add_normal(stream, total, 0.1 * std))():
        weak = one_run(run, M, promise, seed=1)
    assert weak.verdict == "refuted"
    assert weak.correct > sound.correct


@pytest.mark.variants
def test_sampled_batches() -> None:
    model, loss, canaries = case("softmax")
    sampled = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=M, batch_size=M // 4, steps=10, noise_multiplier=3.0, delta=1e-5
    )
    run = attached_run(sampled, model, loss, canaries, noise_seed=1)
    result = one_run(run, M, sampled, confidence=SURE, seed=1)
    assert result.verdict == "consistent"
    with noisy_by(lambda stream, total, std: add_normal(stream, total, 0.1 * std))():
        assert one_run(run, M, sampled, seed=1).verdict == "refuted"


@pytest.mark.parametrize(("share", "verdict"), [(1.0, "consistent"), (0.1, "refuted")])
def test_a_loop_of_ones_own(share: float, verdict: str) -> None:
    """Not through attach: a noisy sum of coordinates, made by hand."""
    promise = plan()

    def run(present: np.ndarray) -> np.ndarray:
        total = torch.zeros(M, dtype=torch.float64)
        for step in range(promise.steps):
            noisy = torch.from_numpy(present).double()
            add_normal(
                KeyStream.from_seed(step, "own loop"), noisy, share * promise.noise_multiplier
            )
            total += noisy
        return total.numpy()

    result = one_run(run, M, promise, confidence=SURE, seed=2)
    assert result.verdict == verdict
    assert verdict in str(result)
    assert result.to_json()["verdict"] == verdict


def test_bad_input() -> None:
    zeros = lambda present: np.zeros(len(present))  # noqa: E731
    with pytest.raises(ValueError, match="replace-one"):
        one_run(zeros, M, plan("replace-one"))
    with pytest.raises(ValueError, match="canaries must be"):
        one_run(zeros, 3, plan())
    with pytest.raises(ValueError, match="guesses must be"):
        one_run(zeros, 100, plan(), guesses=400)
    with pytest.raises(ValueError, match="one score a canary"):
        one_run(lambda present: np.zeros(3), 100, plan())
