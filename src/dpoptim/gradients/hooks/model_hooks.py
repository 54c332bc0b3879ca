"""Hooks on modules, which hold what they tell weakly, so that no copy of a model has an engine."""

import weakref
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from dpoptim.gradients.backward_pass import BackwardRecorder, narrow_dtype
from dpoptim.gradients.hooks.forwards import AS_THEY_ARE
from dpoptim.gradients.hooks.refusals import batch_statistics
from dpoptim.gradients.layers.normalisation import Normalisation, sees_batch
from dpoptim.runtime.torch_internals import never_compiled

Told = TypeVar("Told")


class Sees(Protocol):
    """Told what a model is given, and returns."""

    def see_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def see_output(self, output: Any) -> Any: ...


class WeakHook(Generic[Told]):
    """A hook that tells an object; a copy of its model, or a file of one, tells nobody.

    Args:
        told: None: nobody.
        about: the same in a copy.
    """

    def __init__(self, told: Told | None, *about: Any) -> None:
        self._told = None if told is None else weakref.ref(told)
        self._about = about

    @property
    def told(self) -> Told | None:
        return None if self._told is None else self._told()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(None, *self._about)

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (None, *self._about)


class InputHook(WeakHook[Sees]):
    """Tells what the model is given, and hands on what it shall have instead."""

    @never_compiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if (hooks := self.told) is None else hooks.see_input(args, kwargs)


class OutputHook(WeakHook[Sees]):
    """Tells what the model returns when its forward pass is over; the same in the other way."""

    @never_compiled
    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> Any:
        return None if (hooks := self.told) is None else hooks.see_output(output)


class FrozenHook(WeakHook[BackwardRecorder]):
    """Notes torch.autocast around a frozen module, by the name of this."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder = self.told
        if recorder is None or not torch.is_grad_enabled() or AS_THEY_ARE.get():
            return
        (label,) = self._about
        for value in (*args, *kwargs.values()):
            # nothing else has gradients that come through here
            if isinstance(value, Tensor) and value.requires_grad:
                narrow_dtype(recorder, label, value.device)


class ModeHook:
    """Refuses each forward pass of a layer that would mix records in its mode as it is then.

    **Guarantee.** While a model is attached, no batch normalisation of it that was called as a
    module, by the model or by the loop, has run where it would see the batch, whatever was switched
    after attaching. (Called by its ``forward``, one with trained weights goes by the statistics it
    holds, and one that writes statistics is found by its buffers.)
    """

    def __init__(self, label: str | None) -> None:
        self._label = label

    def __call__(self, module: Normalisation, args: tuple[Any, ...]) -> None:
        if self._label is not None and sees_batch(module):
            raise batch_statistics(self._label, module)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModeHook":
        return ModeHook(None)

    def __reduce__(self) -> tuple[type["ModeHook"], tuple[None]]:
        return ModeHook, (None,)
