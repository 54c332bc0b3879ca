"""Operations of torch on shared parameters (see `shared`): by name, and by how many rows they have.

Each function that is given a call returns how long the records' axis is, the first one; None where
the call does not tell.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

# names of functions and methods, without the underscores of operators and in-place variants
ELEMENTWISE = {
    *("add", "radd", "iadd", "sub", "subtract", "rsub", "isub", "mul", "multiply", "rmul", "imul"),
    *("div", "divide", "true_divide", "truediv", "rtruediv", "itruediv", "rdiv", "pow", "rpow"),
    *("where", "maximum", "minimum", "addcmul", "addcdiv", "lerp"),
}
IN_PLACE_OPERATORS = {"__iadd__", "__isub__", "__imul__", "__itruediv__"}
# by the names under which PyTorch reports ``x += y`` and the like
OUT_OF_PLACE: dict[str, Any] = {
    **{"add_": torch.add, "sub_": torch.sub, "mul_": torch.mul, "div_": torch.div},
    **{"__iadd__": torch.add, "__isub__": torch.sub},
    **{"__imul__": torch.mul, "__itruediv__": torch.div},
}
REPEATING = {"expand", "repeat", "broadcast_to", "tile"}
# these keep row-major order
SAME_ROWS = {"view", "reshape", "contiguous", "clone", "to", "type", "float", "double"}
LIKE_ITS_ROWS = {"zeros_like", "ones_like", "full_like"}
TURNING = {"transpose", "swapaxes", "swapdims", "permute"}
# these return what they are given, or a view of it
VIEWS = SAME_ROWS | TURNING | {"squeeze", "unsqueeze", "flatten", "unflatten", "t", "__get__"}
LIKE_ANOTHER: dict[str, Callable[[Tensor], Any]] = {
    "expand_as": lambda t: t.shape,
    "type_as": lambda t: t.dtype,
    "to": lambda t: t.dtype,
}
PRODUCTS = ("matmul", "bmm", "__matmul__", "__rmatmul__")
BY_MATRICES = (*PRODUCTS, "baddbmm", "scaled_dot_product_attention")  # of each row, from 3 axes on
# the argument that says along which axis they go, and the usual one
ALONG_AN_AXIS = {"cosine_similarity": (2, 1), "gather": (1, 0)}


def moved_axes(name: str, args: Any, axes: int) -> set[int]:
    """Axes that a transposition or permutation moves; the first one, where that is not plain."""
    order = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    if len(order) < 2 or not all(isinstance(axis, int) for axis in order):
        return {0}
    named = [axis % axes for axis in order]
    if name == "permute":
        return {axis for place, axis in enumerate(named) if place != axis}
    return set(named)


def in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE_OPERATORS


class Call(Protocol):
    """An operation's name and arguments: shared tensors (see `shared`) and data among them."""

    @property
    def name(self) -> str: ...
    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def kwargs(self) -> dict[str, Any]: ...
    @property
    def shared(self) -> Sequence[Any]: ...
    @property
    def data(self) -> Sequence[Tensor]: ...


def expand_elementwise(call: Call) -> int | None:
    """How many records an elementwise operation has; None where axes do not tell."""
    data, shared = call.data, call.shared
    axes = max(t.dim() for t in data)
    known = [t.dim() for t in data if t.requires_grad]
    if known and max(known) < axes:  # what has more axes than the records is made of constants
        return None
    sizes = {t.shape[0] for t in data if t.dim() == axes and axes > 0}
    rows = max(sizes, default=0)
    fits = axes > 0 and sizes <= {1, rows} and all(s.fits(rows, axes) for s in shared)
    return rows if fits else None


def expand_mask(call: Call) -> int | None:
    """How many records attention has whose bias is shared; None where something else is."""
    data, shared = call.data, call.shared
    axes, rows = data[0].dim(), data[0].shape[0]
    bias = call.kwargs.get("attn_mask", call.args[3] if len(call.args) > 3 else None)
    only = all(s is bias for s in shared) and all(s.fits(rows, axes) for s in shared)
    return rows if only and all(t.dim() == axes and t.shape[0] == rows for t in data) else None


def expand_joined(call: Call) -> int | None:
    """How many records tensors have that are joined along another axis than the first."""
    data, shared, kwargs = call.data, call.shared, call.kwargs
    dim = call.args[1] if len(call.args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    axes = data[0].dim()
    dim = dim + axes + (call.name == "stack") if isinstance(dim, int) and dim < 0 else dim
    rows = data[0].shape[0] if axes else 0
    fits = (
        isinstance(dim, int)
        and dim > 0
        and all(t.dim() == axes and t.shape[0] == rows for t in (*data, *shared))
    )
    return rows if fits and all(s.fits(rows, axes) for s in shared) else None


def expand_product(call: Call) -> int | None:
    """How many rows products of matrices have, of which one is shared."""
    data, shared = call.data, call.shared
    axes, rows = data[0].dim(), data[0].shape[0] if data[0].dim() else 0
    fits = axes > 2 and len(data) == len(shared) == 1 and 2 <= shared[0].dim() <= axes
    return rows if fits and shared[0].fits(rows, axes) else None


def rows_of_copies(call: Call) -> int | None:
    """How many records operations row by row have on copies of what is shared, one a record."""
    rows = {len(s) if s.dim() and s.rows_are_equal else 0 for s in call.shared}
    fits = rows == {call.shared[0].owner.rows} and row_by_row(call)
    return max(rows) or None if fits else None


def row_by_row(call: Call) -> bool:
    """Whether a row of the result is made of the same row of each argument, whatever is in them.

    Others may give a record the copy of another one: those with indices, where the records' values
    say so, which none of the made-up ones need have had.
    """
    axes = {t.dim() for t in (*call.data, *call.shared)}
    if call.name in ALONG_AN_AXIS:
        place, usual = ALONG_AN_AXIS[call.name]
        axis = call.kwargs.get("dim", call.args[place] if len(call.args) > place else usual)
        return len(axes) == 1 and axis not in (0, -max(axes))
    if call.name == "einsum":
        return one_letter_first(str(call.args[0]))
    return call.name in BY_MATRICES and axes <= {3, 4} and len(axes) == 1


def one_letter_first(equation: str) -> bool:
    """Whether all terms of an einsum, the result's too, begin with one letter and have it once."""
    terms = equation.replace(" ", "").replace("->", ",").split(",")
    letters = {term[:1] for term in terms}
    once = all(term.count(term[0]) == 1 for term in terms if term)
    return "->" in equation and "." not in equation and len(letters) == 1 and once


def set_where(call: Call) -> bool:
    """Do ``data[mask] = shared``, of mask tokens say; False where the call is another.

    What is shared has the axes that the mask leaves, so that all chosen places get the same.
    """
    data, mask, value = call.args
    masks = isinstance(mask, Tensor) and mask.dtype == torch.bool
    if not masks or [id(s) for s in call.shared] != [id(value)]:
        return False
    free = data.dim() - mask.dim()
    if value.dim() > free:
        return False
    data.copy_(torch.where(mask[(..., *[None] * free)], value.to(data.dtype), data))
    return True


EXPANDED: dict[str, Callable[[Call], int | None]] = {
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), expand_joined),
    **dict.fromkeys(PRODUCTS, expand_product),
    "scaled_dot_product_attention": expand_mask,
}
