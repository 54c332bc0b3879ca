"""Canaries as what a plan protects: records, or persons who own several rows."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpoptim.plan import Plan
from dpoptim.privacy_unit import RECORD
from dpoptim.training.attach import attach
from dpoptim.training.private_training import PrivateTraining

ROWS = 2  # of a canary person: equal ones, which a step would show if it clipped each by itself


def attach_canaries(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    canaries: TensorDataset,
    noise_seed: int | None,
) -> PrivateTraining:
    """Attach a plan to canaries, one a unit: where it protects persons, each owns `ROWS` rows.

    A person's gradient is the mean of their rows' gradients, so a canary's is the same either way.
    """
    if plan.unit == RECORD:
        return attach(plan, model, optimizer, canaries, noise_seed=noise_seed, label="audit")
    rows = TensorDataset(*(part.repeat_interleave(ROWS, 0) for part in canaries.tensors))
    return attach(
        plan,
        model,
        optimizer,
        rows,
        persons=torch.arange(len(canaries)).repeat_interleave(ROWS).tolist(),
        rows_per_record=plan.unit.most_rows,
        noise_seed=noise_seed,
        label="audit",
    )
