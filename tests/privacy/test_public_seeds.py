"""Dropout under a seed that everybody can read: one record more shifts the masks of all others."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim

RECORDS = 60


def released_sum(seed: int | None, dropout: float, first: int) -> tuple[Tensor, list[str]]:
    """The sum of all records from ``first`` on, without noise, and what is taken on trust."""
    torch.manual_seed(1)
    x, y = torch.randn(RECORDS, 6), torch.randint(0, 3, (RECORDS,))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=RECORDS, batch_size=RECORDS, steps=1, noise_multiplier=0, delta=1e-5
    )
    if seed is not None:
        torch.manual_seed(seed)
    with dpoptim.attach(plan, model, optimizer, TensorDataset(x[first:], y[first:])) as private:
        for inputs, labels in private.batches(fixed_shape=False):
            private.backward(nn.functional.cross_entropy(model(inputs), labels, reduction="none"))
            optimizer.step()
        trusted = [item.text for item in private.basis if item.kind == "trusted"]
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    return (before - after) * RECORDS, trusted


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_what_a_public_seed_would_reveal_is_named(dropout: float) -> None:
    whole, trusted = released_sum(0, dropout, first=0)
    part, _ = released_sum(0, dropout, first=1)
    moved = float((whole - part).norm())
    assert (moved > 2) == (dropout > 0)  # clip norms; at most 1 without random numbers
    assert dropout or moved <= 1
    assert any("torch.manual_seed" in text for text in trusted)
