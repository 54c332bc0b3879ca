"""Calls of PyTorch's that a program makes by itself, watched while a run is attached."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

Around = Callable[[Tensor, bool], AbstractContextManager[None]]


class StandIn:
    """Call in the place of a function while anybody watches it.

    Attributes:
        honest: the function.
        run: the stand-in.
        watches: told of calls; they may overlap.
    """

    honest: ClassVar[Any]
    run: ClassVar[Any]
    watches: ClassVar[list[Any]]


@contextmanager
def in_place_of(owner: object, name: str, stand_in: type[StandIn], watch: object) -> Iterator[None]:
    """Put a stand-in where others look a function up, until its last watch goes."""
    stand_in.watches.append(watch)
    setattr(owner, name, stand_in.run)
    try:
        yield
    finally:
        stand_in.watches.remove(watch)
        if not stand_in.watches:
            setattr(owner, name, stand_in.honest)


class _Backward(StandIn):
    """A stand-in for ``torch.autograd.backward``, which ``loss.backward()`` calls."""

    honest = staticmethod(torch.autograd.backward)
    watches: ClassVar[list[Around]] = []

    @staticmethod
    def run(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        alone = isinstance(tensors, list | tuple) and len(tensors) == 1
        loss = tensors[0] if alone else tensors
        with ExitStack() as inside:
            if grad_tensors is None and isinstance(loss, Tensor):
                for each in tuple(_Backward.watches):
                    inside.enter_context(each(loss, kwargs.get("inputs") is None))
            _Backward.honest(tensors, grad_tensors, *args, **kwargs)


def backward_watched(around: Around) -> AbstractContextManager[None]:
    """Run every ``loss.backward()`` of the program inside of what ``around`` returns.

    Not those that are given what to multiply gradients by.

    Args:
        around: of a loss, and whether all leaves get their gradients (no ``inputs=`` are named).
    """
    return in_place_of(torch.autograd, "backward", _Backward, around)


Scaled = Callable[[Tensor], None]


class _Scale(StandIn):
    """A stand-in for ``GradScaler.scale``, of any device."""

    honest = staticmethod(torch.amp.GradScaler.scale)
    watches: ClassVar[list[Scaled]] = []

    @staticmethod
    def run(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        if scaler.is_enabled():
            for output in [outputs] if isinstance(outputs, Tensor) else outputs:
                for watch in _Scale.watches if isinstance(output, Tensor) else ():
                    watch(output)
        return _Scale.honest(scaler, outputs)


def scaling_watched(watch: Scaled) -> AbstractContextManager[None]:
    """Call ``watch`` with each tensor that a GradScaler which is on will scale."""
    return in_place_of(torch.amp.GradScaler, "scale", _Scale, watch)


Plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
Measured = Callable[[torch.optim.Optimizer, Any], None]


class _Plateau(StandIn):
    """A stand-in for ``ReduceLROnPlateau.step``."""

    honest = staticmethod(Plateau.step)
    watches: ClassVar[list[Measured]] = []

    @staticmethod
    def run(scheduler: Plateau, metrics: Any, *args: Any, **kwargs: Any) -> None:
        for watch in tuple(_Plateau.watches):
            watch(scheduler.optimizer, metrics)
        _Plateau.honest(scheduler, metrics, *args, **kwargs)


def plateaus_watched(watch: Measured) -> AbstractContextManager[None]:
    """Call ``watch`` with the optimizer and the metrics of a ReduceLROnPlateau."""
    return in_place_of(Plateau, "step", _Plateau, watch)
