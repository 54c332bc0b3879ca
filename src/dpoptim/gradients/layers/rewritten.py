"""Operations on shared parameters and data, by others that tell whose gradient is whose.

Each function is given a call, and returns its result; None where the call is another.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpoptim.gradients.layers.functional_attention import attention
from dpoptim.gradients.layers.spreading import PRODUCTS, Call


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
    if not among(call.shared, weight) or not among(call.data, x):
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
    ours = [among(call.shared, operand) for operand in operands]
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
    if len(terms) != 2 or not among(call.data, operands[0]) or not among(call.shared, operands[1]):
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


def among(tensors: Iterable[Any], one: Any) -> bool:
    return any(one is each for each in tensors)
