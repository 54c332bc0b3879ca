"""Calls of PyTorch's that a program makes by itself, watched while a run is attached."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

Around = Callable[[Tensor, bool], AbstractContextManager[None]]


class _Backward:
    """A stand-in for ``torch.autograd.backward``, which ``loss.backward()`` calls."""

    honest = staticmethod(torch.autograd.backward)
    around: ClassVar[list[Around]] = []

    @staticmethod
    def run(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        alone = isinstance(tensors, list | tuple) and len(tensors) == 1
        loss = tensors[0] if alone else tensors
        with ExitStack() as inside:
            if grad_tensors is None and isinstance(loss, Tensor):
                for each in tuple(_Backward.around):
                    inside.enter_context(each(loss, kwargs.get("inputs") is None))
            _Backward.honest(tensors, grad_tensors, *args, **kwargs)


@contextmanager
def backward_watched(around: Around) -> Iterator[None]:
    """Run every ``loss.backward()`` of the program inside of what ``around`` returns; may overlap.

    Not those that are given what to multiply gradients by.

    Args:
        around: of a loss, and whether all leaves get their gradients (no ``inputs=`` are named).
    """
    _Backward.around.append(around)
    vars(torch.autograd)["backward"] = _Backward.run
    try:
        yield
    finally:
        _Backward.around.remove(around)
        if not _Backward.around:
            vars(torch.autograd)["backward"] = _Backward.honest


Scaled = Callable[[Tensor], None]


class _Scale:
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


@contextmanager
def scaling_watched(watch: Scaled) -> Iterator[None]:
    """Call ``watch`` with each tensor that a GradScaler which is on will scale; may overlap."""
    _Scale.watches.append(watch)
    patched: Any = torch.amp.GradScaler
    patched.scale = _Scale.run
    try:
        yield
    finally:
        _Scale.watches.remove(watch)
        if not _Scale.watches:
            patched.scale = _Scale.honest


Plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
Measured = Callable[[torch.optim.Optimizer, Any], None]


class _Plateau:
    """A stand-in for ``ReduceLROnPlateau.step``."""

    honest = staticmethod(Plateau.step)
    watches: ClassVar[list[Measured]] = []

    @staticmethod
    def run(scheduler: Plateau, metrics: Any, *args: Any, **kwargs: Any) -> None:
        for watch in tuple(_Plateau.watches):
            watch(scheduler.optimizer, metrics)
        _Plateau.honest(scheduler, metrics, *args, **kwargs)


@contextmanager
def plateaus_watched(watch: Measured) -> Iterator[None]:
    """Call ``watch`` with the optimizer and the metrics of a ReduceLROnPlateau; may overlap."""
    _Plateau.watches.append(watch)
    patched: Any = Plateau
    patched.step = _Plateau.run
    try:
        yield
    finally:
        _Plateau.watches.remove(watch)
        if not _Plateau.watches:
            patched.step = _Plateau.honest
