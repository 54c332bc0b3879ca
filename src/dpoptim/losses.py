"""Losses in which each record has a term of its own."""

from typing import Literal

import torch
from torch import Tensor

from dpoptim.errors import axes_of


def per_sample_mean(
    token_losses: Tensor, mask: Tensor | None = None, *, reduction: Literal["mean", "sum"] = "mean"
) -> Tensor:
    """Mean over each record's own tokens, then mean or sum over the batch: `attach`'s ``loss_reduction``.

    The usual mean over all tokens of a batch (``cross_entropy(..., ignore_index=-100)``, the ``loss`` of a Hugging Face
    model) weighs a record by how long the *others* are, so one record changes everybody's gradient. This one does not::

        losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        loss = dpoptim.losses.per_sample_mean(losses, labels != -100)

    Args:
        token_losses: shape (B, ...), records first, unreduced.
        mask: tokens that count, bool or 0/1, of the same shape; None: all of them. What it leaves out counts as zero,
            also where it is not finite. A record without any token has the loss zero.
        reduction: over the batch.

    Returns:
        a scalar; zero for an empty batch.

    Raises:
        ValueError: fewer than two axes, a mask of another shape, or another reduction.

    **Guarantee.** The mean or sum over the batch of one term per record, which depends on that record's tokens alone: what
    `dpoptim.attach` takes on trust of a loss.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}.")
    if token_losses.dim() < 2:
        raise ValueError(
            f"token_losses must have shape (B, tokens, ...), got {axes_of(token_losses)}. Fix: compute the loss with "
            'reduction="none" and keep the batch axis first.'
        )
    if mask is None:
        mask = torch.ones_like(token_losses, dtype=torch.bool)
    if mask.shape != token_losses.shape:
        raise ValueError(
            f"mask must have the shape of token_losses ({axes_of(token_losses)}), got {axes_of(mask)} of other sizes."
        )
    counted = mask != 0
    sums = torch.where(counted, token_losses, 0).flatten(1).sum(1)
    records = sums / counted.flatten(1).sum(1).clamp(min=1)
    return records.sum() / max(len(records), 1) if reduction == "mean" else records.sum()
