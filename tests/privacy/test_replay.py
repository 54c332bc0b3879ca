"""Replay: with the same seeds on neighbouring data, nothing but the released sums may differ."""

import io
import math
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim

N = 40


def run(x: Tensor, y: Tensor, *, zero_loss_for: int = -1, q: float = 0.3) -> dict[str, Any]:
    """One seeded run; everything that a caller can see of it, apart from the batches that the loop
    itself handles.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=round(q * N), steps=8, noise_multiplier=1.0, delta=1e-5
    )
    output, trajectory = io.StringIO(), []
    data = TensorDataset(x, y, torch.arange(len(x)))
    with (
        redirect_stdout(output),
        redirect_stderr(output),
        dpoptim.attach(plan, model, optimizer, data, noise_seed=1) as private,
    ):
        for bx, by, index in private.batches():
            losses = F.cross_entropy(model(bx), by, reduction="none")
            losses = torch.where(index == zero_loss_for, losses * 0, losses)
            losses.mean().backward()
            optimizer.step()
            trajectory.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        seen = {
            "spent": str(private.spent()),
            "remaining": private.remaining(),
            "steps": private.steps_done,
            "basis": private.basis,
            "plan": private.plan.to_json(),
            "finished": private.finished_step,
            "keys": list(model.state_dict()),
        }
    return {**seen, "output": output.getvalue(), "trajectory": torch.stack(trajectory)}


def compare(a: dict[str, Any], b: dict[str, Any]) -> None:
    for key, value in a.items():
        if key != "trajectory":
            assert value == b[key], key


def problem() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(N, 3), torch.randint(0, 2, (N,))


@pytest.mark.parametrize("kind", ["other", "huge", "nan"])
def test_nothing_but_the_model_depends_on_a_record(kind: str) -> None:
    x, y = problem()
    other = x.clone()
    other[5] = {
        "other": torch.ones(3),
        "huge": torch.full((3,), 1e30),
        "nan": torch.full((3,), math.nan),
    }[kind]
    compare(run(x, y), run(other, y))


def test_a_record_with_zero_gradient_changes_nothing_at_all() -> None:
    """The realised batch size is nowhere in the update: with and without the record, bit by bit
    the same model.
    """
    x, y = problem()
    with_record = run(x, y, zero_loss_for=N - 1)
    without = run(x[:-1], y[:-1])  # the last record: the others keep their coins in the first step
    compare(with_record, without)
    first = (with_record["trajectory"][0] - without["trajectory"][0]).abs().max()
    # the mean over the batch divides by B and multiplies back: last bits only
    assert float(first) <= 1e-6


def test_one_record_moves_one_step_by_at_most_the_bound() -> None:
    """First step, same noise: the noisy means differ by at most C / b."""
    x, y = problem()
    other = x.clone()
    other[:] = x
    other[3] = 1e20
    a, b = run(x, y, q=1.0), run(other, y, q=1.0)
    learning_rate, expected_batch = 0.1, N
    moved = float((a["trajectory"][0] - b["trajectory"][0]).norm())
    # replaced: once out, once in
    assert moved <= learning_rate * 2 * 1.0 / expected_batch * (1 + 1e-5)
