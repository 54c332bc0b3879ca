"""A model's copy in more digits, which tells what records move from what rounding does."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.gradients.arithmetic.precision import NARROW
from dpoptim.gradients.backward_pass import nodes_below
from dpoptim.runtime.torch_internals import pytree

WIDENED = 1 << 27  # entries of a model that is copied, at most


def widened(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module | None:
    """Copy a model, and widen what has fewer digits; None where that fails, or takes much."""
    held = [*model.parameters(), *model.buffers()]
    if sum(each.numel() for each in held) > WIDENED:
        return None
    try:
        copied = copy.deepcopy(model)
        for each in (*copied.parameters(), *copied.buffers()):
            each.data = wider(each.data, dtype)
    except Exception:  # whatever the user's modules raise, or a device without float64
        return None
    return copied


def wider(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    narrower = (*NARROW, torch.float32) if dtype == torch.float64 else NARROW
    return tensor.to(dtype) if tensor.dtype in narrower else tensor


def widened_batch(batch: Any) -> Any:
    """A batch, or a model's arguments, with numbers in float64."""
    return pytree.tree_map(lambda x: wider(x, torch.float64) if isinstance(x, Tensor) else x, batch)


def reads(results: Any, model: nn.Module) -> bool:
    """Whether gradients of these results reach parameters of this model, as by a closure's name.

    Then what was computed on its copy is not the copy's alone, and does not tell of the model.
    """
    own = {id(p) for p in model.parameters()}
    return any(id(getattr(node, "variable", None)) in own for node in nodes_below(results))
