"""Ordinary training, of public data, which shows what privacy costs."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dpoptim.data import Data
from dpoptim.runs.train import public_hold_out, record_losses, score, weights_of

SMALL_DATA = 10_000  # records below which ordinary training takes smaller batches and larger steps


def comparison_epochs(data: Data) -> int:
    """Enough for the comparison to be strong, however short the private run is."""
    return 30 if len(data.x) <= SMALL_DATA else 10


def train_without_privacy(
    data: Data, model: nn.Module, *, epochs: int, seed: int
) -> tuple[float, ...]:
    """Hold-out scores after each epoch of ordinary training, which private training may not see.

    A strong comparison, so that the price of privacy is not made to look low. The columns of a
    table are standardised. A linear model is fitted by L-BFGS, ten iterations an epoch, with
    scikit-learn's default penalty; other models by Adam with a cosine schedule on small shuffled
    batches. A tenth of the training records are kept out and say which epoch is the last:
    thousands of features to a record are learnt by heart.

    Raises:
        ValueError: the data is not public, or has no hold-out.
    """
    hold_out = public_hold_out(data)
    if hold_out is None:
        raise ValueError(
            "training without privacy needs data declared public (--data-is-public), with a "
            "hold-out."
        )
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    if x.dim() == 2:
        mean, deviation = x.mean(0), x.std(0, correction=0)
        deviation = torch.where(deviation > 0, deviation, 1)
        x, hold_out = (x - mean) / deviation, ((hold_out[0] - mean) / deviation, hold_out[1])
    weights = weights_of(data)
    linear = all(
        isinstance(module, nn.Sequential | nn.Flatten | nn.Linear) for module in model.modules()
    )
    one_layer = sum(isinstance(module, nn.Linear) for module in model.modules()) == 1
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    kept, rest = order[: len(x) // 10], order[len(x) // 10 :]
    train_epoch = (
        by_lbfgs(model, x, y, weights, rest)
        if linear and one_layer
        else by_adam(model, x, y, weights, rest, epochs=epochs, seed=seed)
    )
    x_kept, y_kept = x[kept], y[kept]
    scores, stopped = [], (-math.inf, 0)
    for epoch in range(epochs):
        train_epoch()
        scores.append(score(model, *hold_out))
        reached = score(model, x_kept, y_kept) if len(kept) else 0.0
        stopped = max(stopped, (reached, epoch))
    return tuple(scores[: stopped[1] + 1])


def by_lbfgs(
    model: nn.Module, x: Tensor, y: Tensor, of_classes: Tensor | None, rows: Tensor
) -> Callable[[], None]:
    """Ten iterations on these rows of the table, at each call."""
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=10, line_search_fn="strong_wolfe")
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]

    def closure() -> Tensor:
        optimizer.zero_grad()
        penalty = sum((weight.square().sum() for weight in weights), start=torch.zeros(())) / (
            2 * len(rows)
        )
        # of all rows, since a copy of most of them may not fit memory
        loss = record_losses(model(x), y, of_classes)[rows].mean() + penalty
        loss.backward()
        return loss

    def epoch() -> None:
        optimizer.step(closure)

    return epoch


def by_adam(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    of_classes: Tensor | None,
    rows: Tensor,
    *,
    epochs: int,
    seed: int,
) -> Callable[[], None]:
    """One of ``epochs`` epochs on these rows at each call."""
    small = len(x) <= SMALL_DATA
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2 if small else 3e-3)
    batch_size = 32 if small else 256
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, epochs * math.ceil(len(rows) / batch_size)
    )
    generator = torch.Generator().manual_seed(seed)

    def epoch() -> None:
        order = torch.randperm(len(rows), generator=generator)
        for indices in rows[order].split(batch_size):
            optimizer.zero_grad()
            record_losses(model(x[indices]), y[indices], of_classes).mean().backward()
            optimizer.step()
            scheduler.step()

    return epoch
