"""Parametrizations that a forward pass adds, and leaves behind where something raises in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

ADDED = "parametrizations"  # the child that torch.nn.utils.parametrize gives a module


@contextmanager
def parametrizations_kept(model: nn.Module) -> Iterator[None]:
    """Restore modules to the parametrizations that they had, if what runs meanwhile raises.

    Adapters of parameters (``target_parameters`` of peft) add theirs around each forward pass;
    where ``vmap`` forbids a step of it, they are not taken off again.
    """
    before = {
        name: (module, type(module), [{**held} for held in held_by(module)])
        for name, module in model.named_modules()
    }
    try:
        yield
    except BaseException:
        for name, (module, kind, contents) in before.items():
            other = module._modules.get(ADDED) is not contents[0].get(ADDED)
            if other or ADDED in name.split("."):
                module.__class__ = kind
                for held, first in zip(held_by(module), contents, strict=True):
                    held.clear()
                    held.update(first)
        raise


def held_by(module: nn.Module) -> list[dict[str, Any]]:
    """A module's children, parameters and buffers."""
    return [module._modules, module._parameters, module._buffers]
