"""Noise audit of tables: does every row get noise, whether or not a record looked it up?

The rows that a record looked up are summed alone where they are few (`RowTerms`), and a
gate that gave noise to these alone would tell, by the others, who was there.
"""

import torch
from scipy.special import chdtr, chdtrc
from torch import nn
from torch.utils.data import TensorDataset

from dpoptim.gradients.accumulation.sums import LARGE
from dpoptim.methods import DPSGD
from dpoptim.training.attach import attach

COLUMNS, LOOKED_UP, STEPS = 16, 20, 2
CLIP_NORM, NOISE_MULTIPLIER = 2.0, 1.0


def untouched_rows_pvalue(*, noise_seed: int | None = None) -> float:
    """p-value of the standard deviation of what is released of rows that nobody looked up."""
    rows = LARGE // COLUMNS + 1
    model = nn.EmbeddingBag(rows, COLUMNS, mode="sum")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    looked_up = torch.arange(LOOKED_UP) * (rows // LOOKED_UP)
    plan = DPSGD(clip_norm=CLIP_NORM).plan(
        n=1, batch_size=1, steps=STEPS, noise_multiplier=NOISE_MULTIPLIER, delta=1e-6
    )
    untouched = torch.ones(rows, dtype=torch.bool)
    untouched[looked_up] = False
    squares, entries = 0.0, 0
    with attach(
        plan, model, optimizer, TensorDataset(looked_up[None]), noise_seed=noise_seed
    ) as private:
        for (x,) in private.batches():
            before = model.weight.detach().clone()
            private.backward(model(x).sum(1))
            optimizer.step()
            found = (model.weight.detach() - before)[untouched].double()
            squares += float((found / (CLIP_NORM * NOISE_MULTIPLIER)).square().sum())
            entries += found.numel()
    return min(1.0, 2 * float(min(chdtr(entries, squares), chdtrc(entries, squares))))
