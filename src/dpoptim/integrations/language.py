"""One loss a record from a batch with labels, as Hugging Face's models define their losses."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.errors import NoSuchLossError

IGNORED = -100  # labels that do not count
# Hugging Face's name of a model's loss where labels stand at their own tokens. Every other loss
# of tokens is of the next one; GPT-2's has no name.
OF_OWN_TOKENS = ("ForMaskedLM", "ForTokenClassification")
OF_SPANS = ("start_positions", "end_positions")
OWN_LOSS = "Fix: losses=fn(model, inputs), for PrivateTrainer, with one loss a record."


def losses_from_labels(
    model: nn.Module, inputs: Mapping[str, Any], *, label_smoothing: float = 0.0
) -> Tensor:
    """The model's usual loss, record by record: shape (rows,).

    Tokens are averaged over each record's own tokens, not over those of the whole batch, by which
    one record would weigh the others. A record without any counted token has the loss zero.

    Args:
        model: a Hugging Face model, or one that returns logits (as ``.logits``, first of a tuple,
            or alone); with adapters too.
        inputs: keyword arguments of the model, and ``labels``, records first; for answers to
            questions, ``start_positions`` and ``end_positions``.
        label_smoothing: of cross-entropies, 0 to 1.

    Raises:
        NoSuchLossError: no labels, or logits and labels that do not belong together.

    **Guarantee.** Each entry depends on that record's logits and labels alone.
    """
    base = base_model(model)
    if all(key in inputs for key in OF_SPANS):
        return span_losses(model, inputs)
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor):
        kind = "no 'labels'" if labels is None else "'labels' that are no tensor"
        raise NoSuchLossError(f"inputs of {type(base).__name__} hold {kind}. {OWN_LOSS}")
    config = getattr(base, "config", None)
    if getattr(base, "loss_type", None) == "ForCTC" or hasattr(config, "ctc_loss_reduction"):
        return transcription_losses(model, inputs)
    # Models with a decoder make its inputs from the labels; others would only take their mean over
    # the batch.
    decodes = getattr(config, "is_encoder_decoder", False)
    logits = logits_of(
        model, inputs if decodes else {k: v for k, v in inputs.items() if k != "labels"}
    )
    if logits.dim() > 2:
        named = hasattr(base, "loss_type") and base.loss_type not in OF_OWN_TOKENS
        labels = labels if decodes else beside_virtual_tokens(model, labels)
        return token_losses(
            logits, labels, causal=named and not decodes, label_smoothing=label_smoothing
        )
    return record_losses(
        logits, labels, problem_of(config, logits, labels), label_smoothing=label_smoothing
    )


def logits_of(model: nn.Module, given: Mapping[str, Any]) -> Tensor:
    """The model's logits: returned by that name, first of a tuple, or alone."""
    outputs = model(**given)
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    logits = getattr(outputs, "logits", first)
    if not isinstance(logits, Tensor):
        name = type(base_model(model)).__name__
        raise NoSuchLossError(f"outputs of {name} hold no 'logits'. {OWN_LOSS}")
    return logits


def record_losses(
    logits: Tensor, labels: Tensor, problem: str, *, label_smoothing: float
) -> Tensor:
    """Losses of records with logits of their own, (B, K), by the kind of problem: (B,)."""
    if problem == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(
            logits, labels.to(logits.dtype), reduction="none"
        ).mean(1)
    if problem == "regression":
        targets = labels.to(logits.dtype).reshape(len(logits), -1)
        return (logits.flatten(1) - targets).square().mean(1)
    return F.cross_entropy(
        logits, labels.flatten(), reduction="none", label_smoothing=label_smoothing
    )


def problem_of(config: Any, logits: Tensor, labels: Tensor) -> str:
    """The kind of problem, named by the configuration, or told from the labels as models do."""
    named = getattr(config, "problem_type", None)
    if named is not None:
        return str(named)
    if logits.shape[-1] == 1:
        return "regression"
    if not labels.is_floating_point():
        return "single_label_classification"
    return "regression" if config is None else "multi_label_classification"


def span_losses(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Mean cross-entropy of where an answer starts and ends, over each record's own tokens.

    A place beyond these does not count.
    """
    outputs = model(**{key: value for key, value in inputs.items() if key not in OF_SPANS})
    mask = inputs.get("attention_mask")
    losses = []
    for logits, key in zip((outputs.start_logits, outputs.end_logits), OF_SPANS, strict=True):
        own = torch.ones_like(logits, dtype=torch.bool) if mask is None else mask != 0
        if own.shape != logits.shape:
            raise NoSuchLossError(
                "logits of places are not one for each token of 'attention_mask', as with prompt "
                f"tuning. {OWN_LOSS}"
            )
        places = inputs[key].flatten()
        last = logits.shape[1] - 1
        counted = (places <= last) & own.gather(1, places.clamp(0, last)[:, None])[:, 0]
        found = logits.float()
        found = found.masked_fill(~own, torch.finfo(found.dtype).min).log_softmax(1)
        found = found.gather(1, places.clamp(0, last)[:, None])[:, 0]
        losses.append(torch.where(counted, -found, 0))
    return (losses[0] + losses[1]) / 2


def transcription_losses(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Connectionist temporal classification (CTC): the model's own, without its reduction."""
    config: Any = base_model(model).config
    reduction = config.ctc_loss_reduction
    with one_loss_each(config):
        losses: Tensor = model(**inputs).loss
    if reduction != "mean":
        return losses
    labels = inputs["labels"]  # the blank is never one
    return losses / ((labels >= 0) & (labels != config.pad_token_id)).sum(1).clamp(min=1)


@contextmanager
def one_loss_each(config: Any) -> Iterator[None]:
    """The configuration of a CTC model with its losses left as they are, one a record."""
    reduction, config.ctc_loss_reduction = config.ctc_loss_reduction, "none"
    try:
        yield
    finally:
        config.ctc_loss_reduction = reduction


def beside_virtual_tokens(model: nn.Module, labels: Tensor) -> Tensor:
    """Labels, none for the tokens that prompt tuning puts before a record's own."""
    adapter: Any = getattr(unwrapped(model), "active_peft_config", None)
    if not getattr(adapter, "is_prompt_learning", False) or adapter.peft_type == "PREFIX_TUNING":
        return labels  # a prefix has keys and values, and no logits
    return F.pad(labels, (adapter.num_virtual_tokens, 0), value=IGNORED)


def token_losses(
    logits: Tensor, labels: Tensor, *, causal: bool, label_smoothing: float = 0.0
) -> Tensor:
    """Mean cross-entropy of each record's own counted tokens: (B, T, V), (B, T) -> (B,)."""
    if logits.shape[:2] != labels.shape:
        raise NoSuchLossError(
            "logits and labels do not have the same rows and tokens (their shapes are not shown: "
            f"they may be private). {OWN_LOSS}"
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
    """The Hugging Face model inside wrappers: of an adapter, of several processes."""
    model = unwrapped(model)
    get = getattr(model, "get_base_model", None)
    return get() if callable(get) else model


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, which shows no attributes of it."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
