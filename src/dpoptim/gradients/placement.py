"""Where a model's parameters are: some wrappers keep a part of each, and put the whole in its place
for forward and backward passes.
"""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import nn


class Placement(Protocol):
    """What an engine must know of it.

    Attributes:
        hooks: of its own on the model, by id, while it is attached.
        used: from what modules hold in forward passes to what they hold otherwise, which
            optimizers move; empty where these are the same.
    """

    hooks: Collection[int]

    @property
    def used(self) -> Mapping[nn.Parameter, nn.Parameter]: ...

    def in_forward(self) -> AbstractContextManager[None]:
        """A ``with`` in which modules hold forward passes' parameters, maybe without values."""
        ...

    def settle(self) -> None:
        """Let modules hold what optimizers move, between passes."""
        ...


class InPlace:
    """Parameters are always where they are."""

    hooks: Collection[int] = ()

    @property
    def used(self) -> Mapping[nn.Parameter, nn.Parameter]:
        return {}

    def in_forward(self) -> AbstractContextManager[None]:
        return nullcontext()

    def settle(self) -> None:
        pass
