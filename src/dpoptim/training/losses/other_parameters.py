"""Parameters beside the model's that a loss depends on: they would learn, unprotected."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from dpoptim.errors import PrivacyError
from dpoptim.gradients.placement import Placement


def refuse_other_parameters(losses: Tensor, model: nn.Module, placement: Placement) -> None:
    """Refuse losses whose graph ends in trainable parameters that are not the model's own.

    Leaves that are no ``nn.Parameter``, such as inputs to differentiate by, are none of them.

    Raises:
        PrivacyError: with what to do with a loss that has weights, and with a teacher.
    """
    if not {*map(id, parameters_below(losses))} <= own_parameters(model, placement):
        raise PrivacyError(
            "the loss depends on trainable parameters outside of the model (a loss with weights of "
            "its own, a second model): their gradients would be neither clipped nor noisy. Fix: "
            "attach one module that holds both, torch.nn.ModuleList([model, criterion]), and its "
            "optimizers; what does not train, such as a teacher, has requires_grad_(False), or is "
            "run in torch.no_grad()."
        )


def own_parameters(model: nn.Module, placement: Placement) -> set[int]:
    """By ``id``, those in which a graph of the model's may end."""
    return {id(p) for p in (*model.parameters(), *placement.used, *placement.used.values())}


def parameters_below(losses: Tensor) -> Iterator[nn.Parameter]:
    """Parameters in which a graph ends."""
    nodes: list[Any] = [losses.grad_fn]
    seen = set(nodes)
    for node in nodes:  # which grow meanwhile
        children = () if node is None else node.next_functions
        if not children and isinstance(leaf := getattr(node, "variable", None), nn.Parameter):
            yield leaf
        for child, _ in children:
            if child not in seen:
                seen.add(child)
                nodes.append(child)
