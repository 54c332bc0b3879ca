"""Random numbers that never change, to compare runs of a model that draws noise."""

from typing import Any

import torch
from torch import Tensor

from dpoptim.torch_internals import TorchDispatchMode, pytree

VALUE = 0.5  # of whatever is drawn; a uniform number, and a normal one that is not zero


class FixedNoise(TorchDispatchMode):
    """Fills what random operators return with constants, the same for a record in any batch.

    Dropout keeps everything, permutations turn the order round, so that what mixes
    records by them is seen, and choices take the first. What draws inside a fused kernel
    stays random.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.split(".")[0]
        if torch.Tag.nondeterministic_seeded not in func.tags or "attention" in name:
            return func(*args, **kwargs)
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        result = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._fix(leaf, name)
        return result

    def _fix(self, drawn: Tensor, name: str) -> None:
        if name.startswith("randperm"):
            drawn.copy_(torch.arange(len(drawn), device=drawn.device).flip(0))
        elif name.startswith("bernoulli") or drawn.dtype == torch.bool:
            drawn.fill_(1)
        else:
            drawn.fill_(VALUE if drawn.is_floating_point() else 0)
