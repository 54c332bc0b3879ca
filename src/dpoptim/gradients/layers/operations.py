"""Operations of torch by name, as `SharedParameter` sees them: what they do to rows and axes."""

from collections.abc import Callable
from typing import Any

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
