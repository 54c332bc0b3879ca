"""Parameters stored in bfloat16 or float16: per-sample gradients of those passes, clipped and
added in float32 and wider.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.clipping import Clipping
from support import CASES, Case, by_engine, clipped, joint_norm, record_loss

ROWS = 6


def gradients_alone(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    """Each record's gradient from a pass of its own."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = [
        torch.autograd.grad(
            record_loss(model(x[i : i + 1]), target[i : i + 1]).sum(), parameters, allow_unused=True
        )
        for i in range(len(x))
    ]
    return [
        torch.stack([torch.zeros_like(p) if g is None else g for g in column])
        for p, column in zip(parameters, zip(*rows, strict=True), strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.thinned(2)
def test_sums_are_those_of_records_alone(case: Case, dtype: torch.dtype) -> None:
    """Up to what the narrow passes round, which is the same for plain training."""
    torch.manual_seed(0)
    model = case.build().to(dtype)
    x, target = case.inputs(ROWS, dtype)
    truth = gradients_alone(model, x, target)
    median = (
        torch.stack([g.double().flatten(1).square().sum(1) for g in truth]).sum(0).sqrt().median()
    )
    clipping = Clipping(float(median) / 2)
    ours = by_engine(model, x, target, clipping, capacity=ROWS, reduction="sum")
    expected = clipped(truth, clipping, ROWS, "sum")
    distance = joint_norm([a - b for a, b in zip(ours, expected, strict=True)])
    assert distance <= (0.06 if dtype == torch.bfloat16 else 0.01) * ROWS * clipping.norm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_record_moves_the_sum_by_at_most_the_clip_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30), nn.GELU(), nn.Linear(30, 2)).to(
        dtype
    )
    x, target = (torch.randn(400, 20) * 30).to(dtype), torch.randn(400).to(dtype)
    sums = [
        by_engine(model, x[:n], target[:n], Clipping(0.5), capacity=400, reduction="sum")
        for n in (400, 399)
    ]
    assert joint_norm([a - b for a, b in zip(*sums, strict=True)]) <= 0.5


def test_a_run_in_bfloat16() -> None:
    torch.manual_seed(0)
    x = torch.randn(600, 10, dtype=torch.bfloat16)
    y = (x[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=600, batch_size=150, steps=25, epsilon=8.0, delta=1e-4
    )

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]).float(), batch[1], reduction="none")

    with dpoptim.attach(plan, model, optimizer, TensorDataset(x, y), loss=loss) as private:
        for batch in private.batches():
            private.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        assert any("rounded the same" in item.text for item in private.basis)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert float((model(x).argmax(1) == y).float().mean()) > 0.85


def test_a_mean_is_refused() -> None:
    model = nn.Linear(3, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = TensorDataset(torch.randn(20, 3, dtype=torch.bfloat16), torch.randint(0, 2, (20,)))
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(n=20, batch_size=10, steps=2, epsilon=8.0, delta=1e-3)
    with dpoptim.attach(plan, model, optimizer, data) as private:
        x, y = next(private.batches())
        with pytest.raises(dpoptim.PrivacyError, match="mean"):
            nn.functional.cross_entropy(model(x), y, reduction="none").mean().backward()


def test_value_clipping_refuses_them() -> None:
    model = nn.Linear(3, 2).bfloat16()
    data = TensorDataset(torch.randn(20, 3, dtype=torch.bfloat16), torch.randint(0, 2, (20,)))
    plan = dpoptim.ValueClippedSGD(clip_norm=1.0).plan(
        n=20, batch_size=10, steps=2, epsilon=8.0, delta=1e-3
    )
    with pytest.raises(dpoptim.PrivacyError, match="stored in bfloat16"):
        dpoptim.attach(plan, model, torch.optim.SGD(model.parameters(), lr=1.0), data)
