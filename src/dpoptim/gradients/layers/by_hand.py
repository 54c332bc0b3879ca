"""Operations that ``vmap`` does not serve, or not rightly, written out in others."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


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
