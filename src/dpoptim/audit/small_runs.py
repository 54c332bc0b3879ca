"""Small models and runs that audits share, and canaries as what a plan protects."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpoptim.gradients.oracle import Loss
from dpoptim.methods.dp_sgd import DPSGD
from dpoptim.plan import Plan
from dpoptim.privacy_unit import RECORD
from dpoptim.training.attach import attach_own
from dpoptim.training.private_training import PrivateTraining

CLIP_NORM = 0.5
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
        return attach_own(plan, model, optimizer, canaries, noise_seed=noise_seed, label="audit")
    rows = TensorDataset(*(part.repeat_interleave(ROWS, 0) for part in canaries.tensors))
    return attach_own(
        plan,
        model,
        optimizer,
        rows,
        persons=torch.arange(len(canaries)).repeat_interleave(ROWS).tolist(),
        rows_per_record=plan.unit.most_rows,
        noise_seed=noise_seed,
        label="audit",
    )


def linear_of_zeros(
    features: int, out: int, *, bias: bool = False, dtype: torch.dtype | None = None
) -> nn.Linear:
    """A linear layer of zeros; nothing is drawn for it."""
    layer = nn.utils.skip_init(nn.Linear, features, out, bias=bias, dtype=dtype)
    for p in layer.parameters():
        nn.init.zeros_(p)
    return layer


def sum_of_a_step(
    model: nn.Module,
    records: Any,
    losses: Callable[[nn.Module, Tensor], Tensor],
    *,
    n: int | None = None,
    fixed_shape: bool = False,
    physical: int | None = None,
    checked: Loss | None = None,
) -> Tensor:
    """The clipped sum of a step on all records, without noise: float64.

    Args:
        records: a data set. n: nominal. checked: told to `attach`.
    """
    n = n or len(records)
    before = parameters_of(model)
    plan = DPSGD(clip_norm=CLIP_NORM).plan(
        n=n, batch_size=n, steps=1, noise_multiplier=0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with attach_own(plan, model, optimizer, records, loss=checked) as private:
        for (batch,) in private.batches(physical_batch_size=physical, fixed_shape=fixed_shape):
            private.backward(losses(model, batch))
            optimizer.step()
    return n * (before - parameters_of(model))


def parameters_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])
