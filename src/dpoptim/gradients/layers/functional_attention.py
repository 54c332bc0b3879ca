"""``F.multi_head_attention_forward`` on shared parameters, by the layers that it is made of."""

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpoptim.gradients.layers.spreading import Call

SIGNATURE = inspect.signature(F.multi_head_attention_forward)
# what adds positions to keys and values, or gives these
UNKNOWN = ("bias_k", "bias_v", "static_k", "static_v")


def attention(call: Call) -> tuple[Tensor, Tensor | None] | None:
    """The result of a call, positions first as it is given; None where the call is another."""
    if call.name != "multi_head_attention_forward":
        return None
    bound = SIGNATURE.bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    known = all(given[name] is None for name in UNKNOWN) and not given["add_zero_attn"]
    known = known and not given["is_causal"]  # a hint that may stand in the place of the mask
    if not known or given["query"].dim() != 3:
        return None
    q, k, v = (heads(x, given["num_heads"]) for x in projected(given))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    for mask in masks(given, len(q)):
        scores = scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = F.dropout(shares(scores, given), given["dropout_p"], given["training"])
    joined = (weights @ v).transpose(1, 2).flatten(2)
    out = F.linear(joined, given["out_proj_weight"], given["out_proj_bias"]).transpose(0, 1)
    shown = weights.mean(1) if given["average_attn_weights"] else weights
    return out, shown if given["need_weights"] else None


def projected(given: dict[str, Any]) -> list[Tensor]:
    """Queries, keys and values, records first."""
    apart = [given[f"{name}_proj_weight"] for name in "qkv"]
    joint = given["in_proj_weight"]
    matrices = apart if given["use_separate_proj_weight"] else joint.chunk(3)
    inputs = [given[name].transpose(0, 1) for name in ("query", "key", "value")]
    found = [F.linear(x, matrix) for x, matrix in zip(inputs, matrices, strict=True)]
    if given["in_proj_bias"] is None:
        return found
    biases = given["in_proj_bias"].chunk(3)
    return [x + bias for x, bias in zip(found, biases, strict=True)]


def heads(x: Tensor, count: int) -> Tensor:
    """Shape (records, heads, positions, features), of (records, positions, all features)."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def shares(scores: Tensor, given: dict[str, Any]) -> Tensor:
    """Weights of all keys.

    Without any to see they are not numbers, or zero where nobody needs them, as PyTorch has it.
    """
    if given["need_weights"]:
        return scores.softmax(-1)
    blind = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)


def masks(given: dict[str, Any], rows: int) -> list[Tensor]:
    """Masks of scores, in their shape or one that spreads to it."""
    found = []
    if (mask := given["attn_mask"]) is not None:
        found.append(mask if mask.dim() == 2 else mask.unflatten(0, (rows, -1)))
    if (padding := given["key_padding_mask"]) is not None:
        found.append(padding[:, None, None])
    return found
