"""``torch.func`` where it falls short: loops without warnings, other operations and parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpoptim.runtime.torch_internals import warn_of_vmap_loops


def vmap(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``torch.func.vmap``, which says nothing of operations that it runs for one after the other.

    They are the caller's own doing, and nothing that a user could change.
    """

    def run(*args: Any) -> Any:
        warn_of_vmap_loops(False)
        try:
            return torch.func.vmap(function, **options)(*args)
        finally:
            warn_of_vmap_loops(True)  # as PyTorch begins; it does not tell what it was

    return run


class ByHand(TorchFunctionMode):
    """Embeddings whose padding has no gradient, which ``vmap`` over tables does not heed.

    And weight norm, whose fused kernel ``vmap`` calls once for each record.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "_weight_norm":
            return weight_norm(*args, **kwargs)
        given = dict(zip(("input", "weight", "padding_idx"), args, strict=False)) | kwargs
        padding = given.get("padding_idx")
        if func is not F.embedding or padding is None:
            return func(*args, **kwargs)
        looked_up = func(given["input"], given["weight"])
        padding = padding + given["weight"].shape[0] if padding < 0 else padding
        return torch.where((given["input"] == padding)[..., None], looked_up.detach(), looked_up)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """``v`` with the norms ``g`` over all axes but ``dim``; over all of them, where it is -1."""
    axes = [axis for axis in range(v.dim()) if dim == -1 or axis != dim]
    # over no axes, PyTorch would sum over all
    squared = v.square().sum(axes, keepdim=True) if axes else v.square()
    return v * (g / squared.sqrt())


def called_with(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call a module with these tensors instead of the parameters of these names.

    Wherever a parameter stands, each place once: left to itself, ``functional_call`` would replace
    those of a module that stands in two places twice, and put back the first replacement, so that
    the module had lost its parameters.
    """
    own = {id(p): tensors[name] for name, p in module.named_parameters() if name in tensors}
    places = {
        f"{name}.{key}" if name else key: own[id(p)]
        for name, part in module.named_modules()
        for key, p in part._parameters.items()
        if id(p) in own
    }
    return torch.func.functional_call(module, places, args, kwargs, tie_weights=False)
