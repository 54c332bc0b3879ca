"""Random numbers that never change, to compare runs of a model, or batches, that draw noise."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from dpoptim.torch_internals import DispatchMode, pytree

RARE = 2.0**-10  # below the probability of all but rare events
UNEVEN = 0.25


class FixedNoise(DispatchMode):
    """Fills what random operators return with constants, the same for a record in any batch.

    Dropout keeps everything, permutations turn the order round, so that what mixes
    records by them is seen; ranges, means and deviations are kept, as a batch may decide them.
    What draws inside a fused kernel stays random.

    Args:
        uniform: in (0, 1), what is drawn instead of a uniform or a normal number, on its scale.
        quantile: in (0, 1), where whole numbers are taken from their range, and up to which
            probability a coin shows tails.

    Attributes:
        drew: whether anything was drawn.
        by_others: whether by any generator but torch's own.
    """

    def __init__(self, uniform: float = 0.625, *, quantile: float = RARE) -> None:
        super().__init__()
        self._uniform, self._quantile = uniform, quantile
        self.drew = self.by_others = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = drawn_by(func)
        if not name:
            return func(*args, **kwargs)
        self.drew = True
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        self.by_others |= kwargs.get("generator") not in (None, torch.default_generator)
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if name == "bernoulli":
            given.setdefault("p", given["self"].clone())
        result = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._fix(leaf, name, given)
        return result

    def _fix(self, drawn: Tensor, name: str, given: dict[str, Any]) -> None:
        if name.startswith("randperm"):
            drawn.copy_(torch.arange(len(drawn), device=drawn.device).flip(0))
        elif name.startswith("bernoulli"):
            p = given.get("p", 0.5)
            ones = p > self._quantile
            drawn.copy_(ones) if isinstance(ones, Tensor) else drawn.fill_(ones)
        elif drawn.is_floating_point():
            least, width = scale_of(name, given)
            drawn.copy_(least + width * self._unit(drawn))
        else:
            least = given.get("low", given.get("from", 0))
            end = given.get("high", given.get("to"))
            values = end - least if isinstance(end, int) else 1
            drawn.fill_(least + int(self._quantile * values))

    def _unit(self, drawn: Tensor) -> Tensor:
        """Uneven along the last of several axes: what is even is nothing to a layer norm."""
        u = self._uniform
        if drawn.dim() < 2:
            return torch.full_like(drawn, u)
        places = torch.arange(drawn.shape[-1], device=drawn.device, dtype=drawn.dtype)
        return (u + UNEVEN * min(u, 1 - u) * places.sin()).expand_as(drawn)


@cache
def drawn_by(func: Any) -> str:
    """Name of an operator that draws random numbers; of another one, none."""
    name: str = func.__name__.split(".")[0]
    draws = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in name
    return name if draws else ""


def scale_of(name: str, given: dict[str, Any]) -> tuple[Any, Any]:
    """Zero and unit of what an operator draws: numbers or tensors."""
    if name.startswith("uniform"):
        least, end = given.get("from", 0.0), given.get("to", 1.0)
        return least, end - least
    if "normal" in name:
        return given.get("mean", 0.0), given.get("std", 1.0)
    if name.startswith("exponential"):
        return 0.0, 1 / given.get("lambd", 1.0)
    if name.startswith("cauchy"):
        return given.get("median", 0.0), given.get("sigma", 1.0)
    return 0.0, 1.0
