"""What takes the place of a whole module's forward pass, where one input and one output are not enough."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn


class Runner(Protocol):
    """Runs one module, on the books.

    Attributes:
        books_children: whether the module's children are booked by themselves.
    """

    books_children: bool

    def __call__(self, rows: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module on the caller's arguments; ``rows``: records in the model's current input, where known."""
        ...


def holder(parameters: Mapping[str, Tensor | None]) -> nn.Module:
    """A module that owns just these parameters: for entries in the books that are about some of a module's parameters."""
    module = nn.Module()
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.Parameter):
            module.register_parameter(name, parameter)
    return module
