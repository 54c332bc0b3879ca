"""Attempts to make one record count for more than it is charged, in one pass of accelerated
SRGD.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpoptim.audit.bounds import Errors, gdp_lower_bound
from dpoptim.audit.replay import audit_replay
from dpoptim.gate import Gate
from dpoptim.noise.correlated import BinaryTree, Independent, Strategy, ToeplitzSquareRoot
from dpoptim.noise.stream import KeyStream
from dpoptim.solvers.accelerated_srgd import accelerated_srgd
from dpoptim.solvers.budget import Budget
from dpoptim.solvers.linear_model import LinearModel
from dpoptim.solvers.problem import LinearProblem
from dpoptim.solvers.srgd_settings import SRGD

STEPS, BATCH, FEATURES, BOUND = 5, 4, 3, 0.7
Data = tuple[Tensor, Tensor]
STRANGE = [0.0, 1.0, -3.0, 1e30, -1e300, math.inf, -math.inf, math.nan]


def data(seed: int) -> Data:
    made = torch.Generator().manual_seed(seed)
    n = STEPS * BATCH
    return torch.randn(n, FEATURES, generator=made, dtype=torch.float64) * 3, torch.randn(
        n, generator=made
    ).double()


def problem(loss: str) -> LinearProblem:
    return LinearProblem(LinearModel(loss, FEATURES), capacity=BATCH)  # type: ignore[arg-type]


def sums(records: Data, loss: str, gradient: str, patch: pytest.MonkeyPatch) -> list[Tensor]:
    """The sums that the gate is handed when what it releases is fixed beforehand: the same history
    for all data.
    """
    seen: list[Tensor] = []

    def release(self: Gate, given: list[Tensor]) -> list[Tensor]:
        seen.append(given[0].clone())
        script = torch.full_like(given[0], 0.3 * (-1.0) ** len(seen)) * torch.arange(
            1, len(given[0]) + 1
        )
        return [script.double()]

    with patch.context() as patched:
        patched.setattr(Gate, "release_sum", release)
        accelerated_srgd(
            problem(loss),
            records,
            SRGD(STEPS, BATCH, BOUND, 0.5, gradient=gradient),
            budget=Budget(1e-5, mu=1.0),  # type: ignore[arg-type]
        )
    return seen


@settings(max_examples=60)
@given(
    index=st.integers(0, STEPS * BATCH - 1),
    x=st.lists(st.sampled_from(STRANGE), min_size=FEATURES, max_size=FEATURES),
    y=st.sampled_from(STRANGE),
    loss=st.sampled_from(["squared", "logistic", "huber"]),
    gradient=st.sampled_from(["recursive", "independent"]),
)
def test_one_record_moves_one_sum_by_at_most_the_bound(
    index: int, x: list[float], y: float, loss: str, gradient: str
) -> None:
    """And that one by at most the bound."""
    with pytest.MonkeyPatch.context() as patch:
        rows, targets = data(1)
        rows[index], targets[index] = torch.tensor(x, dtype=torch.float64), y
        with_it = sums((rows, targets), loss, gradient, patch)
        rows[index] = math.nan  # a record that counts as zero
        without = sums((rows, targets), loss, gradient, patch)
    assert len(with_it) == len(without) == STEPS
    for t, (a, b) in enumerate(zip(with_it, without, strict=True)):
        assert bool(torch.isfinite(a).all())
        if t == index // BATCH:
            assert float((a - b).norm()) <= BOUND
        else:
            assert torch.equal(a, b)


def test_the_bound_is_reached() -> None:
    with pytest.MonkeyPatch.context() as patch:
        rows, targets = data(2)
        rows[9], targets[9] = 1e6, 1e6
        with_it = sums((rows, targets), "squared", "recursive", patch)
        rows[9] = math.nan
        without = sums((rows, targets), "squared", "recursive", patch)
    assert float((with_it[2] - without[2]).norm()) > 0.99 * BOUND


class Canary:
    """Many runs in one dimension each, side by side: nobody has a gradient but a canary, whose is
    the bound (or -bound).
    """

    def __init__(self, runs: int) -> None:
        self.dimension = runs

    def initial(self) -> Tensor:
        return torch.zeros(self.dimension, dtype=torch.float64)

    def prepare(self, records: tuple[Tensor, ...]) -> Tensor:
        return records[0]

    def clipped_sum(self, batch: Tensor, terms: object, bound: float) -> Tensor:
        return torch.full((self.dimension,), float(batch.sum()) * bound, dtype=torch.float64)

    def total_loss(self, batch: Tensor, w: Tensor) -> float:
        return 0.0

    def penalty(self, w: Tensor) -> float:
        return 0.0

    def penalty_gradient(self, w: Tensor) -> Tensor:
        return torch.zeros_like(w)


@pytest.mark.parametrize(
    "mechanism", [None, Independent(), BinaryTree(), ToeplitzSquareRoot()], ids=repr
)
@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
def test_an_audit_of_whole_runs_finds_the_budget(
    mechanism: Strategy | None, relation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two worlds, the best attack on all that is released; wrong with probability below 1e-6."""
    mu, runs, seen = 1.5, 40_000, []
    release = Gate.release_sum

    def keep(self: Gate, given: list[Tensor]) -> list[Tensor]:
        released = release(self, given)
        seen.append(released[0].clone())
        return released

    monkeypatch.setattr(Gate, "release_sum", keep)

    def world(canary: float, seed: int) -> np.ndarray:
        seen.clear()
        records = torch.zeros(STEPS * BATCH)
        records[0] = canary
        accelerated_srgd(
            Canary(runs),
            (records,),
            SRGD(STEPS, BATCH, BOUND, 1.0, mechanism=mechanism),
            budget=Budget(1e-5, mu=mu),
            neighboring=relation,
            noise_seed=seed,
        )
        return torch.stack(seen).numpy()

    low = -1.0 if relation == "replace-one" else 0.0
    direction = np.linalg.solve(np.cov(world(0.0, 1)), np.eye(STEPS)[0])
    absent, present = direction @ world(low, 2), direction @ world(1.0, 3)
    threshold = (np.mean(absent) + np.mean(present)) / 2
    errors = Errors(int(np.sum(absent > threshold)), runs, int(np.sum(present <= threshold)), runs)
    assert 0.9 * mu <= gdp_lower_bound(errors, confidence=1 - 1e-6) <= mu


@pytest.mark.parametrize("strange", [math.nan, math.inf, 1e30])
def test_strange_records_leave_the_result_finite(strange: float) -> None:
    rows, targets = data(3)
    rows[::2] = strange
    result = accelerated_srgd(
        problem("squared"),
        (rows, targets),
        SRGD(STEPS, BATCH, BOUND, 1.0),
        budget=Budget(1e-5, mu=1.0),
        noise_seed=0,
    )
    assert bool(torch.isfinite(result.weights).all())


def test_nothing_but_the_releases_depends_on_the_data() -> None:
    def run(records: Data) -> dict[str, Any]:
        settings = SRGD(STEPS, BATCH, BOUND, 1.0)
        result = accelerated_srgd(
            problem("huber"), records, settings, budget=Budget(1e-5, epsilon=1.0), noise_seed=3
        )
        return {
            "released": (result.weights, result.average, result.gradient_norms),
            "guarantee": str(result.guarantee),
            "settings": repr(result.settings),
            "lengths": (len(result.gradient_norms), len(result.weights)),
        }

    first, second = data(4), data(4)
    second[0][7], second[1][7] = math.nan, math.inf
    found = audit_replay(run, first, second, charged=("released",))
    assert found.verdict == "consistent", str(found)


def test_every_run_has_fresh_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[bool] = []
    original = Gate.__init__

    def note(self: Gate, **arguments: Any) -> None:
        stream: KeyStream = arguments["noise"]
        seeded.append(stream.seeded)
        original(self, **arguments)

    monkeypatch.setattr(Gate, "__init__", note)
    for _ in range(2):
        accelerated_srgd(
            problem("huber"), data(5), SRGD(STEPS, BATCH, BOUND, 1.0), budget=Budget(1e-5, mu=1.0)
        )
    assert seeded == [False, False]
