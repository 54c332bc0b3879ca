"""Operations on shared parameters and data, by others that tell whose gradient is whose.

Each function is given a call, and returns its result; None where the call is another.
"""

import inspect
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpoptim.gradients.layers.operations import PRODUCTS, Call

SIGNATURE = inspect.signature(F.multi_head_attention_forward)
# what adds positions to keys and values, or gives these
UNKNOWN = ("bias_k", "bias_v", "static_k", "static_v")


def rewritten(call: Call) -> Any:
    """The result of a call that another one tells; None where none is known."""
    for known in (product_of_matrices, sum_of_products, chosen_by_records, attention):
        result: Any = known(call)
        if result is not None:
            return result
    return None


def product_of_matrices(call: Call) -> Tensor | None:
    """Do ``F.linear``, or ``x @ weight`` for vectors, as products that `expand_product` knows.

    Of weights that were made of parameters (clamped, scaled, turned): for a parameter itself there
    is a rule. None where the call is another.
    """
    names = ("input", "weight", "bias") if call.name == "linear" else ("input", "other")
    given: dict[str, Any] = dict(zip(names, call.args, strict=False)) | call.kwargs
    x: Any = given.get("input")
    weight: Any = given.get(names[1])
    if not is_among(call.shared, weight) or not is_among(call.data, x):
        return None
    if call.name == "linear" and weight.dim() == 2:
        out = x @ weight.transpose(0, 1)
        return out if given.get("bias") is None else out + given["bias"]
    if call.name not in (*PRODUCTS, "mm"):
        return None
    if weight.turned is not None:
        return F.linear(x, weight.turned)
    return (x[:, None] @ weight)[:, 0] if x.dim() == weight.dim() == 2 else None


def sum_of_products(call: Call) -> Tensor | None:
    """Do ``einsum("bi,ij->bj", x, shared)``, of a letter for records that what is shared lacks."""
    equation = terms_of(call)
    if equation is None:
        return None
    terms, after, operands = equation
    if (product := as_linear(call, terms, after, operands)) is not None:
        return product
    ours = [is_among(call.shared, operand) for operand in operands]
    rows = rows_of_letter(terms, ours, operands)
    record = terms[ours.index(False)][:1]
    if rows is None or record not in after:
        return None
    if any(s.owner.records_on(rows) != rows for s in call.shared):
        return None
    named, each = list(terms), list(operands)
    for place, own in enumerate(ours):
        if own:
            named[place] = record + named[place]
            each[place] = each[place].per_record(rows, each[place].dim() + 1)
    return torch.einsum(f"{','.join(named)}->{after}", *each)


def as_linear(call: Call, terms: list[str], after: str, operands: list[Any]) -> Tensor | None:
    """Do ``einsum("bti,ij->btj", x, weight)`` as the layer that it is; None where it is none."""
    if (
        len(terms) != 2
        or not is_among(call.data, operands[0])
        or not is_among(call.shared, operands[1])
    ):
        return None
    (of_x, of_weight), (x, weight) = terms, operands
    if len(of_weight) != 2 or len({*of_x, *of_weight}) != len(of_x) + 1:
        return None
    if weight.owner.records_on(len(x)) is None:
        return None
    if of_x[-1] == of_weight[0] and after == of_x[:-1] + of_weight[1]:
        return x @ weight
    last = of_x[-1] == of_weight[1] and after == of_x[:-1] + of_weight[0]
    return F.linear(x, weight) if last else None


def terms_of(call: Call) -> tuple[list[str], str, list[Any]] | None:
    """The letters of an einsum's operands, those of its result, and the operands."""
    equation = call.args[0] if call.name == "einsum" else None
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    operands = list(call.args[1:])
    if isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    before, _, after = equation.replace(" ", "").partition("->")
    return before.split(","), after, operands


def rows_of_letter(terms: list[str], ours: list[bool], operands: list[Any]) -> int | None:
    """How many records data have, whose first axes have a letter that what is shared lacks."""
    found = list(zip(terms, ours, operands, strict=True))
    first = {(term[:1], len(t)) for term, own, t in found if not own and t.dim()}
    if len(first) != 1 or not all(own or t.dim() for _, own, t in found):
        return None
    ((letter, rows),) = first
    return None if any(letter in term for term, own, _ in found if own) else rows


def chosen_by_records(call: Call) -> Tensor | None:
    """Do ``shared[index]``, of records' whole numbers; None where the call is another."""
    if call.name != "__getitem__":
        return None
    table, index = call.args[0], call.args[1]
    places = index if isinstance(index, tuple) else (index,)
    whole = [isinstance(i, Tensor) and i.dtype in (torch.int32, torch.int64) for i in places]
    if not all(whole) or not places[0].dim() or any(i.shape != places[0].shape for i in places):
        return None
    rows = len(places[0])
    if table.owner.records_on(rows) != rows:
        return None
    if len(places) == 1 and table.itself and table.dim() == 2:
        from_end = torch.where(places[0] < 0, places[0] + len(table), places[0])
        return F.embedding(from_end, table)
    records = torch.arange(rows, device=places[0].device)
    each = table.per_record(rows, table.dim() + 1)
    return each[records.view(-1, *[1] * (places[0].dim() - 1)), *places]


def is_among(tensors: Iterable[Any], one: Any) -> bool:
    return any(one is each for each in tensors)


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
    q, k, v = (split_in_heads(x, given["num_heads"]) for x in projected_inputs(given))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    for mask in masks_of_scores(given, len(q)):
        scores = scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = F.dropout(softmax_over_keys(scores, given), given["dropout_p"], given["training"])
    joined = (weights @ v).transpose(1, 2).flatten(2)
    out = F.linear(joined, given["out_proj_weight"], given["out_proj_bias"]).transpose(0, 1)
    shown = weights.mean(1) if given["average_attn_weights"] else weights
    return out, shown if given["need_weights"] else None


def projected_inputs(given: dict[str, Any]) -> list[Tensor]:
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


def split_in_heads(x: Tensor, count: int) -> Tensor:
    """Shape (records, heads, positions, features), of (records, positions, all features)."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def softmax_over_keys(scores: Tensor, given: dict[str, Any]) -> Tensor:
    """Weights of all keys.

    Without any to see they are not numbers, or zero where nobody needs them, as PyTorch has it.
    """
    if given["need_weights"]:
        return scores.softmax(-1)
    blind = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)


def masks_of_scores(given: dict[str, Any], rows: int) -> list[Tensor]:
    """Masks of scores, in their shape or one that spreads to it."""
    found = []
    if (mask := given["attn_mask"]) is not None:
        found.append(mask if mask.dim() == 2 else mask.unflatten(0, (rows, -1)))
    if (padding := given["key_padding_mask"]) is not None:
        found.append(padding[:, None, None])
    return found
