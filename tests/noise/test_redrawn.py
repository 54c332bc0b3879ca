"""Noise that is drawn again: the same draws, none used for two steps, errors near the optimum."""

import numpy as np
import pytest
import torch

from dpoptim.methods import DPFTRL
from dpoptim.noise.correlated import BestStrategy, NoiseState, RedrawnToeplitz, Workload
from dpoptim.noise.correlated.choose_strategy import mean_error
from dpoptim.noise.stream import KeyStream
from dpoptim.theory.dense_strategies import least_mean_error

STRATEGY = RedrawnToeplitz(4, 6)


def started(sizes: list[int], seed: int = 1) -> NoiseState:
    return STRATEGY.start(12, sizes, KeyStream.from_seed(seed, "noise"))


def released(state: NoiseState, steps: int) -> torch.Tensor:
    """What is added to zeros in the next steps: shape (steps, entries of all tensors)."""
    rows = []
    for _ in range(steps):
        buffers = [torch.zeros(size, dtype=torch.float64) for size in state.sizes]
        state.add(buffers, 1.0)
        rows.append(torch.cat(buffers))
    return torch.stack(rows)


def test_nothing_is_remembered_and_earlier_draws_come_again() -> None:
    """The increments are those of draws that are kept: z once, and a share of those before."""
    state = started([40, 0, 70_000])
    increments = released(state, 12)
    assert not any(state._vectors)
    z = np.linalg.solve(STRATEGY.inverse_matrix(12), increments.numpy())
    assert np.abs(np.cov(z) - np.eye(12)).max() < 6 * np.sqrt(2 / 70_000)


@pytest.mark.parametrize("stops", [(1,), (5,), (5, 6), (4, 5, 11)])
def test_a_seeded_run_that_was_resumed_is_the_one_without_interruption(
    stops: tuple[int, ...],
) -> None:
    whole, parts, done = released(started([3, 5]), 12), [], 0
    stream = KeyStream.from_seed(1, "noise")
    state = STRATEGY.start(12, [3, 5], stream)
    for stop in (*stops, 12):
        parts.append(released(state, stop - done))
        again = KeyStream.from_seed(1, "noise")
        again.skip_to(*stream.reached)
        stream, done = again, stop
        state = STRATEGY.start(12, [3, 5], stream).restore(state.secret_state())
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)


def test_what_was_drawn_with_another_key_is_taken_back_all_the_same() -> None:
    first = started([50_000])
    parts = [released(first, 5)]
    second = started([50_000], seed=2).restore(first.secret_state())
    parts.append(released(second, 7))
    assert not any(second._vectors)  # once it has been
    variance = torch.cat(parts).cumsum(0).square().mean(1).numpy()
    said = (STRATEGY.prefix_std(12) / STRATEGY.sensitivity(12)) ** 2
    assert np.abs(variance / said - 1).max() < 6 * np.sqrt(2 / 50_000)


@pytest.mark.parametrize(
    ("steps", "passes", "workload", "allowed"),
    [
        (128, 1, Workload(), 1.09),
        (128, 4, Workload(), 1.1),
        (128, 4, Workload(0.9), 1.1),
        (128, 8, Workload(0.0, "cosine"), 1.12),
    ],
)
def test_errors_are_near_the_dense_optimum(
    steps: int, passes: int, workload: Workload, allowed: float
) -> None:
    separation = steps // passes
    strategy = BestStrategy(0, workload).made_for(steps, passes, separation)
    assert isinstance(strategy, RedrawnToeplitz)
    found = mean_error(strategy, steps, passes, separation)
    assert 1 <= found / least_mean_error(steps, separation, 60, workload) <= allowed


def test_a_plan_may_ask_for_no_memory() -> None:
    given = {"n": 1_000, "batch_size": 100, "epochs": 4, "epsilon": 4.0, "delta": 1e-6}
    plans = [
        DPFTRL(1.0, buffers=buffers).plan(**given, neighboring="zero-out") for buffers in (0, 128)
    ]
    assert plans[0].noise_multiplier == plans[1].noise_multiplier
    assert type(plans[0]).from_json(plans[0].to_json()) == plans[0]
    with pytest.raises(ValueError, match="buffers"):
        DPFTRL(1.0, buffers=-1)
    with pytest.raises(ValueError, match="bands"):
        RedrawnToeplitz(0)
