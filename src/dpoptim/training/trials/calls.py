"""How a loop may call a model with a batch: as its loss does, or as batches and models look."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.runtime.torch_internals import never_compiled, pytree

Call = tuple[tuple[Any, ...], dict[str, Any]]
# what a model may want to be called without
LABELS = ("labels", "label", "target", "targets", "y")


class Called(BaseException):
    """Ends a loss where it calls the model; none of the exceptions that a loss would catch."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call


def call_of_loss(
    loss: Callable[[nn.Module, Any], Any] | None, model: nn.Module, batch: Any
) -> list[Call]:
    """Arguments of a loss's first call of the model; none if it makes no call."""

    @never_compiled
    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise Called((args, kwargs))

    if loss is None:
        return []
    # before those of others, which may gather parameters for a forward pass that never comes
    hook = model.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
    try:
        with torch.no_grad():
            loss(model, batch)
    except Called as error:
        detached = pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, error.call)
        return [detached]
    except Exception:  # whatever the user's loss raises on made-up records
        return []
    finally:
        hook.remove()
    return []


def calls(model: nn.Module, batch: Any) -> Iterator[Call]:
    """Ways to hand a collated batch to a model: its first part, several, or parts by name."""
    if isinstance(batch, dict):
        named = accepted(model, batch)
        yield (), named
        yield (), {key: value for key, value in named.items() if key not in LABELS}
        yield (batch,), {}
        yield (next(iter(batch.values())),), {}
    elif isinstance(batch, tuple | list):
        yield from calls(model, batch[0])
        for count in range(2, len(batch) + 1):
            yield tuple(batch[:count]), {}
        yield (batch,), {}
    elif isinstance(batch, Tensor):
        yield (batch,), {}


def accepted(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """The parts of a record that the model's forward pass has arguments for."""
    parameters = inspect.signature(model.forward).parameters
    if (
        any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        and not parameters.keys() & batch.keys()
    ):
        return dict(batch)
    return {key: value for key, value in batch.items() if key in parameters}
