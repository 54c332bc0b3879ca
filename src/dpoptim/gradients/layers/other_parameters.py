"""Calls of modules with other tensors in the places of their parameters."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


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
