"""One loss a record from a batch with labels, as Hugging Face's models define their losses."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100  # labels that do not count
# Hugging Face's name of a model's loss where labels stand at their own tokens. Every other loss
# of tokens is of the next one; GPT-2's has no name.
OF_OWN_TOKENS = ("ForMaskedLM", "ForTokenClassification")


def losses_from_labels(
    model: nn.Module, inputs: Mapping[str, Any], *, label_smoothing: float = 0.0
) -> Tensor:
    """The model's usual loss, record by record: shape (rows,).

    Tokens are averaged over each record's own tokens, not over those of the whole batch, by which
    one record would weigh the others. A record without any counted token has the loss zero.

    Args:
        model: a Hugging Face model, or one that returns logits (as ``.logits``, first of a tuple,
            or alone); with adapters too.
        inputs: keyword arguments of the model, and ``labels``, records first.
        label_smoothing: of cross-entropies, 0 to 1.

    Raises:
        ValueError: no labels, or logits and labels that do not belong together.

    **Guarantee.** Each entry depends on that record's logits and labels alone.
    """
    labels = inputs.get("labels")
    if labels is None:
        raise ValueError(
            "inputs hold no 'labels'. Fix: give the trainer losses=fn(model, inputs) with one loss "
            "a record."
        )
    base = base_model(model)
    config = getattr(base, "config", None)
    # Models with a decoder make its inputs from the labels; others would only take their mean over
    # the batch.
    decodes = getattr(config, "is_encoder_decoder", False)
    given = inputs if decodes else {k: v for k, v in inputs.items() if k != "labels"}
    outputs = model(**given)
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    logits: Tensor = outputs.logits if hasattr(outputs, "logits") else first
    if logits.dim() > 2:
        named = hasattr(base, "loss_type") and base.loss_type not in OF_OWN_TOKENS
        causal = named and not decodes
        return token_losses(logits, labels, causal=causal, label_smoothing=label_smoothing)
    if getattr(config, "problem_type", None) == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(
            logits, labels.to(logits.dtype), reduction="none"
        ).mean(1)
    if labels.is_floating_point() or logits.shape[-1] == 1:
        return (
            (logits.flatten(1) - labels.to(logits.dtype).reshape(len(logits), -1)).square().mean(1)
        )
    return F.cross_entropy(
        logits, labels.flatten(), reduction="none", label_smoothing=label_smoothing
    )


def token_losses(
    logits: Tensor, labels: Tensor, *, causal: bool, label_smoothing: float = 0.0
) -> Tensor:
    """Mean cross-entropy of each record's own counted tokens: (B, T, V), (B, T) -> (B,)."""
    if logits.shape[:2] != labels.shape:
        raise ValueError(
            "logits and labels do not have the same rows and tokens (their shapes are not shown: "
            "they may be private). Fix: give the trainer losses=fn(model, inputs) with one loss a "
            "record."
        )
    if causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    each = F.cross_entropy(
        logits.transpose(1, 2).float(),
        labels,
        ignore_index=IGNORED,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    counted = labels != IGNORED
    return torch.where(counted, each, 0).sum(1) / counted.sum(1).clamp(min=1)


def next_token_log_probs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities under a causal model, and the number of tokens that count.

    Args:
        logits: (B, T, V). labels: (B, T); `IGNORED` where they do not count.

    Returns:
        shape (B, T - 1), 0 where a token does not count; shape (B,).

    **Guarantee.** Each row depends on that row alone.
    """
    labels = labels[:, 1:]
    counted = labels != IGNORED
    found = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    found = found.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return torch.where(counted, found, 0), counted.sum(1)


def base_model(model: nn.Module) -> nn.Module:
    """The Hugging Face model inside an adapter's wrapper."""
    get = getattr(model, "get_base_model", None)
    return get() if callable(get) else model
