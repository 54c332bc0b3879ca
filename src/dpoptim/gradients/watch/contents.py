"""Modules, parameters and buffers of a model, in one walk: each step asks for them."""

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor, nn


@dataclass(frozen=True)
class Contents:
    """Parts that a model is made of, each once, under its first name.

    Attributes:
        modules, parameters, buffers: by name, in the order of ``named_modules`` and the like.
    """

    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    buffers: list[tuple[str, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        found = cls()
        met: tuple[set[int], set[int], set[int]] = (set(), set(), set())

        def visit(name: str, module: nn.Module) -> None:
            met[0].add(id(module))
            found.modules.append((name, module))
            prefix = f"{name}." if name else ""
            for key, p in module._parameters.items():
                if p is not None and id(p) not in met[1]:
                    met[1].add(id(p))
                    found.parameters.append((prefix + key, p))
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in met[2]:
                    met[2].add(id(buffer))
                    found.buffers.append((prefix + key, buffer))
            for key, child in module._modules.items():
                if child is not None and id(child) not in met[0]:
                    visit(prefix + key, child)

        visit("", model)
        return found

    def constants(self, trained: Container[int]) -> list[tuple[str, Tensor]]:
        """Tensors that training leaves alone: buffers, and parameters but those with such ids."""
        return self.buffers + [(name, p) for name, p in self.parameters if id(p) not in trained]

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.parameters if p.requires_grad]


def trainable_names(module: nn.Module) -> list[str]:
    """Names of the parameters that train in a module."""
    return [name for name, _ in Contents.of(module).trainable()]
