"""How a loop may call a model with a batch: as its loss does, or as batches and models look."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.gradients.hooks.seen_outputs import tensors_of
from dpoptim.runtime.torch_internals import is_functorch_tensor, never_compiled, pytree
from dpoptim.training.trials.compared_batches import own_containers

Call = tuple[tuple[Any, ...], dict[str, Any]]
# what a model may want to be called without
LABELS = ("labels", "label", "target", "targets", "y")


class Called(BaseException):
    """Ends a loss where it calls the model; none of the exceptions that a loss would catch."""


def call_of_loss(
    loss: Callable[[nn.Module, Any], Any] | None, model: nn.Module, batch: Any
) -> list[Call]:
    """Arguments of a loss's first call of the model that trains it; none if it makes no call.

    Calls that came before, of a teacher's branch or for labels, may pass through other layers; they
    count where none trains it. So does one on which the model raises: it may want autocast.
    """
    seen = dict[bool, Call]()  # by whether gradients were on

    @never_compiled
    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if inside_of_torch_func((args, kwargs)):
            return
        if torch.is_grad_enabled():
            seen[True] = args, kwargs
        else:
            seen.setdefault(False, (args, kwargs))

    @never_compiled
    def stop(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        trains = any(x.requires_grad for x in tensors_of(output))
        if trains and not inside_of_torch_func((args, kwargs, output)):
            raise Called

    if loss is None:
        return []
    hooks = [
        model.register_forward_pre_hook(note, prepend=True, with_kwargs=True),
        model.register_forward_hook(stop, with_kwargs=True),
    ]
    try:
        with torch.enable_grad():
            loss(model, own_containers(batch))
    except Called:
        pass
    except Exception:  # whatever the user's loss raises on made-up records
        pass
    finally:
        for hook in hooks:
            hook.remove()
    found = [seen[key] for key in (True, False) if key in seen][:1]
    return pytree.tree_map_only(Tensor, Tensor.detach, found)


def inside_of_torch_func(values: Any) -> bool:
    """Whether tensors are of a transform, such as vmap's, which they may not leave."""
    return any(map(is_functorch_tensor, tensors_of(values)))


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
