"""Losses in which each record has a term of its own."""

import torch
from torch import Tensor

from dpoptim.errors import axes_of


def per_sample_mean(token_losses: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean over each record's own tokens: one loss a record, for ``private.backward``.

    The usual mean over all tokens of a batch (``cross_entropy(..., ignore_index=-100)``, the
    ``loss`` of a Hugging Face model) weighs a record by how long the *others* are, so one record
    changes everybody's gradient. This one does not::

        losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100,
        reduction="none") private.backward(dpoptim.losses.per_sample_mean(losses, labels != -100))

    Args:
        token_losses: shape (B, ...), records first, unreduced.
        mask: tokens that count, bool or 0/1, of the same shape; None: all of them. What it leaves
            out counts as zero, also where it is not finite. A record without any token has the
            loss zero.

    Returns:
        shape (B,).

    Raises:
        ValueError: fewer than two axes, or a mask of another shape.

    **Guarantee.** Each record's loss depends on that record's tokens alone: what `dpoptim.attach`
    takes on trust of a loss.
    """
    if token_losses.dim() < 2:
        raise ValueError(
            f"token_losses must have shape (B, tokens, ...), got {axes_of(token_losses)}. Fix: "
            "compute the loss with "
            'reduction="none" and keep the batch axis first.'
        )
    if mask is None:
        mask = torch.ones_like(token_losses, dtype=torch.bool)
    if mask.shape != token_losses.shape:
        raise ValueError(
            f"mask must have the shape of token_losses ({axes_of(token_losses)}), got "
            f"{axes_of(mask)} of other sizes."
        )
    counted = mask != 0
    sums = torch.where(counted, token_losses, 0).flatten(1).sum(1)
    return sums / counted.flatten(1).sum(1).clamp(min=1)


def without_single_axes(losses: Tensor) -> Tensor:
    """Losses of shape (rows, 1, ...) as (rows,): what a model of one output leaves unreduced."""
    return losses.flatten() if losses.dim() > 1 and losses.shape[1:].numel() == 1 else losses
