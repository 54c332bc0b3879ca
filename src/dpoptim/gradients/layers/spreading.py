"""Operations whose arguments tell how many rows data have, and which meet a shared parameter.

Each function is given a call, and returns how long the records' axis is, the first one; None where
the call does not tell.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

PRODUCTS = ("matmul", "bmm", "__matmul__", "__rmatmul__")


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
    """How many records any operation has on copies of what is shared, one for each record."""
    rows = {len(s) if s.dim() and s.rows_are_equal else 0 for s in call.shared}
    return max(rows) or None if rows == {call.shared[0].owner.rows} else None


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
