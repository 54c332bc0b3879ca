"""Try to falsify that a person moves a step's sum by at most C, whatever rows they own."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from dpoptim.audit.finding import refuted_by
from dpoptim.audit.small_runs import CLIP_NORM, linear_of_zeros, parameters_of
from dpoptim.methods import DPSGD
from dpoptim.training.attach import attach

WAYS: tuple[tuple[Literal["mean", "sum"], int | None], ...] = (
    ("mean", None),
    ("sum", None),
    ("mean", 3),
    ("sum", 6),
)
PERSONS, MOST, FEATURES = 6, 3, 4


def sum_of_a_step(
    x: Tensor, y: Tensor, owners: Tensor, how: Literal["mean", "sum"], physical: int | None
) -> Tensor:
    """The sum of one step of a linear model, of every person and without noise: float64."""
    plan = DPSGD(clip_norm=CLIP_NORM).plan(
        n=PERSONS, batch_size=PERSONS, steps=1, noise_multiplier=0, delta=1e-5
    )
    model = linear_of_zeros(FEATURES, 1, bias=True, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with attach(
        plan,
        model,
        optimizer,
        TensorDataset(x, y),
        loss_reduction="sum",
        noise_seed=0,
        persons=owners.tolist(),
        rows_per_record=MOST,
        rows_reduction=how,
    ) as private:
        for rows, targets in private.batches(physical_batch_size=physical):
            F.mse_loss(model(rows)[:, 0], targets, reduction="sum").backward()
            optimizer.step()
    return -PERSONS * parameters_of(model)


def persons() -> str:
    """Take persons out, of agreeing, cancelling or single rows: how far do sums move?"""
    owners = torch.tensor([0, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 5, 5, 5])
    x = torch.arange(len(owners) * FEATURES, dtype=torch.float64).view(-1, FEATURES).mul(1.7).sin()
    y = torch.arange(len(owners), dtype=torch.float64).add(0.4).cos()
    last = owners == 5
    hostile = {
        "agree": torch.ones(5, dtype=torch.float64),
        "cancel": torch.tensor([1.0, -1, 1, -1, 1]).double(),
    }
    findings = []
    for name, signs in hostile.items():
        for how, physical in WAYS:
            x[last], y[last] = 1e3, 1e3 * signs
            with_them = sum_of_a_step(x, y, owners, how, physical)
            moved = float(
                (with_them - sum_of_a_step(x[~last], y[~last], owners[~last], how, physical)).norm()
            )
            if not moved <= CLIP_NORM * (1 + 1e-9):
                findings.append(
                    f"a person whose rows {name} moved the sum by {moved / CLIP_NORM:.4g} C ({how})"
                )
    # a person of one row, too short to be clipped, adds that row's gradient
    x, y = x[:1], 0.1 * y[:1]
    expected = -2 * y[0] * torch.cat([x[0], torch.ones(1, dtype=torch.float64)])
    for how, _ in WAYS[:2]:
        if not torch.allclose(sum_of_a_step(x, y, owners[:1], how, None), expected, rtol=1e-6):
            findings.append(f"rows that are not there change what a person adds ({how})")
    return refuted_by(findings)
