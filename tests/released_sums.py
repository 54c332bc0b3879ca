"""The clipped sum that one step releases, where there is no noise."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import dpoptim


def sum_of_one_step(
    model: nn.Module,
    data: Dataset[Any],
    loop: Callable[[Any, Any], Tensor],
    *,
    n: int,
    clip_norm: float,
    bare: bool = False,
    batches: Mapping[str, Any] | None = None,
    between: Callable[[], object] = lambda: None,
    **options: Any,
) -> Tensor:
    """Train for one step on all records.

    Args:
        n: nominal, whatever the data set has.
        bare: whether the loop differentiates by itself.
        batches: options of ``private.batches``.
        between: what the loop does before it computes a loss.
        options: of `dpoptim.attach`.
    """
    sums = list[Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plan = dpoptim.DPSGD(clip_norm=clip_norm).plan(
        n=n, batch_size=n, steps=1, noise_multiplier=0.0, delta=1e-5
    )
    with dpoptim.attach(plan, model, optimizer, data, **options) as private:
        for batch in private.batches(**(batches or {})):
            between()
            value = loop(model, batch)
            value.backward() if bare else private.backward(value)
            optimizer.step()
            if private.finished_step:
                parts = [p.grad.double().flatten() for p in model.parameters()]  # type: ignore[union-attr]
                sums.append(n * torch.cat(parts))
    return sums[0]
